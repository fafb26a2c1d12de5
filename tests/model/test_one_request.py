"""Networks without a batch axis: a request for each row, or for each event."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ContractError, InputError
from sonic_coffea.layouts import bind_inputs
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from pathlib import Path

EDGES = ("source", "target")


def graphs(events: int, seed: int = 1) -> dict[str, ak.Array]:
    """Hits and edges of events; the second event has none."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 9, events)
    counts[1] = 0
    hits = ak.unflatten(ak.zip({"x": rng.normal(size=counts.sum()).astype("f4")}), counts)
    number = ak.local_index(hits.x)
    edges = ak.cartesian({"source": number, "target": number})
    edges = edges[edges.source < edges.target]
    return {"hits": hits, "edges": edges}


def model(**options: Any) -> sonic.Model:
    return sonic.Model(
        "tracks",
        {
            "hits": sonic.Flat("x", None),
            "edges": sonic.Flat(EDGES, None, dtype="int64", axis_order="FL"),
        },
        {
            "edge_score": sonic.Output(per="constituent", of="edges"),
            "event": ["sum", "spread"],
        },
        **options,
    )


def network(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Whatever is in the request is one graph: a score of each edge, and two of the graph."""
    x, (source, target) = inputs["hits"][:, 0], inputs["edges"]
    spread = x.max() - x.min() if len(x) else 0.0
    return {
        "edge_score": (x[source] * x[target]).astype("f4"),
        "event": np.asarray([x.sum(), spread], "f4"),
    }


def served(function: Any = network) -> FakeModel:
    return FakeModel(
        inputs={"hits": ("float32", (-1, 1)), "edges": ("int64", (2, -1))},
        outputs={"edge_score": ("float32", (-1,)), "event": ("float32", (2,))},
        function=function,
        max_rows=0,
    )


@pytest.mark.parametrize("per", ["row", "event"])
def test_each_graph_has_a_request_of_its_own(per: str) -> None:
    arrays = graphs(40)
    requests: list[int] = []

    def counted(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        requests.append(len(inputs["hits"]))
        return network(inputs)

    with FakeServer({"tracks": served(counted)}) as server, sonic.connect(server.url) as pool:
        scores = model(one_request_per=per)(arrays, pool=pool)
    # A server that is slow is asked once more.
    assert len(requests) >= 40
    assert set(requests) == set(ak.num(arrays["hits"]).to_list())
    x, edges = arrays["hits"].x, arrays["edges"]
    assert ak.almost_equal(scores.edge_score, x[edges.source] * x[edges.target])
    assert ak.almost_equal(scores.event["sum"], ak.sum(x, axis=1), atol=1e-5)
    spread = ak.fill_none(ak.ptp(x, axis=1), 0.0)
    assert ak.almost_equal(scores.event.spread, spread, atol=1e-6, dtype_exact=False)


def test_all_rows_of_an_event_share_a_request() -> None:
    """Jets with numbers and constituents; the network sees all jets of the event at once."""
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 4, 30)
    pf = rng.integers(0, 9, counts.sum())
    flat = ak.unflatten(ak.zip({"pt": rng.exponential(size=pf.sum()).astype("f4")}), pf)
    jets = ak.unflatten(
        ak.zip({"m": rng.normal(size=len(pf)).astype("f4"), "pf": flat}, depth_limit=1), counts
    )
    tagger = sonic.Model(
        "event",
        {"jets": sonic.Row("m"), "pf": sonic.Bucketed("pf.pt", [2, 4, 8])},
        {"y": None},
        one_request_per="event",
    )

    def share(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        own = inputs["jets"][:, 0] + inputs["pf"].sum(axis=(1, 2))
        return {"y": np.column_stack([own / own.sum()])}

    fake = FakeModel(
        inputs={"jets": ("float32", (-1, 1)), "pf": ("float32", (-1, 1, -1))},
        outputs={"y": ("float32", (-1, 1))},
        function=share,
        max_rows=0,
    )
    with FakeServer({"event": fake}) as server, sonic.connect(server.url) as pool:
        pending = tagger.submit(jets, pool=pool)
        y = pending.result()
    assert pending.statistics.total().requests >= np.count_nonzero(counts)
    own = jets.m + ak.sum(jets.pf.pt[:, :, :8], axis=-1)
    np.testing.assert_allclose(ak.flatten(y), ak.flatten(own / ak.sum(own, axis=1)), rtol=1e-4)


def test_rows_are_sent_without_an_axis_of_rows(tmp_path: Path) -> None:
    """A row's tensor is sent as it is, without an axis of length 1."""
    rows = ak.Array(
        [[{"x": [1.0, 2.0], "a": 1.0, "b": 2.0}], [], [{"x": [5.0], "a": 3.0, "b": 4.0}]]
    )
    tagger = sonic.Model(
        "single",
        {"x": sonic.Padded("x", 3), "r": sonic.Row(["a", "b"])},
        {"y": ["sum", "product"], "z": None},
        one_request_per="row",
    )

    def network(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert inputs["x"].shape == (1, 3)
        assert inputs["r"].shape == (2,)
        y = np.asarray([inputs["x"].sum(), inputs["r"].prod()], "f4")
        return {"y": y, "z": np.outer(inputs["r"], inputs["r"])}

    fake = FakeModel(
        inputs={"x": ("float32", (1, 3)), "r": ("float32", (2,))},
        outputs={"y": ("float32", (2,)), "z": ("float32", (2, 2))},
        function=network,
        max_rows=0,
    )
    with FakeServer({"single": fake}) as server, sonic.connect(server.url) as pool:
        scores = tagger(rows, pool=pool, deduplicate=True)
        with pytest.raises(ContractError):
            sonic.Model("single", tagger.inputs, tagger.outputs)(rows, pool=pool)
        options = {"cache": tmp_path / "scores", "cache_trusts_versions": True}
        with sonic.connect(server.url, **options) as caching:
            for _ in range(2):
                assert tagger(rows, pool=caching).to_list() == scores.to_list()
    assert scores.y.to_list() == [[{"sum": 3, "product": 2}], [], [{"sum": 5, "product": 12}]]
    assert scores.z.to_list() == [[[[1, 2], [2, 4]]], [], [[[9, 12], [12, 16]]]]


def test_merging_graphs_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'hits' puts .*one_request_per='row'"):
        model()
    model(one_request_per="event")
    with pytest.raises(ConfigError, match="no one_request_per 'jet'"):
        model(one_request_per="jet")


def test_offsets_of_the_same_elements_tell_rows_apart() -> None:
    arrays = graphs(5)
    shared = {"real": sonic.Flat("x"), "whole": sonic.Flat("n", None, dtype="int64")}
    hits = ak.with_field(arrays["hits"], ak.local_index(arrays["hits"].x), "n")
    assert len(bind_inputs(shared, hits)) == 5
    other = {"real": hits, "whole": hits[:, ::-1][:, 1:]}
    with pytest.raises(InputError, match=r"input 'whole' has no splits.*event 0"):
        bind_inputs(shared, other)


def test_graphs_are_neither_split_nor_joined() -> None:
    arrays, by_event = graphs(6), model(one_request_per="event")
    with FakeServer({"tracks": served()}) as server:
        small = sonic.connect(server.url, max_request_bytes=100)
        with small as pool, pytest.raises(ConfigError, match="max_request_bytes"):
            by_event(arrays, pool=pool)
    with pytest.raises(InputError, match="6 requests, one for each event"):
        by_event.pack(arrays)
    single = {name: array[:1] for name, array in arrays.items()}
    assert by_event.pack(single)["edges"].shape[0] == 2


def test_one_request_per_is_a_part_of_the_declaration() -> None:
    by_row, by_event = model(one_request_per="row"), model(one_request_per="event")
    assert by_row.config_hash != by_event.config_hash
    assert pickle.loads(pickle.dumps(by_row)).one_request_per == "row"
    with FakeServer({"tracks": served()}) as server, sonic.connect(server.url) as pool:
        with pytest.raises(ConfigError, match="leave deduplicate out"):
            by_row(graphs(3), pool=pool, deduplicate=True)
        with pytest.raises(ContractError, match="one_request_per='row'"):
            sonic.Model(
                "tracks",
                {"hits": sonic.Flat("x"), "edges": sonic.Flat(EDGES, "ends", dtype="int64")},
                by_row.outputs,
            )(graphs(3), pool=pool)
