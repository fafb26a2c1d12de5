"""What made scores can be read from the arrays, and from the files they are written to."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest
import uproot
from tests.limits import without_room

import sonic_coffea as sonic
from sonic_coffea import errors, provenance
from sonic_coffea.testing import FakeModel, FakeServer


@pytest.fixture(scope="module")
def scores(server: sonic.LocalServer, tagger: sonic.Model, jets: ak.Array) -> Any:
    with sonic.connect(server):
        return tagger(jets)


def test_scores_name_model_and_server(
    scores: Any, server: sonic.LocalServer, tagger: sonic.Model
) -> None:
    record = provenance.of_scores(scores, scores[:7])
    (model,) = record["models"]
    assert model["servers"] == [server.url]
    assert (model["model"], model["version"]) == (tagger.name, "1")
    assert model["config_hash"] == tagger.config_hash
    assert len(model["digest"]) == 64
    assert record["packages"]["sonic-coffea"] == sonic.__version__
    assert {"python", "coffea", "awkward", "numpy", "tritonclient"} <= record["packages"].keys()
    json.dumps(record)


def test_servers_that_scored_nothing_are_not_named() -> None:
    model = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
    served = {"m": FakeModel.of(model, max_rows=1)}
    with FakeServer(served) as failing, FakeServer(served) as good:
        failing.fail(grpc.StatusCode.UNAVAILABLE, "no", times=99)
        with sonic.connect([failing.url, good.url]):
            pending = model.submit(ak.Array([[{"pt": float(n)} for n in range(20)]]))
            scores = pending.result()
        assert {server for (server, *_), _ in pending.statistics} == {failing.url, good.url}
    assert provenance.of_scores(scores)["models"][0]["servers"] == [good.url]


def test_digests_are_of_the_models_that_scored_rows() -> None:
    models = [sonic.Model(name, {"x": sonic.Row(["pt"])}, {"y": ["top"]}) for name in ("a", "b")]
    served = {m.name: replace(FakeModel.of(m), digest=f"file of {m.name}") for m in models}
    events = ak.Array([[{"pt": 1.0}], [{"pt": 2.0}]])
    with FakeServer(served) as server, sonic.connect(server.url):
        one, both = (sonic.Folds(models)(events, fold=fold) for fold in ([0, 0], [1, 0]))
        reverse = sonic.Folds(models[::-1])(events, fold=None)
    assert reverse.attrs["sonic"]["model"] == "b, a"
    assert reverse.attrs["sonic"]["digest"] == "file of b, file of a"
    assert one.attrs["sonic"]["digest"] == "file of a"
    assert [made_by["model"] for made_by in provenance.of_scores(one)["models"]] == ["a"]
    assert both.attrs["sonic"]["digest"] == "file of a, file of b"
    served["b"] = FakeModel.of(models[1])
    with FakeServer(served) as server, sonic.connect(server.url):
        both = sonic.Folds(models)(events, fold=[1, 0])
    assert both.attrs["sonic"]["digest"] == "file of a, unknown"


def test_combined_scores_name_all_that_made_them(tmp_path: Path) -> None:
    """All that made them is said, however they are put together, and also in files."""
    declared = [
        sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]}, version=number)
        for number in (1, 2)
    ]
    jets = ak.Array([[{"pt": 1.0}, {"pt": 2.0}], []])
    served = FakeModel.of(declared[0], versions=("1", "2"))
    with FakeServer({"m": served}) as server, sonic.connect(server.url):
        first, second = (model(jets) for model in declared)
    expected = provenance.of_scores(first, second)
    assert [record["version"] for record in expected["models"]] == ["1", "2"]
    for together in (
        ak.concatenate([first, second]),
        ak.concatenate([first, second, first]),
        ak.zip({"one": first.top, "two": second.top}),
        first.top - second.top,
        ak.with_field(first, second.top, "other")[:1],
    ):
        assert provenance.of_scores(together) == expected
    provenance.to_parquet(together, tmp_path / "x.parquet", together)
    assert provenance.read(tmp_path / "x.parquet") == expected
    assert len(provenance.of_scores(ak.concatenate([first, first]))["models"]) == 1
    inside = ak.Array({"jets": jets})
    inside["jets", "top"] = first.top
    with pytest.raises(errors.ConfigError, match="fields that are set in another array"):
        provenance.of_scores(inside)


def test_parquet_files_keep_the_record(scores: Any, tmp_path: Path) -> None:
    first, both = tmp_path / "one.parquet", tmp_path / "both.parquet"
    table, record = ak.zip({"top": ak.fill_none(scores.top, -1, axis=None)}), provenance.read
    provenance.to_parquet(table, first, scores)
    assert record(first) == provenance.of_scores(scores)
    assert ak.from_parquet(first).top.tolist() == table.top.tolist()
    provenance.to_parquet(table, both, record(first), scores)
    assert record(both) == record(first)
    assert set(tmp_path.iterdir()) == {first, both}
    nothing = {"models": [], "packages": {}}
    assert provenance.of_scores(nothing, scores) == provenance.of_scores(scores)
    # By default, that of what is written.
    provenance.to_parquet(ak.zip({"top": scores.top}), first)
    assert record(first) == provenance.of_scores(scores)
    with pytest.raises(errors.ConfigError, match="does not say what made it"):
        provenance.to_parquet(ak.Array({"top": [0.5]}), first)


def test_concurrent_writers_leave_a_whole_file(tmp_path: Path) -> None:
    """Each writes a whole file, and the last one stays."""
    path, record, writers = tmp_path / "x.parquet", {"models": [], "packages": {}}, 8

    def write(number: int) -> None:
        for _ in range(20):
            provenance.to_parquet(ak.Array({"x": [number] * (number + 1)}), path, record)

    with ThreadPoolExecutor(writers) as threads:
        assert len(list(threads.map(write, range(writers)))) == writers
    numbers = ak.from_parquet(path).x.tolist()
    assert numbers == [numbers[0]] * (numbers[0] + 1)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", ["text", [1.0], {"x": [1.0]}, [[1.0]], None], ids=str)
def test_files_hold_nothing_but_none(value: Any, tmp_path: Path) -> None:
    """awkward cannot write None over lists, or strings, of which there are none."""
    path, record = tmp_path / "x.parquet", {"models": [], "packages": {}}
    array = ak.to_packed(ak.zip({"y": ak.Array([value, None])[1:]}, depth_limit=1))
    provenance.to_parquet(array, path, record)
    assert ak.from_parquet(path).y.tolist() == [None]


def test_links_lead_to_the_new_file(tmp_path: Path) -> None:
    """Else whoever reads the file itself would go on with the old scores."""
    disk, record = tmp_path / "disk", {"models": [], "packages": {}}
    disk.mkdir()
    path, link = disk / "x.parquet", tmp_path / "link.parquet"
    provenance.to_parquet(ak.Array({"x": [1]}), path, record)
    link.symlink_to(path)
    provenance.to_parquet(ak.Array({"x": [2]}), link, record)
    assert link.is_symlink()
    assert ak.from_parquet(path).x.tolist() == [2]
    assert [*disk.iterdir()] == [path]


def test_failed_writes_leave_no_file(tmp_path: Path) -> None:
    path, record = tmp_path / "x.parquet", {"models": [], "packages": {}}
    provenance.to_parquet(ak.Array({"x": [1]}), path, record)
    with without_room(), pytest.raises(errors.ConfigError, match="cannot write .*File too large"):
        provenance.to_parquet(ak.Array({"x": [2]}), path, record)
    assert ak.from_parquet(path).x.tolist() == [1]
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (folder, path / "x.parquet", tmp_path / "nowhere" / "x.parquet"):
        with pytest.raises(errors.ConfigError, match="cannot write|exists") as caught:
            provenance.to_parquet(ak.Array({"x": [2]}), place, record)
        # coffea's skipbadfiles would drop the chunk of an OSError.
        assert caught.value.__cause__ is None
    assert set(tmp_path.iterdir()) == {path, folder}


def test_root_files_keep_the_record(scores: Any, tmp_path: Path) -> None:
    path = tmp_path / "scores.root"
    with uproot.recreate(path) as file:
        file["Events"] = {"top": ak.fill_none(scores.top, -1, axis=None)}
        provenance.to_root(file, scores)
    assert provenance.read(path) == provenance.of_scores(scores)


def test_values_and_files_without_a_record_are_errors(scores: Any, tmp_path: Path) -> None:
    for other in (ak.Array([1]), np.zeros(3), 0.5, None, "scores", {"models": None}):
        with pytest.raises(errors.ConfigError, match="array 1 does not say what made it"):
            provenance.of_scores(scores, other)
    with uproot.recreate(tmp_path / "x.root") as file:
        file["t"] = {"x": [1.0]}
    ak.to_parquet(ak.Array([1]), tmp_path / "x.parquet")
    for name in ("x.root", "x.parquet"):
        with pytest.raises(errors.ConfigError, match=f"{name} does not say"):
            provenance.read(tmp_path / name)
        for content in (b"", b"no such file format"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(errors.ConfigError, match=f"cannot read .*{name}: "):
                provenance.read(tmp_path / name)
        with pytest.raises(errors.ConfigError, match="cannot read .*nowhere"):
            provenance.read(tmp_path / "nowhere" / name)
    for of_others in ({"a": [1.0]}, "no JSON", "[1]"):
        with uproot.recreate(tmp_path / "y.root") as file:
            file["sonic"] = of_others
        with pytest.raises(errors.ConfigError, match="cannot read .*y.root: "):
            provenance.read(tmp_path / "y.root")
