"""Preprocessing files of weaver declare inputs, masks and labels, by the rules of their readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors

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
    assert packed[:, 0].tolist() == [[3.0, -1.0, 3.0], [7.0, 7.0, 7.0]]
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
