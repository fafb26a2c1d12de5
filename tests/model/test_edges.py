"""Edges refer to nodes of their request; offsets and row numbers have names of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ContractError, InputError
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


EDGES = sonic.Flat(["from", "to"], None, dtype="int64", axis_order="FL", refers_to="x")
INPUTS = {"x": sonic.Flat("r", None, batch="batch"), "edge_index": EDGES}
MODEL = sonic.Model("graph", INPUTS, {"score": sonic.Output(per="constituent", of="edge_index")})


def graphs(events: int = 40) -> dict[str, ak.Array]:
    rng = np.random.default_rng(2)
    nodes = rng.integers(0, 6, events)
    edges = np.where(nodes > 0, rng.integers(0, 9, events), 0)
    ends = [rng.integers(0, np.repeat(nodes, edges)) for _ in range(2)]
    x = ak.unflatten(rng.normal(size=nodes.sum()).astype(np.float32), nodes)
    index = ak.zip(
        {n: ak.unflatten(end, edges) for n, end in zip(("from", "to"), ends, strict=True)}
    )
    return {"x": ak.zip({"r": x}), "edge_index": index}


def differences(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    x, (start, stop) = inputs["x"][:, 0], inputs["edge_index"]
    assert np.array_equal(inputs["batch"][start], inputs["batch"][stop])
    return {"score": (x[start] - x[stop])[:, None]}


@pytest.mark.parametrize("nbytes", [300, 1_000_000])
def test_edges_are_those_of_their_event_in_any_request(nbytes: int) -> None:
    arrays = graphs()
    served = {"graph": FakeModel.of(MODEL, differences)}
    with FakeServer(served) as server, sonic.connect(server.url, max_request_bytes=nbytes) as pool:
        scores = MODEL(arrays)
        assert (pool.statistics.total().requests > 1) == (nbytes == 300)
    r, edges = arrays["x"].r, arrays["edge_index"]
    assert ak.array_equal(scores, r[edges["from"]] - r[edges["to"]])


def test_ends_of_edges_may_have_a_first_axis_of_fixed_length() -> None:
    """As PyTorch Geometric exports them, ``[2, E]``: that axis has no rows."""
    fake = FakeModel.of(MODEL, differences)
    inputs = {**fake.inputs, "edge_index": ("int64", (2, -1))}
    arrays = graphs()
    r, edges = arrays["x"].r, arrays["edge_index"]
    with (
        FakeServer({"graph": replace(fake, inputs=inputs)}) as server,
        sonic.connect(server.url) as pool,
    ):
        assert ak.array_equal(MODEL(arrays), r[edges["from"]] - r[edges["to"]])
        assert pool.statistics.total().requests == 1
    wrong = {**fake.inputs, "edge_index": ("int64", (3, -1))}
    with (
        FakeServer({"graph": replace(fake, inputs=wrong)}) as server,
        sonic.connect(server.url),
        pytest.raises(ContractError, match="fixed length"),
    ):
        MODEL(arrays)


def test_numbers_that_refer_to_nothing_are_refused() -> None:
    arrays = {"x": ak.Array([[{"r": 1.0}], [{"r": 2.0}]])}
    for number in (1, -1):
        arrays["edge_index"] = ak.Array([[], [{"from": 0, "to": number}]])
        with pytest.raises(InputError, match="refers to no element of input 'x' in event 1"):
            MODEL.pack(arrays)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"nodes": INPUTS["x"], "edge_index": EDGES}, "'x' is no other Flat input.* nodes"),
        ({**INPUTS, "x": sonic.Flat("r", sort_by="r")}, "as they are given"),
        ({**INPUTS, "x": sonic.Flat("r", None)}, "nothing tells them apart"),
    ],
)
def test_inputs_that_cannot_be_referred_to_are_refused(
    inputs: dict[str, Any], problem: str
) -> None:
    graph = ak.Array([{"r": [1.0], "from": [0], "to": [0]}])
    with pytest.raises(ConfigError, match=problem):
        sonic.Model("m", inputs, {"y": None}).pack(graph)
    with pytest.raises(ConfigError, match="int32 or int64, got float32"):
        sonic.Flat("from", refers_to="x")


EVENTS = ak.Array({"a": [[1.0], [2.0, 3.0]], "b": [[4.0, 5.0], [6.0]], "c": [[7.0], [8.0, 9.0]]})


@pytest.mark.parametrize("per", [None, "row", "event"])
@pytest.mark.parametrize(
    "inputs",
    [
        {"x": sonic.Flat("a", "x")},
        {"x": sonic.Flat("a", None, batch="x")},
        {"x": sonic.Flat("a", "y"), "y": sonic.Flat("b", "z")},
        {"y": sonic.Padded("b", 2), "x": sonic.Flat("a", batch="y")},
    ],
)
def test_names_of_offsets_are_those_of_no_other_input(
    inputs: dict[str, Any], per: str | None
) -> None:
    with pytest.raises(ConfigError, match="name of its offsets or row numbers, is an input's"):
        sonic.Model("m", inputs, {"y": ["a"]}, one_request_per=per)


def test_offsets_and_row_numbers_have_two_names() -> None:
    with pytest.raises(ConfigError, match="two inputs, got 's' for both"):
        sonic.Flat("a", "s", batch="s")


@pytest.mark.parametrize("option", ["splits", "batch"])
def test_inputs_of_the_same_elements_may_share_their_offsets(option: str) -> None:
    names: dict[str, Any] = {"splits": None, option: "s"}
    inputs = {"x": sonic.Flat("a", **names), "z": sonic.Flat("c", **names)}
    packed = sonic.Model("m", inputs, {"y": ["a"]}).pack(EVENTS)
    assert packed["x"][:, 0].tolist() == [1.0, 2.0, 3.0]
    assert packed["z"][:, 0].tolist() == [7.0, 8.0, 9.0]
    assert packed["s"].tolist() == ([0, 1, 3] if option == "splits" else [0, 1, 1])


@pytest.mark.parametrize("option", ["splits", "batch"])
def test_inputs_of_other_elements_do_not_share_their_offsets(option: str) -> None:
    names: dict[str, Any] = {"splits": None, option: "s"}
    inputs = {"x": sonic.Flat("a", **names), "z": sonic.Flat("b", **names)}
    with pytest.raises(InputError, match=r"'s'.*a name of its own"):
        sonic.Model("m", inputs, {"y": ["a"]}).pack(EVENTS)
