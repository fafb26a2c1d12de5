"""Graphs: several collections of an event in one request, without padding, on the real Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from tests.onnx_files import save_onnx

import sonic_coffea as sonic
from sonic_coffea import errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def save_graph(path: Path) -> Path:
    """Nodes of two kinds; numbers for each event, for each track, and of a new collection."""
    sizes = """
        {0}_ends = Slice({0}_splits, one, end)
        {0}_begins = Slice({0}_splits, zero, last)
        {0}_sizes = Sub({0}_ends, {0}_begins)
        {0}_reals = Cast<to = 1>({0}_sizes)
        {0}_column = Unsqueeze({0}_reals, one)"""
    inputs = "float[T, 2] tracks, int64[T1] track_splits, float[H, 1] hits, int64[H1] hit_splits"
    outputs = "float[N, 2] sizes, float[T] weight, float[H, 1] clusters, int64[H1] cluster_splits"
    constants = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {-1}"
    return save_onnx(
        path,
        f"""({inputs}) => ({outputs})
        <{constants}, int64[1] end = {{{2**62}}}, float[1] three = {{3.0}}> {{
            {sizes.format("track")}
            {sizes.format("hit")}
            sizes = Concat<axis = 1>(track_column, hit_column)
            weight = ReduceSum<keepdims = 0>(tracks, one)
            clusters = Mul(hits, three)
            cluster_splits = Identity(hit_splits)
        }}""",
    )


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
def test_graphs_of_two_kinds_of_nodes_are_scored(
    graph_server: sonic.LocalServer, options: dict[str, Any]
) -> None:
    array = events()
    with sonic.connect(graph_server, max_request_bytes=2_000) as pool:
        result = graph(**options)(array)
        assert pool.statistics.total().requests > 10
    assert result.sizes.tracks.tolist() == ak.num(array.tracks).tolist()
    assert result.sizes.hits.tolist() == ak.num(array.hits).tolist()
    weight = array.tracks.pt + array.tracks.d0
    assert ak.almost_equal(result.weight, weight, rtol=1e-6)
    assert result.clusters.x.tolist() == (array.hits.x * np.float32(3)).tolist()


def test_graphs_may_be_none_or_empty(graph_server: sonic.LocalServer) -> None:
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


def test_outputs_are_of_an_input() -> None:
    model = graph()
    model.outputs["weight"] = sonic.Output(per="constituent", of="track")
    with pytest.raises(errors.ConfigError, match="did you mean 'tracks'"):
        model(events())
    with pytest.raises(errors.ConfigError, match="needs per='constituent'"):
        sonic.Output(of="tracks")


@pytest.mark.server
def test_servers_that_would_stack_graphs_are_refused(tmp_path: Path) -> None:
    # A file that calls its first axes by one name, as if its rows were independent.
    file = save_onnx(
        tmp_path / "numbered.onnx",
        """(float[N, 1] x, int64[N] row) => (float[N, 1] y, int64[N] r) {
            y = Identity(x)
            r = Identity(row)
        }""",
    )
    outputs = {"y": sonic.Output(per="constituent")}
    stacked, whole = (
        sonic.Model(name, {"x": sonic.Flat("hits.x", None, batch="row")}, outputs)
        for name in ("stacked", "whole")
    )
    sonic.build_repository(tmp_path / "served", {"stacked": file})
    sonic.build_repository(tmp_path / "served", {"whole": file}, max_batch_size=0)
    array = events()
    with (
        sonic.LocalServer(tmp_path / "served", stop_timeout_s=0.0) as server,
        sonic.connect(server),
    ):
        with pytest.raises(errors.ContractError, match="serve the model with max_batch_size: 0"):
            stacked(array)
        assert whole(array).tolist() == array.hits.x.tolist()
