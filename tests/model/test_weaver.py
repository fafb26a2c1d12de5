from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.layouts import bind_inputs
from sonic_coffea.model import _weaver as weaver

if TYPE_CHECKING:
    from pathlib import Path

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


def test_weaver_s_rule(tmp_path: Path) -> None:
    path = tmp_path / "preprocess.json"
    path.write_text(json.dumps(PREPROCESS))
    inputs, labels = weaver.read(path)
    assert labels == ["QCD", "Top", "mass"]
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


def test_weaver_s_own_order_and_padding() -> None:
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
    with pytest.raises(errors.ConfigError, match="no order 'weever'; did you mean 'weaver'"):
        sonic.Model.from_weaver("m", PREPROCESS, order="weever")
    with pytest.raises(errors.ConfigError, match="pad_mode to be 'constant' or 'wrap'"):
        sonic.Model.from_weaver("m", PREPROCESS, pad_mode="repeat")


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


def test_masks_may_be_left_out() -> None:
    names = {"pf_features": "pt", "pf_mask": "mask", "sv_features": "x", "sv_mask": "mask"}
    groups = {name: group(variable, length=2) for name, variable in names.items()}
    inputs, _ = weaver.read({"output_names": ["a"], "input_names": list(names), **groups})
    jets = {"pf_features": {"pt": [[1.0, 2.0]]}, "sv_features": {"x": [[3.0]]}}
    sent = bind_inputs(inputs, {n: ak.Array(a) for n, a in jets.items()}).pack(0, 1)
    assert sent["pf_mask"].tolist() == [[[1.0, 1.0]]]
    assert sent["sv_mask"].tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        ({"points": "pt", "features": "pt", "mask": "mask"}, "points"),
        ({"pf_points": "pt", "pf_features": "pt", "mask": "mask"}, "pf_points"),
        ({"features": "pt", "pf_mask": "mask"}, "features"),
        ({"pf_features": "pt", "sv_features": "sv_pt", "sv_mask": "pf_mask"}, "sv_features"),
    ],
)
def test_whose_mask_it_is(names: dict[str, str], beside: str) -> None:
    groups = {name: group(variable, length=2) for name, variable in names.items()}
    inputs, _ = weaver.read({"output_names": ["a"], "input_names": list(names), **groups})
    mask = inputs[list(names)[-1]]
    assert isinstance(mask, sonic.Mask)
    assert mask.beside == beside


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pf_features", "sv_features", "mask"], "got 'pf_features', 'sv_features'"),
        (["pf_features", "sv_features", "lt_mask"], "mask 'lt_mask' of the preprocessing file"),
        (["pf_mask"], "same text before the last '_', got none"),
    ],
)
def test_nobody_s_mask(names: list[str], message: str) -> None:
    groups = {n: group("mask" if n.endswith("mask") else n, length=2) for n in names}
    with pytest.raises(errors.ConfigError, match=message):
        weaver.read({"output_names": ["a"], "input_names": names, **groups})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_names": ["pf_feature"]}, "has no 'pf_feature'; did you mean 'pf_features'"),
        ({"pf_features": {"var_names": ["a"], "var_length": 3}}, "has no 'var_infos'"),
        ({"pf_features": {"var_names": ["a"], "var_infos": {}}}, "no var_length or max_length"),
        ({"pf_features": {**PREPROCESS["pf_features"], "var_names": ["aa"]}}, "has no 'aa'"),
    ],
)
def test_wrong_preprocessing(change: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        weaver.read({**PREPROCESS, **change})


def test_preprocessing_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="cannot read the preprocessing file") as caught:
        weaver.read(tmp_path / "none.json")
    # coffea would take an OSError for a broken file of events.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(errors.ConfigError, match="is not JSON"):
        weaver.read(tmp_path / "bad.json")


def by_hand(group: dict[str, Any], row: dict[str, list[float]]) -> list[list[float]]:
    """The rule of the CMS software's reader, in float32 and one number at a time."""
    channels = []
    for name in group["var_names"]:
        info = group["var_infos"][name]
        channel = [np.float32(info["pad"])] * group["var_length"]
        for k, raw in enumerate(row[name][: group["var_length"]]):
            value = np.float32(raw)
            if not np.isfinite(value):
                value = np.float32(info["replace_inf_value"])
            value = (value - np.float32(info["median"])) * np.float32(info["norm_factor"])
            value = max(value, np.float32(info["lower_bound"]))
            channel[k] = min(value, np.float32(info["upper_bound"]))
        channels.append(channel)
    return channels


def test_random_rows_by_the_rule() -> None:
    rng = np.random.default_rng(11)
    names = ["u", "v", "w"]
    group = {
        "var_names": names,
        "var_length": 5,
        "var_infos": {
            name: {
                "median": float(rng.normal()),
                "norm_factor": float(rng.uniform(0.1, 3)),
                "replace_inf_value": float(rng.normal()),
                "lower_bound": -1.0,
                "upper_bound": 1.5,
                "pad": float(rng.normal()),
            }
            for name in names
        },
    }
    preprocess = {"output_names": ["a"], "input_names": ["x"], "x": group}
    rows: list[dict[str, list[float]]] = []
    for n in rng.integers(0, 9, 60):
        columns = rng.normal(size=(3, n)).astype(np.float32)
        columns[rng.random((3, n)) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
        rows.append(dict(zip(names, columns.tolist(), strict=True)))
    arrays = {
        name: ak.values_astype(ak.Array([r[name] for r in rows]), "float32") for name in names
    }
    inputs, _ = weaver.read(preprocess)
    np.testing.assert_array_equal(
        inputs["x"].pack(arrays), np.asarray([by_hand(group, r) for r in rows], np.float32)
    )


def ranged(names: list[str], least: int, most: int, *, mask: bool = False) -> dict[str, Any]:
    """A group of an input whose length follows the row."""
    infos: dict[str, Any] = {} if mask else {name: {"pad": -1.0} for name in names}
    return {"var_names": names, "var_infos": infos, "min_length": least, "max_length": most}


GLOBAL: dict[str, Any] = {
    "output_names": ["label_Xbb", "label_QCD", "target_mass"],
    "input_names": [
        *("cpf_features", "cpf_mask", "npf_features", "npf_mask"),
        *("sv_features", "sv_mask", "jet_features"),
    ],
    "cpf_features": ranged(["cpf_pt", "cpf_deta"], 12, 90),
    "cpf_mask": ranged(["cpf_mask"], 12, 90, mask=True),
    "npf_features": ranged(["npf_pt"], 8, 60),
    "npf_mask": ranged(["npf_mask"], 8, 60, mask=True),
    "sv_features": ranged(["sv_pt", "sv_mass"], 1, 10),
    "sv_mask": ranged(["sv_mask"], 1, 10, mask=True),
    "jet_features": ranged(["jet_pt", "jet_mass"], 1, 1),
}


def exported(preprocess: dict[str, Any]) -> dict[str, Any]:
    """The same with names as of a TorchScript export: with the input's position."""
    names = {name: f"{name}__{i}" for i, name in enumerate(preprocess["input_names"])}
    renamed = {names.get(name, name): value for name, value in preprocess.items()}
    return {**renamed, "input_names": list(names.values())}


@given(
    st.lists(
        st.tuples(st.integers(0, 95), st.integers(0, 65), st.integers(0, 12)),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_groups_of_lengths_of_their_own(counts: list[tuple[int, int, int]], torch: bool) -> None:
    """Each group by a rule of its own, and numbers of the jet beside them."""
    file = exported(GLOBAL) if torch else GLOBAL
    model = sonic.Model.from_weaver("m", file)
    output = model.outputs["softmax__0" if torch else "softmax"]
    assert output.labels == ("Xbb", "QCD", "target_mass")
    rng = np.random.default_rng(3)
    groups = dict(zip(("cpf", "npf", "sv"), zip(*counts, strict=True), strict=True))
    limits = {"cpf": (12, 90), "npf": (8, 60), "sv": (1, 10)}
    jets = {
        variable: ak.unflatten(rng.random(sum(groups[name])), groups[name])
        for name in groups
        for variable in GLOBAL[f"{name}_features"]["var_names"]
    }
    jets |= {name: ak.Array(rng.random(len(counts))) for name in ("jet_pt", "jet_mass")}
    arrays = ak.zip(jets, depth_limit=1)
    inputs = bind_inputs(model.inputs, arrays)
    lengths = model.inputs["cpf_features__0" if torch else "cpf_features"].lengths
    rows = 0
    for segment in inputs.segments:
        sent = inputs.pack(segment.start, segment.stop)
        sent = {name.partition("__")[0]: tensor for name, tensor in sent.items()}
        for place, row in enumerate(inputs.numbers(segment.start, segment.stop)):
            rows += 1
            jet = [counts[row][i] for i in range(3)]
            for name, n in zip(groups, jet, strict=True):
                least, most = limits[name]
                features, mask = sent[f"{name}_features"][place], sent[f"{name}_mask"][place]
                length = features.shape[1]
                # Within the file's limits, and all of the row that these allow.
                assert least <= length <= most
                assert length >= min(n, most)
                kept = min(n, length)
                assert mask.tolist() == [[1.0] * kept + [0.0] * (length - kept)]
                for channel, variable in zip(
                    features, GLOBAL[f"{name}_features"]["var_names"], strict=True
                ):
                    by_hand = np.full(length, -1.0, np.float32)
                    by_hand[:kept] = jets[variable][int(row)][:kept]
                    np.testing.assert_array_equal(channel, by_hand)
            assert sent["jet_features"][place].tolist() == [
                [np.float32(jets[name][int(row)])] for name in ("jet_pt", "jet_mass")
            ]
            # Padded as it would be alone.
            alone = bind_inputs(model.inputs, arrays[int(row) : int(row) + 1])
            assert [s.bucket for s in alone.segments] == [segment.bucket]
    assert rows == len(counts)
    assert len(lengths) == 5


def test_lengths_have_as_many_steps_in_each_group() -> None:
    inputs, _ = weaver.read(GLOBAL)
    steps = {name: layout.lengths for name, layout in inputs.items() if layout.jagged}
    assert steps["sv_features"] == (1, 2, 4, 8, 10)
    assert steps["cpf_features"] == (12, 20, 33, 55, 90)
    assert steps["npf_features"] == (8, 14, 22, 37, 60)
    assert isinstance(inputs["jet_features"], sonic.Row)
    assert inputs["jet_features"].row_shape(0) == (2, 1)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ({"output_names": {"target_mass": "np.maximum(1, mass)"}}, ["target_mass"]),
        ({"output_names": None, "flav_names": ["probTop", "probQCD"]}, ["probTop", "probQCD"]),
    ],
)
def test_where_labels_are(names: dict[str, Any], labels: list[str]) -> None:
    file = {k: v for k, v in {**PREPROCESS, **names}.items() if v is not None}
    assert weaver.read(file)[1] == labels


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "does not name the values of the model's output; the option labels"),
        ([], "does not name the values of the model's output; the option labels"),
        (
            {"truth_label": "jet_label", "target_mass": "mass"},
            "'truth_label' .* that the file does not name; the option labels .* 'target_mass'",
        ),
    ],
)
def test_labels_that_the_file_lacks(tmp_path: Path, names: Any, message: str) -> None:
    file = {k: v for k, v in {**PREPROCESS, "output_names": names}.items() if v is not None}
    with pytest.raises(errors.ConfigError, match=message):
        sonic.Model.from_weaver("m", file)
    given_labels = sonic.Model.from_weaver("m", file, labels=["a", "b", "target_mass"])
    assert given_labels.outputs["softmax"].labels == ("a", "b", "target_mass")
    path = tmp_path / "labels.txt"
    path.write_text("a\nb \n\n")
    assert sonic.Model.from_weaver("m", file, labels=path).outputs["softmax"].labels == ("a", "b")
    with pytest.raises(errors.ConfigError, match="cannot read the labels in"):
        sonic.Model.from_weaver("m", file, labels=tmp_path / "none.txt")


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


def test_the_mask_of_a_renamed_group() -> None:
    inputs, _ = weaver.read(GROUPS, rename={"sv_points": "vertices"})
    mask = inputs["sv_mask"]
    assert isinstance(mask, sonic.Mask)
    assert mask.beside == "vertices"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"pf_ptt": "pt"}}, "rename: .* no variable or input 'pf_ptt'; did you mean"),
        ({"rename": {"pf_points": "sv_points"}}, "rename: two inputs would have one name"),
        ({"prefix": {"lt": "lt."}}, "prefix: .* no input or group 'lt'"),
        ({"inputs": {"pf": sonic.Row("pt")}}, "no input 'pf'"),
    ],
)
def test_what_the_file_does_not_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        sonic.Model.from_weaver("m", GROUPS, **options)


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


NO_NUMBERS: tuple[Any, ...] = ("auto", "1.0", "", [1.0], {"a": 1.0}, True)
NO_NAMES: tuple[Any, ...] = (None, 5, "pf_features", [5], [None], [["a"]], {"a": 1})


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        *(
            ("variable", key, value)
            for key in (
                "median",
                "norm_factor",
                "lower_bound",
                "upper_bound",
                "pad",
                "replace_inf_value",
            )
            for value in NO_NUMBERS
        ),
        *(("group", key, value) for key in ("var_length",) for value in (*NO_NUMBERS, 2.5, 0, -1)),
        *(("mask", "var_length", value) for value in NO_NUMBERS),
        *(("infos", "a", value) for value in (None, 5, "auto", [1.0])),
        *(("group", "var_infos", value) for value in (None, 5, [])),
        *(("group", "var_names", value) for value in NO_NAMES),
        *(("file", "input_names", value) for value in NO_NAMES),
        *(("file", "pf_features", value) for value in (None, 5, "pf", [])),
        *(("file", "output_names", value) for value in (None, 5, "top", True)),
    ],
)
def test_what_is_of_another_type_is_an_error_of_the_file(where: str, key: str, value: Any) -> None:
    with pytest.raises(errors.ConfigError):
        sonic.Model.from_weaver("m", changed(where, key, value))


@pytest.mark.parametrize("key", ["min_length", "max_length"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, 2.5])
def test_limits_of_a_length_are_whole_numbers(key: str, value: Any) -> None:
    file = changed("group", "max_length", 4)
    group = file["pf_features"]
    del group["var_length"]
    group["min_length"] = 2
    sonic.Model.from_weaver("m", file)
    group[key] = value
    with pytest.raises(errors.ConfigError, match=key):
        sonic.Model.from_weaver("m", file)


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
def test_null_is_as_good_as_nothing(key: str, default: float) -> None:
    null, without, usual = (changed("variable", key, value) for value in (None, 0.0, default))
    del without["pf_features"]["var_infos"]["a"][key]
    inputs = [sonic.Model.from_weaver("m", file).inputs for file in (null, without, usual)]
    assert inputs[0] == inputs[1] == inputs[2]
    file = changed("group", "max_length", 4)
    del file["pf_features"]["var_length"]
    without = sonic.Model.from_weaver("m", file).inputs
    file["pf_features"]["min_length"] = None
    assert sonic.Model.from_weaver("m", file).inputs == without


def test_a_median_of_null_transforms_nothing() -> None:
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
def test_a_group_whose_length_is_null_is_not_padded(key: str, names: list[str]) -> None:
    """weaver stacks its variables as they are: ``[N, F]``; one alone it does not stack: ``[N]``."""
    plain = {"median": 0.0, "norm_factor": 2.0, "pad": 0.0}
    group = {"var_names": names, "var_infos": dict.fromkeys(names, plain), key: None}
    file = {
        **PREPROCESS,
        "input_names": ["jet_features", "pf_features", "pf_mask"],
        "jet_features": group,
    }
    model = sonic.Model.from_weaver("m", file, prefix={"jet": "jet.", "pf": "pf."})
    jets = ak.Array(
        [
            {"jet": {"a": 1.0, "b": 2.0}, "pf": {"a": [1.0], "b": [1.0]}},
            {"jet": {"a": 3.0, "b": 4.0}, "pf": {"a": [], "b": []}},
        ]
    )
    packed = model.pack(jets)
    expected = [[2.0, 4.0], [6.0, 8.0]] if len(names) == 2 else [2.0, 6.0]
    assert packed["jet_features"].tolist() == expected
    assert packed["pf_features"].shape == (2, 2, 3)
    assert packed["pf_mask"][:, 0].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("labels", [5, {"a", "b"}, {"a": 1}])
def test_labels_are_a_file_or_a_list(labels: Any) -> None:
    with pytest.raises(errors.ConfigError, match="labels"):
        sonic.Model.from_weaver("m", PREPROCESS, labels=labels)
