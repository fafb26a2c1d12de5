from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest

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


def test_weaver_s_length_between_limits() -> None:
    group = {**PREPROCESS["pf_features"], "min_length": 2, "max_length": 7}
    del group["var_length"]
    mask = {"var_names": ["pf_mask"], "min_length": 2, "max_length": 7}
    inputs, _ = weaver.read({**PREPROCESS, "pf_features": group, "pf_mask": mask})
    features = inputs["pf_features"]
    assert isinstance(features, sonic.Bucketed)
    assert features.lengths == (2, 4, 7)
    for n, length in ((0, 2), (2, 2), (3, 4), (5, 7), (9, 7)):
        jets = ak.Array([{"a": [0.5] * n, "b": [0.0] * n}, {"a": [0.5], "b": [1.0]}])[:1]
        assert features.pack(jets).shape == (1, 2, length)


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


@pytest.mark.parametrize("prefix", ["", "of_jet."])
def test_each_group_has_a_mask_of_its_own(prefix: str) -> None:
    model = sonic.Model.from_weaver("m", GROUPS, prefix=prefix)
    counts = {"pf": [3, 0, 1, 5], "sv": [0, 2, 4, 1]}
    columns = {
        f"{name}_{variable}": [[1.0] * n for n in numbers]
        for name, numbers in counts.items()
        for variable in ("pt", "deta")
    }
    jets = ak.Array(
        [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]
    )
    inputs = bind_inputs(model.inputs, ak.zip({"of_jet": jets}, depth_limit=1) if prefix else jets)
    sent = inputs.pack(0, len(inputs))
    for name, numbers in counts.items():
        length = GROUPS[f"{name}_mask"]["var_length"]
        by_hand = [[[float(k < n) for k in range(length)]] for n in numbers]
        assert sent[f"{name}_mask"].tolist() == by_hand
        # What is there is 1 and what pads is 0: the mask is what is sent of the constituents.
        assert sent[f"{name}_points"].tolist() == by_hand


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
    with pytest.raises(errors.ConfigError, match="cannot read the preprocessing file"):
        weaver.read(tmp_path / "none.json")
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


def test_the_file_s_errors_do_not_carry_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        weaver.read(tmp_path / "none.json")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
