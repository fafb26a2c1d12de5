"""Graphs: several collections of an event in one request, without padding, on the real Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import sonic_coffea as sonic
from sonic_coffea import errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def save_graph(path: Path) -> Path:
    """Nodes of two kinds; numbers for each event, for each track, and of a new collection."""
    whole, real = TensorProto.INT64, TensorProto.FLOAT

    def tensor(name: str, kind: int, *shape: Any) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    def sizes(kind: str) -> list[Any]:
        return [
            helper.make_node("Slice", [f"{kind}_splits", "one", "end"], [f"{kind}_ends"]),
            helper.make_node("Slice", [f"{kind}_splits", "zero", "last"], [f"{kind}_begins"]),
            helper.make_node("Sub", [f"{kind}_ends", f"{kind}_begins"], [f"{kind}_sizes"]),
            helper.make_node("Cast", [f"{kind}_sizes"], [f"{kind}_reals"], to=real),
            helper.make_node("Unsqueeze", [f"{kind}_reals", "one"], [f"{kind}_column"]),
        ]

    nodes = [
        *sizes("track"),
        *sizes("hit"),
        helper.make_node("Concat", ["track_column", "hit_column"], ["sizes"], axis=1),
        helper.make_node("ReduceSum", ["tracks", "one"], ["weight"], keepdims=0),
        helper.make_node("Mul", ["hits", "three"], ["clusters"]),
        helper.make_node("Identity", ["hit_splits"], ["cluster_splits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            tensor("tracks", real, "T", 2),
            tensor("track_splits", whole, "T1"),
            tensor("hits", real, "H", 1),
            tensor("hit_splits", whole, "H1"),
        ],
        [
            tensor("sizes", real, "N", 2),
            tensor("weight", real, "T"),
            tensor("clusters", real, "H", 1),
            tensor("cluster_splits", whole, "H1"),
        ],
        [
            helper.make_tensor("zero", whole, [1], [0]),
            helper.make_tensor("one", whole, [1], [1]),
            helper.make_tensor("last", whole, [1], [-1]),
            helper.make_tensor("end", whole, [1], [2**62]),
            helper.make_tensor("three", real, [1], [3.0]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def graph_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    file = save_graph(folder / "graph.onnx")
    return sonic.build_repository(folder / "served", {"graph": file})


@pytest.fixture(scope="module")
def graph_server(graph_repository: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    with sonic.LocalServer(graph_repository, stop_timeout_s=0.0) as server:
        yield server


def events(seed: int = 3) -> ak.Array:
    rng = np.random.default_rng(seed)
    tracks, hits = rng.poisson(4, 300), rng.poisson(9, 300)

    def column(counts: np.ndarray) -> ak.Array:
        return ak.unflatten(rng.normal(size=counts.sum()).astype(np.float32), counts)

    return ak.zip(
        {
            "tracks": ak.zip({"pt": column(tracks), "d0": column(tracks)}),
            "hits": ak.zip({"x": column(hits)}),
        },
        depth_limit=1,
    )


def graph(**track_options: Any) -> sonic.Model:
    return sonic.Model(
        "graph",
        inputs={
            "hits": sonic.Flat("hits.x", "hit_splits"),
            "tracks": sonic.Flat(["tracks.pt", "tracks.d0"], "track_splits", **track_options),
        },
        outputs={
            "sizes": ["tracks", "hits"],
            "weight": sonic.Output(per="constituent", of="tracks"),
            "clusters": sonic.Output(["x"], splits="cluster_splits"),
        },
    )


@pytest.mark.parametrize("options", [{}, {"sort_by": "tracks.pt"}])
def test_two_kinds_of_nodes(graph_server: sonic.LocalServer, options: dict[str, Any]) -> None:
    array = events()
    with sonic.connect(graph_server, max_request_bytes=2_000) as pool:
        result = graph(**options)(array)
        assert pool.statistics.total().requests > 10
    assert result.sizes.tracks.tolist() == ak.num(array.tracks).tolist()
    assert result.sizes.hits.tolist() == ak.num(array.hits).tolist()
    weight = array.tracks.pt + array.tracks.d0
    assert ak.almost_equal(result.weight, weight, rtol=1e-6)
    assert result.clusters.x.tolist() == (array.hits.x * np.float32(3)).tolist()


def test_events_that_are_none_or_empty(graph_server: sonic.LocalServer) -> None:
    array = ak.mask(events(), np.arange(300) % 3 > 0)
    with sonic.connect(graph_server):
        result = graph()(array)
        assert ak.is_none(result).tolist() == ak.is_none(array).tolist()
        assert ak.num(ak.drop_none(result).weight).tolist() == (
            ak.num(ak.drop_none(array).tracks).tolist()
        )
        without = events()
        without = ak.with_field(without, without.tracks[:, :0], "tracks")
        assert graph()(without).weight.tolist() == [[]] * 300


def test_whose_constituents_must_be_an_input() -> None:
    model = graph()
    model.outputs["weight"] = sonic.Output(per="constituent", of="track")
    with pytest.raises(errors.ConfigError, match="did you mean 'tracks'"):
        model(events())
    with pytest.raises(errors.ConfigError, match="needs per='constituent'"):
        sonic.Output(of="tracks")


def save_numbered(path: Path) -> Path:
    """A file that calls its first axes by one name, as if its rows were independent."""
    real, whole = TensorProto.FLOAT, TensorProto.INT64
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["row"], ["r"])],
        "numbered",
        [
            helper.make_tensor_value_info("x", real, ["N", 1]),
            helper.make_tensor_value_info("row", whole, ["N"]),
        ],
        [
            helper.make_tensor_value_info("y", real, ["N", 1]),
            helper.make_tensor_value_info("r", whole, ["N"]),
        ],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path
    )
    return path


@pytest.mark.server
def test_a_server_that_would_stack_graphs_is_refused(tmp_path: Path) -> None:
    file = save_numbered(tmp_path / "numbered.onnx")
    model = sonic.Model(
        "numbered",
        inputs={"x": sonic.Flat("hits.x", splits=None, batch="row")},
        outputs={"y": sonic.Output(per="constituent")},
    )
    sonic.build_repository(tmp_path / "stacked", {"numbered": file})
    with (
        sonic.LocalServer(tmp_path / "stacked", stop_timeout_s=0.0) as server,
        sonic.connect(server),
        pytest.raises(errors.ContractError, match="serve the model with max_batch_size: 0"),
    ):
        model(events())
    sonic.build_repository(tmp_path / "whole", {"numbered": file}, max_batch_size=0)
    with sonic.LocalServer(tmp_path / "whole", stop_timeout_s=0.0) as server, sonic.connect(server):
        array = events()
        assert model(array).tolist() == array.hits.x.tolist()
