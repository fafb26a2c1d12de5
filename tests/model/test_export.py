"""Training data are the tensors that are sent, with the declaration beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pyarrow.parquet as pq
import pytest
import uproot
from tests.commands import json_of, run

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.demo.samples import DATA
from sonic_coffea.scoring import export_files

JETS = ak.Array(
    [
        [
            {"pt": 50.0, "flavour": 5, "kind": "b", "pf": [{"pt": 1.0}, {"pt": 2.0}, {"pt": 3.0}]},
            {"pt": 40.0, "flavour": 4, "kind": "charm", "pf": []},
        ],
        [],
        [None, {"pt": 30.0, "flavour": 5, "kind": "b", "pf": [{"pt": 4.0}]}],
    ]
)
PT = sonic.Feature("pt", function="log", scale=0.3)
HEAVIEST = sonic.Row(sonic.Feature("heaviest", expression="max(pt)"), missing=0.0)


def model(**inputs: Any) -> sonic.Model:
    return sonic.Model("m", inputs or {"x": sonic.Row(PT)}, {"y": ["a"]})


@pytest.fixture
def exported(tmp_path: Path) -> Any:
    """Export objects to a file, and read it."""

    def read(declared: sonic.Model, jets: ak.Array = JETS, **options: Any) -> ak.Array:
        declared.export(jets, tmp_path / "train.parquet", **options)
        return ak.from_parquet(tmp_path / "train.parquet")

    return read


LAYOUTS: dict[str, dict[str, Any]] = {
    "numbers": {"x": sonic.Row([PT, "pt"]), "pf": sonic.Padded("pf.pt", 2), "mask": sonic.Mask()},
    "types": {"x": sonic.Row("pt", "float16"), "n": sonic.Row("flavour", "int64", axis_order="")},
    "strings": {"text": sonic.Row(["kind", "kind"], dtype="string")},
}


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_files_have_the_tensors_that_are_sent(
    sonic_server: Any, exported: Any, layouts: Any
) -> None:
    declared = model(**layouts)
    table = exported(declared)
    server = sonic_server(declared)
    declared(JETS)
    (request,) = server.requests
    for name, tensor in request.inputs.items():
        if tensor.dtype == object:
            assert table[name].tolist() == np.vectorize(bytes.decode)(tensor).tolist()
        else:
            column = ak.to_numpy(table[name])
            assert column.dtype == tensor.dtype
            np.testing.assert_array_equal(column, tensor)


def test_large_tensors_are_written_piece_by_piece(exported: Any, tmp_path: Path) -> None:
    """So that it takes no memory for the tensors of all rows."""
    counts = np.arange(40) % 3
    jets = ak.zip(
        {"pf": ak.unflatten(np.arange(counts.sum()) + 1.0, counts), "n": counts}, depth_limit=1
    )
    table = exported(model(pf=sonic.Bucketed("pf", (1, 1_000_000))), jets, labels={"count": "n"})
    assert pq.ParquetFile(tmp_path / "train.parquet").num_row_groups > 1
    assert table["count"].tolist() == counts.tolist()
    assert ak.num(table.pf, axis=2)[:, 0].tolist() == [1, 1, 1_000_000] * 13 + [1]
    sums = ak.sum(ak.flatten(table.pf, axis=2), axis=1)
    assert sums.tolist() == ak.sum(jets.pf, axis=1).tolist()


def test_rows_of_lists_have_the_form_in_which_they_leave(exported: Any) -> None:
    padded = model(
        pf=sonic.Bucketed("pf.pt", (1, 4)), mask=sonic.Mask(beside="pf"), jet=sonic.Row("pt")
    )
    table = exported(padded)
    assert table.pf.tolist() == [[[1.0, 2.0, 3.0, 0.0]], [[0.0]], [[4.0]]]
    assert table["mask"].tolist() == [[[1.0, 1.0, 1.0, 0.0]], [[0.0]], [[1.0]]]
    assert table.jet.tolist() == [[50.0], [40.0], [30.0]]
    assert exported(padded, JETS[2:]).pf.type.content == table.pf.type.content
    graphs = model(pf=sonic.Flat("pf.pt"), jet=sonic.Row("pt"))
    table = exported(graphs)
    assert table.pf.tolist() == [[[1.0], [2.0], [3.0]], [], [[4.0]]]
    assert table.row_splits.tolist() == [[0, 3], [0, 0], [0, 1]]
    assert table.jet.tolist() == [[50.0], [40.0], [30.0]]
    both = model(pf=padded.inputs["pf"], x=sonic.Flat(["pf.pt", "pt"], axis_order="FL"))
    table = exported(both, labels={"pt": "pt", "large": "pt * 1e20"})
    assert table.pf.tolist() == [[[1.0, 2.0, 3.0, 0.0]], [[0.0]], [[4.0]]]
    assert table.x.tolist() == [[[1.0, 2.0, 3.0], [50.0] * 3], [[], []], [[4.0], [30.0]]]
    assert table.pt.tolist() == [50.0, 40.0, 30.0]
    assert table.large.tolist() == [50.0 * 1e20, 40.0 * 1e20, 30.0 * 1e20]
    for declared in (padded, graphs, both):
        none = exported(declared, JETS[1:2])
        assert (len(none), none.fields) == (0, list(declared.pack(JETS)))


def test_labels_and_weights_are_of_the_same_rows(exported: Any) -> None:
    labels = {"is_b": "flavour == 5", "kind": JETS.kind, "event": np.asarray([7, 8, 9])}
    table = exported(model(), labels=labels, weights="pt / 10")
    assert table.is_b.tolist() == [1.0, 0.0, 1.0]
    assert table.kind.tolist() == ["b", "charm", "b"]
    assert table.event.tolist() == [7, 7, 9]
    assert table.weight.tolist() == [5.0, 4.0, 3.0]


def test_declarations_are_compared_with_those_of_the_training(tmp_path: Path) -> None:
    file, other_file = tmp_path / "train.parquet", tmp_path / "other.parquet"
    model().export(JETS, file)
    sonic.Model("renamed", model().inputs, {"y": ["signal"]}, version=3).check_export(file)
    other = model(x=sonic.Row(sonic.Feature("pt", function="log", scale=0.4)))
    with pytest.raises(errors.ContractError) as caught:
        other.check_export(file)
    for made, scale in (("exported", 0.3), ("declared", 0.4)):
        layout = f"{made} Row(fields=(Feature('pt', scale={scale}, function='log'),)"
        assert layout in str(caught.value)
    parts = {name: sonic.Padded("pf.pt", 2) for name in ("pf", "sv")}
    model(**parts, mask=sonic.Mask()).export(JETS, file)
    turned = {name: parts[name] for name in ("sv", "pf")}
    with pytest.raises(errors.ContractError, match="input 'mask'\n.*beside='pf'.*\n.*beside='sv'"):
        model(**turned, mask=sonic.Mask()).check_export(file)
    model(**turned, mask=sonic.Mask(beside="pf")).check_export(file)
    sonic.provenance.to_parquet(JETS.pt, other_file, {"models": [], "packages": {}})
    with pytest.raises(errors.ConfigError, match="expected a file that export has written"):
        model().check_export(other_file)
    ak.to_parquet(JETS, other_file)
    with pytest.raises(errors.ConfigError, match="does not say what made"):
        model().check_export(other_file)
    with pytest.raises(errors.ConfigError, match="was not written by this package; name another"):
        model().export(JETS, other_file)
    with pytest.raises(errors.ConfigError, match="cannot write .*nowhere"):
        model().export(JETS, tmp_path / "nowhere" / "train.parquet")


@pytest.mark.parametrize(
    ("layouts", "options", "message"),
    [
        ({}, {"labels": ["pt"]}, "expected labels as a dict of names and columns, got ..pt"),
        ({}, {"labels": {"x": "pt"}}, "label 'x' is the name of an input"),
        ({}, {"labels": {"weight": "pt"}, "weights": "pt"}, "label 'weight' is the name of"),
        ({}, {"labels": {"y": "ptt"}}, "no field 'ptt'; did you mean 'pt'"),
        ({}, {"labels": {"y": JETS.pt[:2]}}, "expected a label 'y' for each of 3 events, got 2"),
        ({}, {"labels": {"y": ak.Array([1, None, None])}}, "label 'y': event 2 has None"),
        ({}, {"labels": {"y": "flavour + 9007199254740988"}}, "label 'y': float64 rounds whole"),
        ({"x": HEAVIEST}, {"labels": {"y": JETS.pt}}, r"difference is in event 0\); choose both"),
        ({"x": sonic.Row("pt", "bfloat16")}, {}, "bfloat16, which Parquet files do not have"),
    ],
)
def test_bad_exports_are_refused_and_leave_no_file(
    layouts: Any, options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(errors.SonicError, match=message):
        model(**layouts).export(JETS, tmp_path / "train.parquet", **options)
    assert not list(tmp_path.iterdir())


def test_files_are_exported_by_a_command(tmp_path: Path) -> None:
    (tmp_path / "analysis.py").write_text(
        "import sonic_coffea as sonic\n"
        'inputs = {"x": sonic.Row(["pt", "mass"]), "pf": sonic.Padded("constituents.pt", 4)}\n'
        'model = sonic.Model("m", inputs, {"y": None})\n'
        'other = sonic.Model("m", {**inputs, "x": sonic.Row(["mass", "pt"])}, {"y": None})\n'
    )
    arguments = [DATA / "QCD_1.root", "--collection", "FatJet", "-o", "train.parquet"]
    arguments += ["--label", "heavy=mass > 50", "--weight", "event % 7", "--chunksize", "300"]
    scored = tmp_path / ".train.parquet.parts" / "of an interrupted run of scores"
    scored.mkdir(parents=True)
    exported = json_of("export", *arguments, "--declare", "analysis:model", cwd=tmp_path)
    assert scored.is_dir()
    scored.rmdir()
    scored.parent.rmdir()
    table = ak.from_parquet(tmp_path / "train.parquet")
    assert exported == {"path": "train.parquet", "rows": len(table)}
    with uproot.open({DATA / "QCD_1.root": "Events"}) as tree:
        events = tree.arrays(["event", "FatJet_pt", "FatJet_mass"])
    jets = {name: ak.flatten(events[f"FatJet_{name}"]) for name in ("pt", "mass")}
    assert table.x.tolist() == ak.to_numpy(list(jets.values())).T.tolist()
    assert table.heavy.tolist() == (jets["mass"] > 50).to_list()
    weights = np.repeat(events.event.to_numpy(), ak.num(events.FatJet_pt)) % 7
    assert table.weight.tolist() == weights.tolist()
    assert str(table.pf.type) == f"{len(table)} * 1 * 4 * float32"
    assert sorted(path.name for path in tmp_path.glob("*.parquet*")) == ["train.parquet"]
    against = ["check", "grpc://127.0.0.1:1", "m", "--trained-on", "train.parquet", "--declare"]
    wrong = run(*against, "analysis:other", cwd=tmp_path)
    assert "was exported with other inputs" in wrong.stderr
    assert "was exported" not in run(*against, "analysis:model", cwd=tmp_path).stderr


def test_objects_that_are_not_sent_are_not_exported(tmp_path: Path) -> None:
    tagger, files = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": None}), [DATA / "QCD_1.root"]

    def export(features: Any) -> int:
        options = {"collection": "FatJet", "labels": {"pt": "pt"}, "features": features}
        return export_files(tagger, files, tmp_path / "train.parquet", **options)

    with pytest.raises(errors.ConfigError, match="ak.mask the objects themselves"):
        export(lambda events: sonic.Request(events.FatJet, mask=events.FatJet.pt > 400))
    rows = export(lambda events: ak.mask(events.FatJet, events.FatJet.pt > 400))
    table = ak.from_parquet(tmp_path / "train.parquet")
    assert 0 < rows == len(table) == ak.sum(table.pt > 400)
    assert table.x[:, 0].tolist() == table.pt.tolist()


def test_no_rows_have_the_shape_of_rows() -> None:
    declared = model(x=sonic.Bucketed("pf.pt", (2, 4)), mask=sonic.Mask())
    shapes = {name: tensor.shape for name, tensor in declared.pack(JETS[:0]).items()}
    assert shapes == {"x": (0, 1, 2), "mask": (0, 1, 2)}


def test_variations_and_graphs_are_not_packed() -> None:
    with pytest.raises(errors.InputError, match="pack variations one by one"):
        model().pack(sonic.Variations(nominal=JETS))
    with pytest.raises(errors.InputError, match="in memory"):
        model().pack(ak.Array(JETS.layout.to_typetracer()))
    with pytest.raises(errors.InputError, match="in memory"):
        sonic.Row("pt").pack(ak.Array(JETS.layout.to_typetracer()))
