"""Edges of graphs that share a request: what refers to nodes counts within the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, InputError
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


def test_numbers_that_refer_to_nothing() -> None:
    arrays = {"x": ak.Array([[{"r": 1.0}], [{"r": 2.0}]])}
    for number in (1, -1):
        arrays["edge_index"] = ak.Array([[], [{"from": 0, "to": number}]])
        with pytest.raises(InputError, match="refers to no element of input 'x' in event 1"):
            MODEL.pack(arrays)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"nodes": INPUTS["x"], "edge_index": EDGES}, "'x' is no other Flat input .* nodes"),
        ({**INPUTS, "x": sonic.Flat("r", sort_by="r")}, "as they are given"),
        ({**INPUTS, "x": sonic.Flat("r", None)}, "nothing tells them apart"),
    ],
)
def test_what_cannot_be_referred_to(inputs: dict[str, Any], problem: str) -> None:
    graph = ak.Array([{"r": [1.0], "from": [0], "to": [0]}])
    with pytest.raises(ConfigError, match=problem):
        sonic.Model("m", inputs, {"y": None}).pack(graph)
    with pytest.raises(ConfigError, match="int32 or int64, got float32"):
        sonic.Flat("from", refers_to="x")
