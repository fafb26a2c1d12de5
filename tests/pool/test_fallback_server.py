"""What scores rows while no server has the model."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})


def double(inputs: Any) -> dict[str, Any]:
    return {"y": 2 * inputs["x"]}


def served(function: Any = double) -> dict[str, FakeModel]:
    return {"m": FakeModel.of(MODEL, function, max_rows=4)}


def objects(n: int) -> ak.Array:
    return ak.zip({"pt": np.arange(n, dtype=np.float32)})


def twice(scores: ak.Array) -> list[float]:
    return (scores.twice / 2).tolist()


@pytest.fixture
def remote() -> Iterator[FakeServer]:
    with FakeServer(served()) as server:
        yield server


@pytest.fixture
def local() -> Iterator[FakeServer]:
    with FakeServer(served()) as server:
        yield server


def pool_of(remote: FakeServer, fallback: Any, **options: Any) -> Pool:
    given = {"fallback_after_s": 0.1, "retry_timeout_s": 30, **options}
    return Pool(Settings.make(remote.url, fallback=fallback, **given))


def rows(server: FakeServer) -> int:
    return server.statistics["m", "rows"]


def test_nothing_is_started_while_servers_are_there(remote: FakeServer) -> None:
    def never() -> str:
        raise AssertionError

    with pool_of(remote, never) as pool:
        assert twice(MODEL(objects(40), pool=pool)) == list(range(40))


def test_a_server_lost_in_mid_run_and_back(remote: FakeServer, local: FakeServer) -> None:
    with pool_of(remote, lambda: local.url) as pool:
        assert twice(MODEL(objects(8), pool=pool)) == list(range(8))
        remote.hold()
        pending = MODEL.submit(objects(40), pool=pool)
        until(lambda: len(remote.requests) > 2)
        remote.stop()
        assert twice(pending.result(timeout_s=60)) == list(range(40))
        scored = {server: tally.rows for (server, *_), tally in pool.statistics}
        assert rows(local) == scored[local.url]
        assert scored[local.url] > 20
        before = rows(remote)
        remote.start()
        until(lambda: twice(MODEL(objects(4), pool=pool)) == [0, 1, 2, 3] and rows(remote) > before)
        before = rows(local)
        assert twice(MODEL(objects(40), pool=pool)) == list(range(40))
        assert rows(local) == before


def test_a_server_lost_from_the_start(remote: FakeServer, local: FakeServer) -> None:
    remote.stop()
    with pool_of(remote, lambda: local.url) as pool:
        assert twice(MODEL(objects(40), pool=pool)) == list(range(40))
        assert rows(local) == 40


def test_a_model_that_no_server_has(remote: FakeServer, local: FakeServer) -> None:
    remote.unload("m")
    with pool_of(remote, lambda: local.url, fallback_after_s=1000) as pool:
        assert twice(MODEL(objects(40), pool=pool)) == list(range(40))
        remote.load("m")


@contextlib.contextmanager
def with_digests(servers: str, fallback: str, **options: Any) -> Iterator[tuple[Pool, FakeServer]]:
    """Yield a pool whose server is lost after its first rows, and the fallback."""

    def of(digest: str) -> FakeServer:
        return FakeServer({"m": replace(served()["m"], digest=digest)})

    with (
        of(servers) as remote,
        of(fallback) as local,
        pool_of(remote, lambda: local.url, **options) as pool,
    ):
        assert twice(MODEL(objects(4), pool=pool)) == list(range(4))
        remote.stop()
        yield pool, local


def test_a_fallback_with_the_same_digest_scores(caplog: pytest.LogCaptureFixture) -> None:
    with with_digests("one", "one") as (pool, local):
        assert twice(MODEL(objects(40), pool=pool)) == list(range(40))
        assert rows(local) == 40
    assert "cannot be compared" not in caplog.text


def test_a_fallback_with_another_digest_is_refused() -> None:
    with with_digests("one", "two") as (pool, local):
        message = (
            "fallback has another model: its files have the digest two, those of the servers one"
        )
        with pytest.raises(errors.ContractError, match=message):
            MODEL(objects(40), pool=pool)
        assert rows(local) == 0


@pytest.mark.parametrize(("servers", "fallback"), [("one", ""), ("", "two"), ("", "")])
def test_a_fallback_that_cannot_be_compared_is_said_once(
    servers: str, fallback: str, caplog: pytest.LogCaptureFixture
) -> None:
    with with_digests(servers, fallback) as (pool, _):
        for _ in range(2):
            assert twice(MODEL(objects(8), pool=pool)) == list(range(8))
    assert caplog.text.count("cannot be compared") == 1


def test_a_fallback_that_cannot_be_had(remote: FakeServer) -> None:
    def broken() -> str:
        raise ZeroDivisionError

    remote.stop()
    with (
        pool_of(remote, broken, retry_timeout_s=0.3) as pool,
        pytest.raises(errors.ServerLostError),
    ):
        MODEL(objects(4), pool=pool)
    remote.start()
    with pool_of(remote, broken, retry_timeout_s=0.3) as pool:
        MODEL(objects(4), pool=pool)
        remote.stop()
        with pytest.raises(errors.ServerLostError):
            MODEL(objects(4), pool=pool)


@pytest.mark.parametrize("as_path", [True, False])
def test_this_process_takes_over_with_a_repository(
    repository: Path, as_path: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tagger = sonic.Model(
        "tagger",
        inputs={"features": sonic.Padded(["pt", "eta"], 8), "mask": sonic.Mask(8)},
        outputs={"scores": ["qcd", "top"]},
    )
    constituents = ak.Array([[[{"pt": 1.0, "eta": 2.0}], []], [[{"pt": 2.0, "eta": 1.0}]]])
    fallback = repository if as_path else str(repository)
    with sonic.connect("grpc://127.0.0.1:9", fallback=fallback, fallback_after_s=0.1) as pool:
        scores = tagger(constituents)
        scored = {server: tally.rows for (server, *_), tally in pool.statistics}
    assert scored == {repository.as_uri(): 3}
    with sonic.connect(repository):
        assert tagger(constituents).tolist() == scores.tolist()
    assert "rows are scored by the fallback file://" in caplog.text


def test_the_owner_of_the_fallback_ends_first(local: FakeServer, remote: FakeServer) -> None:
    """Then another is started."""
    with FakeServer(served()) as second:
        urls = iter([local.url, second.url])
        with pool_of(remote, lambda: next(urls)) as pool:
            remote.stop()
            assert twice(MODEL(objects(8), pool=pool)) == list(range(8))
            local.stop()
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.append(MODEL(objects(8), pool=pool)))
            thread.start()
            thread.join(60)
            assert twice(found[0]) == list(range(8))
            assert rows(second) >= 8
