"""Real servers that are killed while requests are in flight."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import awkward as ak
import pytest
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def small_batches(tagger_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "repository"
    sonic.build_repository(path, {"tagger": tagger_path}, max_batch_size=4)
    return path


# On a busy machine, a server must end when it is killed, not as its model's process stood still.
PATIENT = {"SONIC_COFFEA_STALL_S": "30"}


@pytest.fixture
def doomed(small_batches: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    with sonic.LocalServer(
        small_batches, stop_timeout_s=1.0, restart=False, env=PATIENT
    ) as running:
        yield running


ANSWERS = 20

Connect = Callable[..., Any]


@pytest.fixture
def connect_and_kill(doomed: sonic.LocalServer) -> Connect:
    """Kill a server once it has answered `ANSWERS` requests, while it surely has another."""
    pid = doomed.pid
    assert pid is not None

    class Watched:
        def __init__(self, connection: Any) -> None:
            self._connection = connection
            self._answered = 0
            self._killed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

        def another(self) -> Watched:
            return Watched(self._connection.another())

        def infer(self, *arguments: Any, done: Any, **options: Any) -> Any:
            def counted(outcome: Any) -> None:
                self._answered += 1
                done(outcome)

            kills = self._answered >= ANSWERS and not self._killed
            if kills:
                self._killed = True
                os.kill(pid, signal.SIGSTOP)
            rpc = self._connection.infer(*arguments, done=counted, **options)
            if kills:
                os.kill(pid, signal.SIGKILL)
            return rpc

    def connect(url: str, **options: Any) -> Any:
        connection = connect_transport(url, **options)
        return Watched(connection) if url == doomed.url else connection

    return connect


def test_a_killed_server_is_one_error(
    doomed: sonic.LocalServer, connect_and_kill: Connect, tagger: sonic.Model, jets: ak.Array
) -> None:
    threads = threading.active_count()
    settings = Settings.make(doomed, retry_timeout_s=1.0)
    with Pool(settings, connect=connect_and_kill) as pool:
        with pytest.raises(errors.ServerLostError) as caught:
            tagger(jets, pool=pool)
        error = caught.value
        assert (error.server, error.model, error.version) == (doomed.url, "tagger", "1")
        assert error.rows is not None
        assert error.rows[1] - error.rows[0] == 4
        assert error.events is not None
        assert 0 <= error.events[0] < error.events[1] <= len(jets)
        total = pool.statistics.total()
        assert total.requests >= ANSWERS
        assert total.rows == 4 * total.requests
        assert total.failures >= 1
        # A second try does not wait for as long again. On a slow machine, rows are given up before
        # the endpoint is lost, and further tries use the rest of its retry budget.
        for _ in range(5):
            retries = pool.statistics.total().retries
            with pytest.raises(errors.ServerLostError):
                tagger(jets, pool=pool)
            if pool.statistics.total().retries == retries:
                break
        assert pool.statistics.total().retries == retries
        until(lambda: all(s.in_flight == 0 for s in pool.servers))
    until(lambda: threading.active_count() <= threads)


def test_a_processor_goes_on_with_none(
    doomed: sonic.LocalServer, tagger: sonic.Model, jets: ak.Array
) -> None:
    pid = doomed.pid
    assert pid is not None

    class Masking(sonic.SonicProcessor):
        models = {"top": tagger}  # noqa: RUF012
        on_error = "mask"

        def acquire(self, events: Any) -> dict[str, Any]:
            return {"top": events}

        def overlap(self, events: Any) -> None:
            """Kill the server while it surely has a request."""
            until(lambda: pool.statistics.total().requests >= ANSWERS)
            os.kill(pid, signal.SIGSTOP)
            until(lambda: pool.servers[0].in_flight > 0)
            os.kill(pid, signal.SIGKILL)

        def produce(self, events: Any, scores: Any) -> dict[str, Any]:
            return {"scores": scores["top"]}

    # Hundreds of requests one after the other leave time to kill.
    with sonic.connect(doomed, retry_timeout_s=0.5, max_in_flight=1) as pool:
        out = Masking().process(jets)
    scores = out["scores"].top
    assert ak.num(scores).tolist() == ak.num(jets).tolist()
    lost = ak.sum(ak.is_none(scores, axis=1)) - ak.sum(ak.is_none(jets, axis=1))
    statistics = sonic.report(out).statistics
    assert lost == statistics.masked > 0
    assert ak.count(scores) == statistics.total().rows >= 4 * ANSWERS
