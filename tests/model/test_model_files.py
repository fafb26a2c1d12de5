"""Models declared by their files: of weaver, ONNX and trees."""

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
from sonic_coffea import errors
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


PREPROCESS: dict[str, Any] = {
    "output_names": ["label_QCD", "label_Top", "mass"],
    "input_names": ["pf_features", "pf_mask"],
    "pf_features": {
        "var_names": ["a", "b"],
        "var_infos": {
            "a": {
                "median": 0.5,
                "norm_factor": 2.0,
                "replace_inf_value": -1.0,
                "lower_bound": -1.5,
                "upper_bound": 3.0,
                "pad": 7.0,
            },
            "b": {"median": 0.0, "norm_factor": 1.0, "pad": 0.0},
        },
        "var_length": 3,
    },
    "pf_mask": {"var_names": ["pf_mask"], "var_infos": {}, "var_length": 3},
}


def test_numbers_are_transformed_by_the_rule_of_cmssw(tmp_path: Path) -> None:
    path = tmp_path / "preprocess.json"
    path.write_text(json.dumps(PREPROCESS))
    inputs = sonic.Model.from_weaver("m", path).inputs
    jets = ak.Array([{"a": [1.0, 5.0, -5.0, 9.0], "b": [1.0] * 4}, {"a": [np.inf], "b": [2.0]}])
    # (1 - 0.5) * 2, clipped (5 - 0.5) * 2, clipped (-5 - 0.5) * 2; inf becomes (-1 - 0.5) * 2.
    packed = inputs["pf_features"].pack(jets)
    assert packed[:, 0].tolist() == [[1.0, 3.0, -1.5], [-1.5, 7.0, 7.0]]
    assert packed[:, 1].tolist() == [[1.0, 1.0, 1.0], [2.0, 0.0, 0.0]]
    assert isinstance(inputs["pf_mask"], sonic.Mask)
    model = sonic.Model.from_weaver("m", path, output="probabilities", prefix="pf.")
    assert model.inputs["pf_features"].columns == ("pf.a", "pf.b")
    assert model.outputs["probabilities"].labels == ("QCD", "Top", "mass")


def test_weaver_may_have_its_own_order_and_padding() -> None:
    """In weaver's training, an infinity becomes a limit, and rows may repeat themselves."""
    jets = ak.Array([{"a": [np.inf, np.nan], "b": [np.inf, 2.0]}, {"a": [], "b": []}])
    model = sonic.Model.from_weaver("m", PREPROCESS, order="weaver", pad_mode="wrap")
    packed = model.inputs["pf_features"].pack(jets)
    assert packed[:, 0].tolist() == [[3.0, -1.0, 3.0], [0.0, 0.0, 0.0]]
    assert packed[:, 1].tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    of_cmssw = sonic.Model.from_weaver("m", PREPROCESS)
    assert of_cmssw.inputs["pf_features"].pack(jets)[0, 0].tolist() == [-1.5, -1.5, 7.0]
    assert model.config_hash != of_cmssw.config_hash


def group(*variables: str, **lengths: int) -> dict[str, Any]:
    infos: dict[str, Any] = {variable: {} for variable in variables}
    return {"var_names": list(variables), "var_infos": infos, **lengths}


PF, SV = {"var_length": 3}, {"var_length": 2}
GROUPS: dict[str, Any] = {
    "output_names": ["label_QCD"],
    "input_names": ["pf_points", "pf_features", "pf_mask", "sv_mask", "sv_points", "sv_features"],
    "pf_points": group("pf_deta", **PF),
    "pf_features": group("pf_pt", "pf_deta", **PF),
    "pf_mask": group("pf_mask", **PF),
    "sv_mask": group("sv_mask", **SV),
    "sv_points": group("sv_deta", **SV),
    "sv_features": group("sv_pt", **SV),
}
GLOBAL: dict[str, Any] = {
    "output_names": ["label_Xbb", "label_QCD", "target_mass"],
    "input_names": ["pf_features", "pf_mask", "sv_features", "jet_features"],
    "pf_features": group("pf_pt", "pf_deta", min_length=12, max_length=90),
    "pf_mask": group("pf_mask", min_length=12, max_length=90),
    "sv_features": group("sv_pt", "sv_mass", min_length=1, max_length=10),
    "jet_features": group("jet_pt", "jet_mass", min_length=1, max_length=1),
}


def test_lengths_have_as_many_steps_in_each_group() -> None:
    inputs = sonic.Model.from_weaver("m", GLOBAL).inputs
    steps = {name: layout.lengths for name, layout in inputs.items() if layout.jagged}
    assert steps["sv_features"] == (1, 2, 4, 8, 10)
    assert steps["pf_features"] == (12, 20, 33, 55, 90)
    assert isinstance(inputs["jet_features"], sonic.Row)
    assert inputs["jet_features"].row_shape(0) == (2, 1)


# The masked sum of each variable.


def named(**names: Any) -> dict[str, Any]:
    return {k: v for k, v in {**PREPROCESS, **names}.items() if v is not None}


def masked(**names: str) -> dict[str, Any]:
    """A file of groups of one variable each."""
    groups = {name: group(variable, **SV) for name, variable in names.items()}
    return {"output_names": ["a"], "input_names": list(names), **groups}


@pytest.mark.parametrize(
    ("file", "beside"),
    [
        (masked(points="pt", features="pt", mask="mask"), "points"),
        (masked(pf_points="pt", pf_features="pt", mask="mask"), "pf_points"),
        (masked(pf_features="pt", pf_mask="mask", sv_features="x", sv_mask="mask"), "sv_features"),
        (masked(pf_features="pt", sv_features="sv_pt", sv_mask="pf_mask"), "sv_features"),
        (GROUPS, "sv_points"),
    ],
)
def test_masks_stand_beside_the_group_of_their_name(file: dict[str, Any], beside: str) -> None:
    name = [name for name in file["input_names"] if "mask" in name][-1]
    for renamed in (beside, "renamed"):
        model = sonic.Model.from_weaver("m", file, rename={beside: renamed})
        assert model.inputs[name] == sonic.Mask(2, beside=renamed)


def changed(where: str, key: str, value: Any) -> dict[str, Any]:
    """The file with another value, in the file itself, a group, or a variable."""
    file = json.loads(json.dumps(PREPROCESS))
    part = {
        "file": file,
        "group": file["pf_features"],
        "mask": file["pf_mask"],
        "infos": file["pf_features"]["var_infos"],
        "variable": file["pf_features"]["var_infos"]["a"],
    }[where]
    part[key] = value
    return dict(file)


def of_length(**limits: Any) -> dict[str, Any]:
    file = changed("group", "min_length", None)
    del file["pf_features"]["var_length"]
    file["pf_features"] |= {"max_length": 4, **limits}
    return file


NO_NUMBERS: tuple[Any, ...] = ("auto", "1.0", "", [1.0], {"a": 1.0}, True)
HOW_MANY = (*NO_NUMBERS, 2.5, 0, -1)
NO_NAMES: tuple[Any, ...] = (None, 5, "pf_features", [5], [None], [["a"]], {"a": 1})
NUMBERS = ("median", "norm_factor", "lower_bound", "upper_bound", "pad", "replace_inf_value")
OPTIONS = ("prefix", "rename", "inputs")
WITHOUT_INFOS = {"var_names": ["a"], "var_length": 3}
WITHOUT_LENGTH = {"var_names": ["a"], "var_infos": {}}
AA = {**PREPROCESS["pf_features"], "var_names": ["aa"]}
BAD_FILES: list[tuple[Any, dict[str, Any], str]] = [
    *((changed("variable", key, value), {}, key) for key in NUMBERS for value in NO_NUMBERS),
    *((changed("group", "var_length", v), {}, "var_length|mask") for v in HOW_MANY),
    *((changed("mask", "var_length", value), {}, "var_length") for value in HOW_MANY),
    *((changed("infos", "a", value), {}, "'a'") for value in (None, 5, "auto", [1.0])),
    *((changed("group", "var_infos", value), {}, "pf_features") for value in (None, 5, [])),
    *((changed("group", "var_names", value), {}, "var_names") for value in NO_NAMES),
    *((changed("file", "input_names", value), {}, "input_names") for value in NO_NAMES),
    *((changed("file", "pf_features", value), {}, "pf_features") for value in (None, 5, "pf", [])),
    *((changed("file", "output_names", value), {}, "output_names|labels") for value in (5, "top")),
    *((of_length(**{key: v}), {}, key) for key in ("min_length", "max_length") for v in NO_NUMBERS),
    (of_length(max_length=0), {}, "max_length to be at least 1, got 0"),
    (named(input_names=["pf_feature"]), {}, "'pf_feature'; did you mean 'pf_features'"),
    (changed("file", "pf_features", WITHOUT_INFOS), {}, "has no 'var_infos'"),
    (changed("file", "pf_features", WITHOUT_LENGTH), {}, "no var_length or max_length"),
    (changed("file", "pf_features", AA), {}, "has no 'aa'"),
    (changed("variable", "medain", 1.0), {}, "does not write, 'medain'; did you mean 'median'"),
    (changed("variable", "std", 1.0), {}, "does not write, 'std'; there are: lower_bound, median"),
    (masked(pf_features="a", sv_features="b", mask="mask"), {}, "got 'pf_features', 'sv_features'"),
    (masked(pf_mask="mask"), {}, "same text before the last '_', got none"),
    (GROUPS, {"rename": {"pf_ptt": "pt"}}, "rename: .* no variable or input 'pf_ptt'; did you"),
    (GROUPS, {"rename": {"pf_points": "sv_points"}}, "rename: two inputs would have one name"),
    (GROUPS, {"prefix": {"lt": "lt."}}, "prefix: .* no input or group 'lt'"),
    (GROUPS, {"inputs": {"pf": sonic.Row("pt")}}, "no input 'pf'"),
    (None, {}, "expected a file or a dict, got None"),
    *((PREPROCESS, {o: 1}, f"expected {o} as a .*dict, got 1") for o in OPTIONS),
    (PREPROCESS, {"rename": {"a": None}}, "expected names in rename as str, got {'a': None}"),
    (PREPROCESS, {"order": "weever"}, "no order 'weever'; did you mean 'weaver'"),
    (PREPROCESS, {"pad_mode": "repeat"}, "pad_mode to be 'constant' or 'wrap'"),
    *((PREPROCESS, {"labels": labels}, "labels") for labels in (5, {"a", "b"}, {"a": 1})),
    (PREPROCESS, {"labels": Path("none.txt")}, "cannot read the labels in"),
    (Path("none.json"), {}, "cannot read the preprocessing file"),
    (Path(__file__), {}, "is not JSON"),
]


@pytest.mark.parametrize(("file", "options", "message"), BAD_FILES)
def test_files_that_declare_nothing_are_refused(file: Any, options: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message) as caught:
        sonic.Model.from_weaver("m", file, **options)
    # coffea would take an OSError for a broken file of events.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("file", "labels"),
    [
        (named(output_names={"target_mass": "np.maximum(1, mass)"}), ("target_mass",)),
        (named(output_names=None, flav_names=["probTop", "probQCD"]), ("probTop", "probQCD")),
    ],
)
def test_labels_are_found_where_files_have_them(file: Any, labels: Any) -> None:
    assert sonic.Model.from_weaver("m", file).outputs["softmax"].labels == labels


def test_exports_of_torch_number_their_inputs() -> None:
    names = {name: f"{name}__{i}" for i, name in enumerate(GLOBAL["input_names"])}
    file = {names.get(name, name): value for name, value in GLOBAL.items()}
    model = sonic.Model.from_weaver("m", {**file, "input_names": list(names.values())})
    assert model.outputs["softmax__0"].labels == ("Xbb", "QCD", "target_mass")
    for name, layout in sonic.Model.from_weaver("m", GLOBAL).inputs.items():
        if not isinstance(layout, sonic.Mask):
            assert model.inputs[names[name]] == layout


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "; the option labels"),
        ({"truth_label": "jet_label", "target_mass": "mass"}, ", which ends with 'target_mass'"),
    ],
)
def test_labels_that_the_file_lacks_are_given(tmp_path: Path, names: Any, message: str) -> None:
    file = named(output_names=names)
    does_not_name_all = f"does not name all values of the model's output{message}"
    with pytest.raises(errors.ConfigError, match=does_not_name_all):
        sonic.Model.from_weaver("m", file)
    path = tmp_path / "labels.txt"
    path.write_text("a\nb \n\n")
    for labels in (["a", "b"], path):
        given_labels = sonic.Model.from_weaver("m", file, labels=labels)
        assert given_labels.outputs["softmax"].labels == ("a", "b")


def test_names_of_the_arrays_and_of_the_served_model() -> None:
    model = sonic.Model.from_weaver(
        "m",
        GROUPS,
        rename={"pf_pt": "puppi", "pf_features": "pf_features__1", "sv_mask": "sv_there"},
        prefix={"pf": "pf.", "sv_points": "sv."},
        inputs={"sv_features": sonic.Row("mass")},
    )
    assert list(model.inputs) == [
        *("pf_points", "pf_features__1", "pf_mask", "sv_there", "sv_points", "sv_features")
    ]
    assert model.inputs["pf_features__1"].columns == ("pf.puppi", "pf.pf_deta")
    assert model.inputs["sv_points"].columns == ("sv.sv_deta",)
    assert model.inputs["sv_features"] == sonic.Row("mass")
    mask = model.inputs["sv_there"]
    assert isinstance(mask, sonic.Mask)
    assert mask.beside == "sv_points"


DEFAULTS = {"norm_factor": 1.0, "lower_bound": -1e32, "upper_bound": 1e32}


@pytest.mark.parametrize(
    ("key", "default"), [*DEFAULTS.items(), ("pad", 0.0), ("replace_inf_value", 0.0)]
)
def test_null_means_the_default(key: str, default: float) -> None:
    null, without, usual = (changed("variable", key, value) for value in (None, 0.0, default))
    del without["pf_features"]["var_infos"]["a"][key]
    inputs = [sonic.Model.from_weaver("m", file).inputs for file in (null, without, usual)]
    assert inputs[0] == inputs[1] == inputs[2]


def test_medians_of_null_transform_nothing() -> None:
    """As to weaver, which does not clip or scale such a variable either."""
    file = changed("infos", "a", {"median": None, "pad": 7.0})
    inputs = sonic.Model.from_weaver("m", file).inputs
    jets = ak.Array([{"a": [5.0, -50.0], "b": [1.0, 1.0]}])
    assert inputs["pf_features"].pack(jets)[0, 0].tolist() == [5.0, -50.0, 7.0]
    for key, value in (("norm_factor", 0.5), ("lower_bound", -5), ("upper_bound", 5)):
        with pytest.raises(errors.ConfigError, match="null as median"):
            sonic.Model.from_weaver("m", changed("infos", "a", {"median": None, key: value}))


@pytest.mark.parametrize("key", ["var_length", "max_length"])
@pytest.mark.parametrize(("names", "expected"), [(["a"], [2.0]), (["a", "b"], [[2.0, 4.0]])])
def test_groups_whose_length_is_null_are_not_padded(key: str, names: Any, expected: Any) -> None:
    """weaver stacks its variables as they are: ``[N, F]``; one alone it does not stack: ``[N]``."""
    infos = {name: {"median": 0.0, "norm_factor": 2.0} for name in names}
    jet = {"var_names": names, "var_infos": infos, key: None}
    file = named(input_names=["jet", "pf_features", "pf_mask"], jet=jet)
    model = sonic.Model.from_weaver("m", file, prefix={"pf": "pf."})
    jets = ak.Array([{"a": 1.0, "b": 2.0, "pf": {"a": [1.0], "b": [1.0]}}])
    packed = model.pack(jets)
    assert packed["jet"].tolist() == expected
    assert packed["pf_features"].shape == (1, 2, 3)
    assert packed["pf_mask"].tolist() == [[[1.0, 0.0, 0.0]]]
