"""Networks that weaver's files describe, on the real Triton, against onnxruntime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper
from tests.onnx_files import save_onnx

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Settings
from sonic_coffea.tools import check, scaffold

if TYPE_CHECKING:
    from pathlib import Path

# Variables, and the least and the greatest length, of each group.
GROUPS = {
    "pf": (["pf_pt_log", "pf_deta", "pf_dphi"], 4, 12),
    "sv": (["sv_pt_log", "sv_mass"], 1, 3),
    "lt": (["lt_pt_log"], 1, 5),
}
JET = ["jet_pt_log", "jet_eta"]
LABELS = ["label_b", "label_g", "target_pt"]


def preprocess() -> dict[str, Any]:
    """Groups of lengths of their own, each with a mask, and numbers of the jet."""

    def infos(names: list[str]) -> dict[str, Any]:
        return {
            name: {
                "median": 0.25 * k,
                "norm_factor": 1.0 / (1 + k),
                "replace_inf_value": 0.5,
                "lower_bound": -2.0,
                "upper_bound": 1e32,
                "pad": -0.5 * k,
            }
            for k, name in enumerate(names)
        }

    file: dict[str, Any] = {"output_names": LABELS, "input_names": []}
    for name, (variables, least, most) in GROUPS.items():
        for kind, names in (("features", variables), ("mask", [f"{name}_mask"])):
            file["input_names"].append(f"{name}_{kind}")
            file[f"{name}_{kind}"] = {
                "var_names": names,
                "var_infos": infos(names),
                "min_length": least,
                "max_length": most,
            }
    file["input_names"].append("jet_features")
    single = {"min_length": 1, "max_length": 1}
    file["jet_features"] = {"var_names": JET, "var_infos": infos(JET), **single}
    return file


def save_network(path: Path) -> Path:
    """The masked mean of a convolution over each group, and the jet's numbers, to a layer."""
    rng = np.random.default_rng(4)
    weights = {"last": rng.normal(size=(8 * len(GROUPS) + len(JET), len(LABELS)))}
    nodes, inputs = "", ""
    for name, (variables, _, _) in GROUPS.items():
        weights[f"{name}_kernel"] = rng.normal(size=(8, len(variables), 1))
        inputs += (
            f"float[N, {len(variables)}, {name}] {name}_features, float[N, 1, {name}] {name}_mask, "
        )
        nodes += f"""
            {name}_conv = Conv({name}_features, {name}_kernel)
            {name}_relu = Relu({name}_conv)
            {name}_used = Mul({name}_relu, {name}_mask)
            {name}_sum = ReduceSum<keepdims = 0>({name}_used, axis)
            {name}_n = ReduceSum<keepdims = 0>({name}_mask, axis)
            {name}_number = Max({name}_n, one)
            {name}_mean = Div({name}_sum, {name}_number)"""
    means = ", ".join(f"{name}_mean" for name in GROUPS)
    return save_onnx(
        path,
        f"""({inputs}float[N, {len(JET)}, 1] jet_features) => (float[N, {len(LABELS)}] output)
        <int64[1] axis = {{2}}, float[1] one = {{1.0}}> {{
            {nodes}
            jet = Squeeze(jet_features, axis)
            all = Concat<axis = 1>({means}, jet)
            output = MatMul(all, last)
        }}""",
        tuple(numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items()),
    )


def jets(number: int) -> tuple[ak.Array, dict[str, list[Any]]]:
    """Jets of lengths from 0 to beyond the greatest, in each group; some numbers are not finite."""
    rng = np.random.default_rng(8)
    columns: dict[str, Any] = {name: rng.normal(size=number).astype(np.float32) for name in JET}
    for variables, _, most in GROUPS.values():
        counts = rng.permutation(np.arange(number) % (most + 4))
        for variable in variables:
            values = rng.normal(scale=3, size=counts.sum()).astype(np.float32)
            values[rng.random(len(values)) < 0.05] = np.inf
            columns[variable] = ak.unflatten(values, counts)
    array = ak.zip(columns, depth_limit=1)
    return array, {name: array[name].tolist() for name in array.fields}


def by_the_rule(group: dict[str, Any], values: list[list[float]], length: int) -> np.ndarray:
    """A jet's channels as the readers of these files make them, one number at a time."""
    out = np.empty((len(values), length), np.float32)
    for channel, numbers, info in zip(out, values, group["var_infos"].values(), strict=True):
        channel[:] = info["pad"]
        for k, number in enumerate(numbers[:length]):
            value = number if np.isfinite(number) else info["replace_inf_value"]
            value = (value - info["median"]) * info["norm_factor"]
            channel[k] = min(max(value, info["lower_bound"]), info["upper_bound"])
    return out


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_network(tmp_path_factory.mktemp("network") / "network.onnx")


@pytest.mark.server
def test_scores_are_those_of_the_rule(network: Path, installation: Any, tmp_path: Path) -> None:
    """Whatever shares a request: each jet is padded by hand to the length that it needs itself."""
    file = preprocess()
    array, plain = jets(150)
    session = onnxruntime.InferenceSession(network)
    expected = []
    for i in range(len(array)):
        feed = {"jet_features": by_the_rule(file["jet_features"], [[plain[n][i]] for n in JET], 1)}
        for name, (variables, least, most) in GROUPS.items():
            count = len(plain[variables[0]][i])
            length = min(max(count, least), most)
            numbers = [plain[variable][i] for variable in variables]
            feed[f"{name}_features"] = by_the_rule(file[f"{name}_features"], numbers, length)
            feed[f"{name}_mask"] = (np.arange(length) < count).astype(np.float32)[np.newaxis]
        (scores,) = session.run(["output"], {n: t[np.newaxis] for n, t in feed.items()})
        expected.append(scores[0])
    labels = [label.removeprefix("label_") for label in LABELS]
    sonic.build_repository(
        tmp_path / "served", {"network": network}, labels={"network": labels}, max_batch_size=16
    )
    model = sonic.Model.from_weaver("network", file, output="output")
    with (
        sonic.LocalServer(tmp_path / "served", stop_timeout_s=0.0) as server,
        sonic.connect(server),
    ):
        scores = model(array)
        received = np.stack([np.asarray(scores[label]) for label in labels], axis=1)
        np.testing.assert_allclose(received, expected, atol=1e-5, rtol=1e-5)
        assert model.check().max_rows == 16
        swapped = sonic.Model.from_weaver("network", file, output="output", labels=labels[::-1])
        with pytest.raises(
            errors.ContractError, match="labels of output 'output' .* another order"
        ):
            swapped.check()
        settings = Settings.make(server.url)
        other = sonic.Model.from_weaver(
            "network", file, output="output", labels=["bottom", "gluon", "pt"]
        )
        steps = [*check(settings, declared=[other]), *check(settings, declared=[swapped])]
        details = [s.detail for s in steps if s.name == "declaration of network"]
        assert details[0].endswith("the server calls the values of 'output' b, g, target_pt")
        assert "are declared in another order" in details[1]
        declaration = scaffold(settings, "network")
        names: dict[str, Any] = {}
        exec(declaration, names)  # noqa: S102
        assert names["model"].outputs["output"].labels == tuple(labels)
        assert names["model"].check().max_rows == 16
        short = {**file, "output_names": LABELS[:2]}
        with pytest.raises(errors.ContractError, match="declared with 2 labels, .* FP32 .N, 3"):
            sonic.Model.from_weaver("network", short, output="output").check()
        narrow = {**file["pf_features"], "var_names": GROUPS["pf"][0][:2]}
        changed = sonic.Model.from_weaver(
            "network", {**file, "pf_features": narrow}, output="output"
        )
        with pytest.raises(errors.ContractError, match=r"'pf_features' is FP32 \[N, 2, \?\]"):
            changed.check()
