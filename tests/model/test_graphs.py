"""Graphs: edges that refer to nodes, several kinds of nodes, and a request for each graph.

Offsets and row numbers, which tell the elements of rows apart, have names of their own.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from numpy.typing import NDArray
from tests import doubling
from tests.onnx_files import save_onnx

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ContractError, InputError
from sonic_coffea.testing import FakeModel, FakeServer

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
@pytest.mark.parametrize("ends", [-1, 2, 3])
def test_edges_are_those_of_their_event_in_any_request(ends: int, nbytes: int) -> None:
    """PyTorch Geometric exports them as ``[2, E]``; an axis of fixed length has no rows."""
    arrays, fake = graphs(), FakeModel.of(MODEL, differences)
    inputs = {**fake.inputs, "edge_index": ("int64", (ends, -1))} if ends > 0 else fake.inputs
    served = {"graph": replace(fake, inputs=inputs)}
    with FakeServer(served) as server, sonic.connect(server.url, max_request_bytes=nbytes) as pool:
        if ends == 3:
            with pytest.raises(ContractError, match="fixed length"):
                MODEL(arrays)
            return
        scores = MODEL(arrays)
        assert (pool.statistics.total().requests > 1) == (nbytes == 300)
    r, edges = arrays["x"].r, arrays["edge_index"]
    assert ak.array_equal(scores, r[edges["from"]] - r[edges["to"]])


def test_numbers_that_refer_to_nothing_are_refused() -> None:
    arrays = {"x": ak.Array([[{"r": 1.0}], [{"r": 2.0}]])}
    for number in (1, -1):
        arrays["edge_index"] = ak.Array([[], [{"from": 0, "to": number}]])
        with pytest.raises(InputError, match="refers to no element of input 'x' in event 1"):
            MODEL.pack(arrays)


def test_inputs_that_refer_to_each_other_are_packed_in_any_order() -> None:
    arrays = {"x": ak.Array([[1.0, 2.0], [3.0]]), "e": ak.Array([[0, 1, 1], [0]])}
    arrays["f"] = ak.Array([[2, 0], [0]])
    options: dict[str, Any] = {"dtype": "int64", "axis_order": "L"}
    inputs = {
        "mask": sonic.Mask(3, beside="f", axis_order="L"),
        "f": sonic.Flat("f", None, batch="f_batch", refers_to="e", **options),
        "e": sonic.Flat("e", None, batch="e_batch", refers_to="x", **options),
        "x": sonic.Flat("x", axis_order="L"),
    }
    tensors = sonic.Model("m", inputs, {"y": ["a"]}).pack(arrays)
    assert tensors["f"].tolist() == [2, 0, 3]
    assert tensors["e"].tolist() == [0, 1, 1, 2]
    assert tensors["mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    circle = {**inputs, "e": sonic.Flat("e", None, batch="e_batch", refers_to="f", **options)}
    with pytest.raises(ConfigError, match="refers to another of them: mask, f, e"):
        sonic.Model("m", circle, {"y": ["a"]}).pack(arrays)


def model(**options: Any) -> sonic.Model:
    """A network that takes one graph, without an axis of rows."""
    edges = sonic.Flat(["from", "to"], None, dtype="int64", axis_order="FL")
    outputs = {
        "edge_score": sonic.Output(per="constituent", of="edge_index"),
        "event": ["sum", "spread"],
    }
    return sonic.Model(
        "tracks", {"x": sonic.Flat("r", None), "edge_index": edges}, outputs, **options
    )


@pytest.fixture
def tracks() -> Iterator[FakeServer]:
    """Whatever is in a request is one graph."""
    fake = FakeModel(
        inputs={"x": ("float32", (-1, 1)), "edge_index": ("int64", (2, -1))},
        outputs={"edge_score": ("float32", (-1,)), "event": ("float32", (2,))},
        function=dict,
        max_rows=0,
    )
    with FakeServer({"tracks": fake}) as server, sonic.connect(server.url, max_request_bytes=100):
        yield server


@pytest.mark.parametrize("per", ["row", "event"])
def test_graphs_without_offsets_are_traced(per: str) -> None:
    graph = {"hits": sonic.Flat("hits.x", splits=None)}
    model = sonic.Model("m", graph, {"y": ["score"]}, one_request_per=per)
    events = ak.Array([{"hits": [{"x": 1.0}, {"x": 2.0}]}])
    assert model(ak.Array(events.layout.to_typetracer(forget_length=True))).fields == ["score"]


def test_models_that_share_requests_need_an_axis_of_rows() -> None:
    tensors = {name: {name: ("float32", (2,))} for name in ("x", "y")}
    alone = FakeModel(inputs=tensors["x"], outputs=tensors["y"], function=dict, max_rows=0)
    with (
        FakeServer({"m": alone}) as server,
        sonic.connect(server.url),
        pytest.raises(ContractError, match=r"the model takes FP32 \[N\]"),
    ):
        sonic.Model("m", {"x": sonic.Row(["pt", "pt"])}, {"y": ["a", "b"]})(doubling.jets(1, 2))


@pytest.mark.parametrize("per", ["row", "event"])
def test_rows_with_requests_of_their_own_are_not_stacked_by_the_server(per: str) -> None:
    shared, array = doubling.MODEL, doubling.jets(1, 2)
    alone = sonic.Model("m", shared.inputs, shared.outputs, one_request_per=per)
    with (
        FakeServer(doubling.served()) as server,
        sonic.connect(server.url),
        pytest.raises(ContractError, match="as one_request_per .* with max_batch_size: 0"),
    ):
        alone(array)
    with FakeServer({"m": FakeModel.of(alone)}) as server, sonic.connect(server.url):
        assert len(alone(array)) == 2


def test_graphs_are_neither_split_nor_joined(tracks: FakeServer) -> None:
    by_row, by_event = model(one_request_per="row"), model(one_request_per="event")
    assert by_row.config_hash != by_event.config_hash
    assert pickle.loads(pickle.dumps(by_row)).one_request_per == "row"
    with pytest.raises(ConfigError, match="max_request_bytes"):
        by_event(graphs(6))
    with pytest.raises(ConfigError, match="leave deduplicate out"):
        by_row(graphs(3), deduplicate=True)
    stacked = {"x": sonic.Flat("r"), "edge_index": sonic.Flat(["from"], "ends", dtype="int64")}
    with pytest.raises(ContractError, match="one_request_per='row'"):
        sonic.Model("tracks", stacked, by_row.outputs)(graphs(3))
    single = {name: array[:1] for name, array in graphs(6).items()}
    assert by_event.pack(single)["edge_index"].shape[0] == 2


EVENTS = ak.Array({"a": [[1.0], [2.0, 3.0]], "b": [[4.0, 5.0], [6.0]], "c": [[7.0], [8.0, 9.0]]})
OF_OTHERS = sonic.Model("m", INPUTS, {"y": sonic.Output(per="constituent", of="edge_indices")})
SHARED = {"real": sonic.Flat("a"), "whole": sonic.Flat("b", None, dtype="int64")}
SAME_NAME = "name of its offsets or row numbers, is an input's"


def packed(inputs: dict[str, Any], array: Any = EVENTS, **options: Any) -> dict[str, Any]:
    return sonic.Model("m", inputs, {"y": ["a"]}, **options).pack(array)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (model, r"'x' puts .*one_request_per='row'"),
        (lambda: model(one_request_per="jet"), "no one_request_per 'jet'"),
        (lambda: sonic.Flat("from", refers_to="x"), "int32 or int64, got float32"),
        (lambda: sonic.Flat("a", "s", batch="s"), "two inputs, got 's' for both"),
        (lambda: sonic.Output(of="tracks"), "needs per='constituent'"),
        (lambda: OF_OTHERS(graphs()), "did you mean 'edge_index'"),
        (lambda: model(one_request_per="event").pack(graphs(6)), "6 requests, one for each event"),
        (lambda: packed(SHARED), r"input 'whole' has no splits.*event 0"),
        (lambda: EDGES.pack(graphs()["edge_index"]), r"refer to input 'x'.*Model\.pack"),
        *(
            (lambda inputs=inputs, per=per: packed(inputs, one_request_per=per), SAME_NAME)
            for inputs in (
                {"x": sonic.Flat("a", "x")},
                {"x": sonic.Flat("a", None, batch="x")},
                {"x": sonic.Flat("a", "y"), "y": sonic.Flat("b", "z")},
                {"y": sonic.Padded("b", 2), "x": sonic.Flat("a", batch="y")},
            )
            for per in (None, "row", "event")
        ),
        *(
            (lambda inputs=inputs: packed(inputs, [{"r": [1.0], "from": [0], "to": [0]}]), problem)
            for inputs, problem in (
                ({"nodes": INPUTS["x"], "edge_index": EDGES}, "no other Flat input: 'x'.* nodes"),
                ({**INPUTS, "x": sonic.Flat("r", sort_by="r")}, "as they are given"),
                ({**INPUTS, "x": sonic.Flat("r", None)}, "nothing tells them apart"),
                ({"x": sonic.Flat("r", None), "n": sonic.Row("n")}, "nothing tells them apart"),
            )
        ),
    ],
)
def test_bad_declarations_are_refused(make: Any, message: str) -> None:
    with pytest.raises((ConfigError, InputError), match=message):
        make()


@pytest.mark.parametrize("option", ["splits", "batch"])
def test_inputs_share_their_offsets_if_their_elements_are_the_same(option: str) -> None:
    names: dict[str, Any] = {"splits": None, option: "s"}
    flats = {"x": sonic.Flat("a", **names), "z": sonic.Flat("c", **names)}
    # The offsets of another's elements tell those of a third input apart, if they are as many.
    tensors = packed({**flats, "w": sonic.Flat("c", None, dtype="int64")})
    assert tensors["w"].tolist() == [[7], [8], [9]]
    assert tensors["x"][:, 0].tolist() == [1.0, 2.0, 3.0]
    assert tensors["z"][:, 0].tolist() == [7.0, 8.0, 9.0]
    assert tensors["s"].tolist() == ([0, 1, 3] if option == "splits" else [0, 1, 1])
    with pytest.raises(InputError, match=r"'s'.*a name of its own"):
        packed({"x": sonic.Flat("a", **names), "z": sonic.Flat("b", **names)})


def test_servers_that_would_stack_graphs_are_refused(tmp_path: Path) -> None:
    """A file calls its first axes by one name, as if its rows were independent."""
    graph = """(float[N, 1] x, int64[N] row) => (float[N, 1] y, int64[N] r) {
        y = Identity(x)
        r = Identity(row)
    }"""
    file, array = save_onnx(tmp_path / "numbered.onnx", graph), graphs()["x"]
    inputs = {"x": sonic.Flat("r", None, batch="row")}
    outputs = {"y": sonic.Output(per="constituent")}
    sonic.build_repository(tmp_path / "served", {"stacked": file})
    sonic.build_repository(tmp_path / "served", {"whole": file}, max_batch_size=0)
    stacked, whole = (sonic.Model(name, inputs, outputs) for name in ("stacked", "whole"))
    with sonic.connect(tmp_path / "served"):
        with pytest.raises(ContractError, match="serve the model with max_batch_size: 0"):
            stacked(array)
        assert whole(array).tolist() == array.r.tolist()
