"""Models declared by their files: ONNX and trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from tests.commands import run
from tests.onnx_files import save_onnx

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ContractError

NAMES = ["pt", "eta", "phi"]
PHOTONS = ak.Array(
    [[{"pt": 1.0, "eta": 0.5, "phi": 2.0}], [], [{"pt": -1.0, "eta": 2.0, "phi": 0.0}]]
)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Constituents [N, 3, 4], a mask, and numbers [N, 2], to scores [N, 2] and a length [N]."""
    return save_onnx(
        tmp_path_factory.mktemp("files") / "tagger.onnx",
        """(float[N, 3, 4] pf, float[N, 1, 4] pf_mask, float[N, 1] jet)
        => (float[N, 3] scores, float[N, 1] length) <int64[1] axes = {2}> {
            used = Mul(pf, pf_mask)
            sums = ReduceSum<keepdims = 0>(used, axes)
            scores = Add(sums, jet)
            length = ReduceSum<keepdims = 0>(pf_mask, axes)
        }""",
    )


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import xgboost  # which imports scikit-learn

    path: Path = tmp_path_factory.mktemp("files") / "EB.json"
    x = np.random.default_rng(3).normal(size=(60, 3)).astype("f4")
    data = xgboost.DMatrix(x, x[:, 0] > 0, feature_names=NAMES)
    xgboost.train({"objective": "binary:logistic", "nthread": 1}, data, 3).save_model(path)
    return path


def test_onnx_files_declare_their_tensors(tagger: Path, tmp_path: Path) -> None:
    model = sonic.Model.from_onnx(tagger, inputs=FULL, outputs={"scores": ["a", "b", "c"]})
    assert model.name == "tagger"
    assert model.inputs["pf"] == sonic.Padded(NAMES, 4)
    assert model.inputs["jet"] == sonic.Row(["mass"])
    jets = ak.Array([[{"mass": 5.0}], []])
    objects = {"pf": ak.Array([[PHOTONS[0]], []]), "jet": jets}
    sonic.build_repository(tmp_path / "r", {"tagger": tagger})
    with sonic.connect(tmp_path / "r"):
        scores = model(objects)
        bare = sonic.Model.from_onnx(tagger, "tagger", inputs=FULL, version=1)(objects)
    assert scores.scores.tolist() == [[{"a": 6.0, "b": 5.5, "c": 7.0}], []]
    assert scores.length.tolist() == [[1.0], []]
    assert bare.scores.tolist() == [[[6.0, 5.5, 7.0]], []]


PROPOSAL = (
    '"pf": sonic.Padded(["field_1", "field_2", "field_3"], 4),\n'
    "    # FP32 [N, 1, 4]: 1 where there is a constituent\n"
    '    "pf_mask": sonic.Mask(4),\n'
    "    # FP32 [N, 1]: numbers of each object\n"
    '    "jet": sonic.Row(["field_1"]),\n}'
)
FULL = {"pf": NAMES, "pf_mask": sonic.Mask(), "jet": ["mass"]}


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (None, None, PROPOSAL),
        ({"pf": NAMES[:2]}, None, '"pf": sonic.Padded(["pt", "eta", "field_3"]'),
        ({"pf": [*NAMES, "e"]}, None, '"pf": sonic.Padded(["pt", "eta", "phi"]'),
        ({"pf_mask": ["pt"]}, None, '"pf_mask": sonic.Mask(4)'),
        (NAMES, None, "expected a dict for inputs, as the file names them, got ['pt', 'eta'"),
        (FULL, ["a"], "expected a dict for outputs, as the file names them, got ['a']"),
        ({"pfs": NAMES}, None, "no tensor 'pfs'; did you mean 'pf'"),
        (None, {"score": ["a"]}, "no tensor 'score'; did you mean 'scores'"),
        (FULL, {"scores": ["a"]}, "with 1 labels, the model gives FP32 [N, 3]"),
        ({**FULL, "jet": sonic.Row(NAMES)}, None, "the model takes FP32 [N, 1]"),
    ],
)
def test_gaps_of_onnx_files_are_named_with_a_proposal(
    tagger: Path, inputs: Any, outputs: Any, message: str
) -> None:
    with pytest.raises((ConfigError, ContractError)) as caught:
        sonic.Model.from_onnx(tagger, inputs=inputs, outputs=outputs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([4, 3], sonic.Padded(NAMES, 4, axis_order="LF")),
        ([3, 1], sonic.Row(NAMES, axis_order="FL")),
        ([3], sonic.Row(NAMES)),
        ([3, 3], "3 fields of each constituent; or 3 of them, with the axes the other way round"),
        ([3, "L"], "3 fields of each constituent, of any length"),
        ([3, 5, 5], "an array of each object"),
    ],
)
def test_layouts_follow_from_shapes_or_are_asked_for(
    shape: list[Any], expected: Any, tmp_path: Path
) -> None:
    axes = ", ".join(["N", *map(str, shape)])
    graph = f"(float[{axes}] x) => (float[{axes}] y) {{ y = Identity(x) }}"
    file = save_onnx(tmp_path / "m.onnx", graph)
    if not isinstance(expected, str):
        assert sonic.Model.from_onnx(file, inputs={"x": NAMES}).inputs == {"x": expected}
        return
    with pytest.raises(ConfigError) as caught:
        sonic.Model.from_onnx(file, inputs={"x": NAMES})
    assert expected in " ".join(str(caught.value).replace("#", "").split())


def test_masks_of_one_of_several_inputs_are_asked_for(tmp_path: Path) -> None:
    graph = """(float[N, 2, 4] pf, float[N, 2, 3] sv, float[N, 1, 4] mask) => (float[N, 2, 4] y)
        { y = Mul(pf, mask) }"""
    with pytest.raises(ConfigError, match="say of which input, with beside="):
        sonic.Model.from_onnx(save_onnx(tmp_path / "m.onnx", graph))


def test_paths_are_compared_with_names_of_branches(trees: Path, tmp_path: Path) -> None:
    content = json.loads(trees.read_text())
    content["learner"]["feature_names"] = [f"Photon_{name}" for name in NAMES]
    file = tmp_path / "m.json"
    file.write_text(json.dumps(content))
    paths = {f"Photon_{name}": f"Photon.{name}" for name in NAMES}
    assert sonic.Model.from_xgboost("m", file, fields=paths).inputs
    first, second, *_ = paths
    swapped = {first: paths[second], second: paths[first]}
    with pytest.raises(ContractError, match="'Photon.eta' is number 0 .*, and number 1"):
        sonic.Model.from_xgboost("m", file, fields=paths | swapped)


def test_trees_declare_their_features(trees: Path, tmp_path: Path) -> None:
    import xgboost

    model = sonic.Model.from_xgboost("id_EB", trees, labels=["signal"])
    assert model.inputs == {"features": sonic.Row(NAMES)}
    sonic.build_repository(tmp_path / "r", {"id_EB": trees})
    rows = np.asarray([[1.0, 0.5, 2.0], [-1.0, 2.0, 0.0]], "f4")
    expected = xgboost.Booster(model_file=str(trees)).inplace_predict(rows)
    renamed = sonic.Model.from_xgboost("id_EB", trees, fields={"pt": "other.pt"})
    events = ak.with_field(PHOTONS, ak.zip({"pt": PHOTONS.pt}), "other")
    with sonic.connect(tmp_path / "r"):
        assert model.check().features == tuple(NAMES)
        assert ak.flatten(model(PHOTONS).signal).tolist() == expected.tolist()
        assert ak.flatten(renamed(events)).tolist() == expected.tolist()
    with pytest.raises(ConfigError, match="EB.json has 3 features: 'pt', .*; got 'eta', 'pt'"):
        sonic.Model.from_xgboost("id_EB", trees, fields=["eta", "pt", "phi"])
    # A path whose last part is the name of another feature.
    named = {"pt": "lead", "eta": "other.pt"}
    assert len(sonic.Model.from_xgboost("id_EB", trees, fields=named).inputs) == 1
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected XGBoost trees in"):
        sonic.Model.from_xgboost("id_EB", tmp_path / "no.json")


def test_declarations_are_printed_without_a_server(tagger: Path, trees: Path) -> None:
    done = run("scaffold", tagger)
    assert done.returncode == 0, done.stderr
    names: dict[str, Any] = {}
    exec(done.stdout, names)  # noqa: S102
    assert list(names["model"].inputs) == ["pf", "pf_mask", "jet"]
    assert names["model"].outputs["scores"].labels == ("label_1", "label_2", "label_3")
    done = run("scaffold", trees, "id_EB")
    assert 'sonic.Row(["pt", "eta", "phi"])' in done.stdout
    assert '"id_EB"' in done.stdout
    done = run("scaffold", "grpc://127.0.0.1:1")
    assert done.returncode == 2
    assert "expected the name of a model" in done.stderr
