"""Preprocessing files of weaver declare inputs, masks and labels, by the rules of their readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from tests.onnx_files import save_onnx

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.layouts import bind_inputs
from sonic_coffea.tools import check, scaffold

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
    assert inputs["pf_features"].pack(jets).tolist() == [
        [[1.0, 3.0, -1.5], [1.0, 1.0, 1.0]],
        [[-1.5, 7.0, 7.0], [2.0, 0.0, 0.0]],
    ]
    model = sonic.Model.from_weaver("m", path, output="probabilities", prefix="pf.")
    assert model.inputs["pf_features"].columns == ("pf.a", "pf.b")
    assert model.outputs["probabilities"].labels == ("QCD", "Top", "mass")
    assert isinstance(model.inputs["pf_mask"], sonic.Mask)


def test_weaver_may_have_its_own_order_and_padding() -> None:
    """In weaver's training, an infinity becomes a limit, and rows may repeat themselves."""
    jets = ak.Array([{"a": [np.inf, np.nan], "b": [np.inf, 2.0]}, {"a": [], "b": []}])
    model = sonic.Model.from_weaver("m", PREPROCESS, order="weaver", pad_mode="wrap")
    assert model.inputs["pf_features"].pack(jets).tolist() == [
        [[3.0, -1.0, 3.0], [0.0, 2.0, 0.0]],
        [[7.0, 7.0, 7.0], [0.0, 0.0, 0.0]],
    ]
    of_cmssw = sonic.Model.from_weaver("m", PREPROCESS)
    assert of_cmssw.inputs["pf_features"].pack(jets)[0, 0].tolist() == [-1.5, -1.5, 7.0]
    assert model.config_hash != of_cmssw.config_hash


def group(*variables: str, length: int) -> dict[str, Any]:
    return {
        "var_names": list(variables),
        "var_infos": {variable: {} for variable in variables},
        "var_length": length,
    }


GROUPS: dict[str, Any] = {
    "output_names": ["label_QCD"],
    "input_names": ["pf_points", "pf_features", "pf_mask", "sv_mask", "sv_points", "sv_features"],
    "pf_points": group("pf_deta", length=3),
    "pf_features": group("pf_pt", "pf_deta", length=3),
    "pf_mask": group("pf_mask", length=3),
    "sv_mask": group("sv_mask", length=2),
    "sv_points": group("sv_deta", length=2),
    "sv_features": group("sv_pt", length=2),
}


def ranged(names: list[str], least: int, most: int) -> dict[str, Any]:
    """A group of an input whose length follows the row, and each variable's own numbers."""
    infos: dict[str, Any] = {
        name: {"median": 0.25 * k, "norm_factor": 1.0 / (1 + k), "lower_bound": -2.0}
        | {"replace_inf_value": 0.5, "upper_bound": 1e32, "pad": -1.0}
        for k, name in enumerate(names)
    }
    return {"var_names": names, "var_infos": infos, "min_length": least, "max_length": most}


GLOBAL: dict[str, Any] = {
    "output_names": ["label_Xbb", "label_QCD", "target_mass"],
    "input_names": [
        *("cpf_features", "cpf_mask", "npf_features", "npf_mask"),
        *("sv_features", "sv_mask", "jet_features"),
    ],
    "cpf_features": ranged(["cpf_pt", "cpf_deta"], 12, 90),
    "cpf_mask": ranged(["cpf_mask"], 12, 90),
    "npf_features": ranged(["npf_pt"], 8, 60),
    "npf_mask": ranged(["npf_mask"], 8, 60),
    "sv_features": ranged(["sv_pt", "sv_mass"], 1, 10),
    "sv_mask": ranged(["sv_mask"], 1, 10),
    "jet_features": ranged(["jet_pt", "jet_mass"], 1, 1),
}


def test_lengths_have_as_many_steps_in_each_group() -> None:
    inputs = sonic.Model.from_weaver("m", GLOBAL).inputs
    steps = {name: layout.lengths for name, layout in inputs.items() if layout.jagged}
    assert steps["sv_features"] == (1, 2, 4, 8, 10)
    assert steps["cpf_features"] == (12, 20, 33, 55, 90)
    assert steps["npf_features"] == (8, 14, 22, 37, 60)
    assert isinstance(inputs["jet_features"], sonic.Row)
    assert inputs["jet_features"].row_shape(0) == (2, 1)


LABELS = ["Xbb", "QCD", "target_mass"]


def jets(number: int) -> ak.Array:
    """Jets of lengths from 0 to beyond the greatest, in each group; some numbers are not finite."""
    rng = np.random.default_rng(8)
    columns: dict[str, Any] = {
        n: rng.normal(size=number) for n in GLOBAL["jet_features"]["var_names"]
    }
    for name in ("cpf", "npf", "sv"):
        group = GLOBAL[f"{name}_features"]
        counts = rng.permutation(np.arange(number) % (group["max_length"] + 4))
        for variable in group["var_names"]:
            values = rng.normal(scale=3, size=counts.sum())
            values[rng.random(len(values)) < 0.05] = np.inf
            columns[variable] = ak.unflatten(values, counts)
    return ak.zip(columns, depth_limit=1)


def by_the_rule(group: dict[str, Any], jet: Any) -> list[float]:
    """The sum of each variable as the readers of these files make it, one number at a time."""
    sums = []
    for variable, info in group["var_infos"].items():
        sums.append(0.0)
        for number in np.atleast_1d(jet[variable]).tolist()[: group["max_length"]]:
            value = number if np.isfinite(number) else info["replace_inf_value"]
            value = (value - info["median"]) * info["norm_factor"]
            sums[-1] += min(max(value, info["lower_bound"]), info["upper_bound"])
    return sums


def save_network(path: Path, weights: np.ndarray) -> Path:
    """The masked sums of each group and the jet's numbers, to three scores."""
    inputs = nodes = ""
    for name, number in {"cpf": 2, "npf": 1, "sv": 2}.items():
        inputs += (
            f"float[N, {number}, {name}_n] {name}_features, float[N, 1, {name}_n] {name}_mask, "
        )
        nodes += f"""
            {name}_used = Mul({name}_features, {name}_mask)
            {name} = ReduceSum<keepdims = 0>({name}_used, axis)"""
    numbers = ", ".join(map(str, weights.ravel().tolist()))
    return save_onnx(
        path,
        f"""({inputs}float[N, 2, 1] jet_features) => (float[N, 3] output)
        <int64[1] axis = {{2}}, float[7, 3] weights = {{{numbers}}}> {{
            {nodes}
            jet = Squeeze(jet_features, axis)
            all = Concat<axis = 1>(cpf, npf, sv, jet)
            output = MatMul(all, weights)
        }}""",
    )


def test_real_servers_score_by_the_rule(installation: Any, tmp_path: Path) -> None:
    """Whatever shares a request; and labels are compared with those of the server."""
    weights = np.random.default_rng(4).normal(size=(7, 3)).round(3)
    network = save_network(tmp_path / "network.onnx", weights)
    array = jets(150)
    groups = [GLOBAL[f"{name}_features"] for name in ("cpf", "npf", "sv", "jet")]
    sums = [[s for group in groups for s in by_the_rule(group, jet)] for jet in array]
    served, options = tmp_path / "served", {"labels": {"network": LABELS}, "max_batch_size": 16}
    sonic.build_repository(served, {"network": network}, **options)

    def declared(labels: list[str]) -> sonic.Model:
        return sonic.Model.from_weaver("network", GLOBAL, output="output", labels=labels)

    with sonic.LocalServer(served, stop_timeout_s=0.0) as server, sonic.connect(server) as pool:
        scores = declared(LABELS)(array)
        received = np.stack([np.asarray(scores[label]) for label in LABELS], axis=1)
        np.testing.assert_allclose(received, sums @ weights, atol=1e-4, rtol=1e-5)
        with pytest.raises(
            errors.ContractError, match="labels of output 'output' .* another order"
        ):
            declared(LABELS[::-1]).check()
        others = [declared(["bottom", "gluon", "pt"]), declared(LABELS[::-1])]
        steps = [step for other in others for step in check(pool.settings, declared=[other])]
        details = [step.detail for step in steps if step.name == "declaration of network"]
        assert details[0].endswith("the server calls the values of 'output' Xbb, QCD, target_mass")
        assert "are declared in another order" in details[1]
        names: dict[str, Any] = {}
        exec(scaffold(pool.settings, "network"), names)  # noqa: S102
        assert names["model"].outputs["output"].labels == tuple(LABELS)
        assert names["model"].check().max_rows == 16


def masked(**names: str) -> dict[str, Any]:
    """A file of groups of one variable each."""
    groups = {name: group(variable, length=2) for name, variable in names.items()}
    return {"output_names": ["a"], "input_names": list(names), **groups}


@pytest.mark.parametrize(
    ("file", "beside"),
    [
        (masked(points="pt", features="pt", mask="mask"), "points"),
        (masked(pf_points="pt", pf_features="pt", mask="mask"), "pf_points"),
        (masked(features="pt", pf_mask="mask"), "features"),
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
    *((changed("mask", "var_length", value), {}, "var_length") for value in NO_NUMBERS),
    *((changed("infos", "a", value), {}, "'a'") for value in (None, 5, "auto", [1.0])),
    *((changed("group", "var_infos", value), {}, "pf_features") for value in (None, 5, [])),
    *((changed("group", "var_names", value), {}, "var_names") for value in NO_NAMES),
    *((changed("file", "input_names", value), {}, "input_names") for value in NO_NAMES),
    *((changed("file", "pf_features", value), {}, "pf_features") for value in (None, 5, "pf", [])),
    *((changed("file", "output_names", value), {}, "output_names|labels") for value in (5, "top")),
    *((of_length(**{key: v}), {}, key) for key in ("min_length", "max_length") for v in NO_NUMBERS),
    (
        changed("file", "input_names", ["pf_feature"]),
        {},
        "'pf_feature'; did you mean 'pf_features'",
    ),
    (changed("file", "pf_features", WITHOUT_INFOS), {}, "has no 'var_infos'"),
    (changed("file", "pf_features", WITHOUT_LENGTH), {}, "no var_length or max_length"),
    (changed("file", "pf_features", AA), {}, "has no 'aa'"),
    (masked(pf_features="a", sv_features="b", mask="mask"), {}, "got 'pf_features', 'sv_features'"),
    (masked(pf_features="a", sv_features="b", lt_mask="mask"), {}, "mask 'lt_mask' of the preproc"),
    (masked(pf_mask="mask"), {}, "same text before the last '_', got none"),
    (GROUPS, {"rename": {"pf_ptt": "pt"}}, "rename: .* no variable or input 'pf_ptt'; did you"),
    (GROUPS, {"rename": {"pf_points": "sv_points"}}, "rename: two inputs would have one name"),
    (GROUPS, {"prefix": {"lt": "lt."}}, "prefix: .* no input or group 'lt'"),
    (GROUPS, {"inputs": {"pf": sonic.Row("pt")}}, "no input 'pf'"),
    (None, {}, "expected a file or a dict, got None"),
    *((PREPROCESS, {o: 1}, f"expected {o} as a .*dict, got 1") for o in OPTIONS),
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
    ("names", "labels"),
    [
        ({"output_names": {"target_mass": "np.maximum(1, mass)"}}, ("target_mass",)),
        ({"output_names": None, "flav_names": ["probTop", "probQCD"]}, ("probTop", "probQCD")),
    ],
)
def test_labels_are_found_where_files_have_them(names: dict[str, Any], labels: Any) -> None:
    file = {k: v for k, v in {**PREPROCESS, **names}.items() if v is not None}
    assert sonic.Model.from_weaver("m", file).outputs["softmax"].labels == labels


def test_exports_of_torch_number_their_inputs() -> None:
    names = {name: f"{name}__{i}" for i, name in enumerate(GLOBAL["input_names"])}
    file = {names.get(name, name): value for name, value in GLOBAL.items()}
    model = sonic.Model.from_weaver("m", {**file, "input_names": list(names.values())})
    assert model.outputs["softmax__0"].labels == ("Xbb", "QCD", "target_mass")
    plain = sonic.Model.from_weaver("m", GLOBAL)
    for name, layout in plain.inputs.items():
        if not isinstance(layout, sonic.Mask):
            assert model.inputs[names[name]] == layout


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "does not name all values of the model's output; the option labels"),
        ([], "does not name all values of the model's output; the option labels"),
        (
            {"truth_label": "jet_label", "target_mass": "mass"},
            "does not name all values of the model's output, which ends with 'target_mass'",
        ),
    ],
)
def test_labels_that_the_file_lacks_are_given(tmp_path: Path, names: Any, message: str) -> None:
    file = {k: v for k, v in {**PREPROCESS, "output_names": names}.items() if v is not None}
    with pytest.raises(errors.ConfigError, match=message):
        sonic.Model.from_weaver("m", file)
    given_labels = sonic.Model.from_weaver("m", file, labels=["a", "b", "target_mass"])
    assert given_labels.outputs["softmax"].labels == ("a", "b", "target_mass")
    path = tmp_path / "labels.txt"
    path.write_text("a\nb \n\n")
    assert sonic.Model.from_weaver("m", file, labels=path).outputs["softmax"].labels == ("a", "b")


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
    jets = ak.Array(
        [{"pf": {"puppi": [1.0], "pf_deta": [2.0]}, "sv": {"sv_deta": []}, "mass": 3.0}]
    )
    assert bind_inputs(model.inputs, jets).pack(0, 1)["sv_there"].tolist() == [[[0.0, 0.0]]]


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("norm_factor", 1.0),
        ("lower_bound", -1e32),
        ("upper_bound", 1e32),
        ("pad", 0.0),
        ("replace_inf_value", 0.0),
    ],
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
        file["pf_features"]["var_infos"]["a"] = {"median": None, key: value}
        with pytest.raises(errors.ConfigError, match="null as median"):
            sonic.Model.from_weaver("m", file)


@pytest.mark.parametrize("key", ["var_length", "max_length"])
@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_groups_whose_length_is_null_are_not_padded(key: str, names: list[str]) -> None:
    """weaver stacks its variables as they are: ``[N, F]``; one alone it does not stack: ``[N]``."""
    infos = {name: {"median": 0.0, "norm_factor": 2.0} for name in names}
    jet = {"var_names": names, "var_infos": infos, key: None}
    file = {**PREPROCESS, "input_names": ["jet", "pf_features", "pf_mask"], "jet": jet}
    model = sonic.Model.from_weaver("m", file, prefix={"pf": "pf."})
    jets = ak.Array([{"a": 1.0, "b": 2.0, "pf": {"a": [1.0], "b": [1.0]}}])
    packed = model.pack(jets)
    assert packed["jet"].tolist() == ([[2.0, 4.0]] if len(names) == 2 else [2.0])
    assert packed["pf_features"].shape == (1, 2, 3)
    assert packed["pf_mask"].tolist() == [[[1.0, 0.0, 0.0]]]
