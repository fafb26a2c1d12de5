"""Calls are waited for in an event loop, which goes on, or up to a deadline.

`timeout_s` is that of the whole call, whichever part of it is slow. Each part is slow for real, and
would be for far longer than the call may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.doubling import MODEL, double, jets, served
from tests.network.fault_server import FaultServer, silent
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeServer

# What is slow takes 30 s at least, so that this tells a call that waits for it from one that does
# not, also on a busy machine.
TIMEOUT_S, MOST_S = 1.0, 15.0


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer(served()) as running:
        yield running


@pytest.fixture
def pool(server: FaultServer) -> Iterator[Pool]:
    with Pool(Settings.make(server.url)) as one:
        MODEL(jets(1), pool=one)  # compiles
        yield one


@pytest.fixture
def cached(server: FaultServer, tmp_path: Path) -> Iterator[Pool]:
    options = {"cache_trusts_versions": True, "metadata_timeout_s": 60}
    settings = Settings.make(server.url, cache=tmp_path / "scores", **options)
    with Pool(settings) as one:
        assert MODEL(jets(1), pool=one).twice.tolist() == [2]
        yield one


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Fail if the block waits for what is slow."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < MOST_S


@contextlib.contextmanager
def locked(path: Path, *pragmas: str) -> Iterator[None]:
    """Keep others from a file, as a process does that hangs meanwhile: they wait for 30 s."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for pragma in pragmas:
            database.execute(pragma)
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE scores SET scores = scores")
        yield
        database.execute("ROLLBACK")


def kept(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT count(*) FROM scores").fetchone()[0])


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12, float("nan"), "3", np.zeros(1)])
def test_bad_timeouts_are_refused(pool: Pool, timeout_s: Any) -> None:
    expected = "timeout_s: expected a number of seconds, up to 604800 .*; got "
    pending = MODEL.submit(jets(1), pool=pool)
    for wait in (
        lambda: pending.result(timeout_s),
        lambda: MODEL(jets(1), pool=pool, timeout_s=timeout_s),
        lambda: sonic.Folds([MODEL, MODEL])(jets(1), pool=pool, timeout_s=timeout_s),
    ):
        with pytest.raises(errors.ConfigError, match=expected):
            wait()
    assert pending.result(timeout_s=60).twice.tolist() == [2]


def test_timeouts_that_have_passed_are_over_at_once(server: FaultServer, pool: Pool) -> None:
    server.hold()
    with pytest.raises(errors.DeadlineError):
        MODEL.submit(jets(1), pool=pool).result(timeout_s=-0.5)
    server.release()


def test_unreadable_caches_are_not_waited_for(cached: Pool, tmp_path: Path) -> None:
    with locked(tmp_path / "scores", "PRAGMA locking_mode = EXCLUSIVE"):
        with in_time(), pytest.raises(errors.DeadlineError, match="was not read within 1 s"):
            MODEL(jets(1, 2), pool=cached, timeout_s=TIMEOUT_S)
        # It is the call's time that is over, so that there is nothing to be masked.
        with in_time(), pytest.raises(errors.DeadlineError):
            MODEL(jets(1, 2), pool=cached, timeout_s=TIMEOUT_S, on_error="mask")
    assert MODEL(jets(1, 2), pool=cached, timeout_s=60).twice.tolist() == [2, 4]


def test_unwritable_caches_are_not_waited_for(cached: Pool, tmp_path: Path) -> None:
    """The scores are there: they are returned, and kept when that is possible."""
    with locked(tmp_path / "scores"), in_time():
        scores = MODEL(jets(1, 2), pool=cached, timeout_s=TIMEOUT_S)
    assert scores.twice.tolist() == [2, 4]
    until(lambda: kept(tmp_path / "scores") == 2)


@pytest.mark.usefixtures("pool")
def test_servers_that_describe_nothing_are_not_waited_for(server: FaultServer) -> None:
    server.misbehave(silent, times=1000, method="ModelMetadata")
    with (
        Pool(Settings.make(server.url, metadata_timeout_s=60)) as asking,
        in_time(),
        pytest.raises(errors.DeadlineError, match="no server has described the model within 1 s"),
    ):
        MODEL(jets(1), pool=asking, timeout_s=TIMEOUT_S)


def test_servers_that_fall_silent_do_not_delay_scores(server: FaultServer, cached: Pool) -> None:
    """It is asked again before scores are kept, as the model may have changed meanwhile."""

    def fall_silent(inputs: Any) -> dict[str, Any]:
        server.misbehave(silent, times=1000, method="ModelMetadata")
        return double(inputs)

    server.models |= served(fall_silent)
    with in_time():
        scores = MODEL(jets(1, 2), pool=cached, timeout_s=TIMEOUT_S)
    assert scores.twice.tolist() == [2, 4]


@pytest.mark.parametrize("is_known", [True, False])
def test_slow_fallbacks_are_not_waited_for(
    server: FaultServer, pool: Pool, *, is_known: bool
) -> None:
    """Whether the model was known, and its server is lost, or there was no server at all."""
    starting, go_on = threading.Event(), threading.Event()

    def start() -> str:
        starting.set()
        go_on.wait(60)
        return server.url

    options: Any = {"fallback": start, "fallback_after_s": 0.1, "retry_timeout_s": 120}
    message = "not all of 1 rows" if is_known else "no server has described the model within 1 s"
    with FakeServer(server.models) as lost:
        url = lost.url if is_known else "grpc://127.0.0.1:9"
        with Pool(Settings.make(url, **options)) as falling:
            if is_known:
                assert MODEL(jets(1), pool=falling).twice.tolist() == [2]
                lost.stop()
            with in_time(), pytest.raises(errors.DeadlineError, match=message):
                MODEL(jets(1), pool=falling, timeout_s=TIMEOUT_S)
            # On a busy machine, the call may end before the server is known to be lost.
            go_on.set()
            assert MODEL(jets(1), pool=falling, timeout_s=60).twice.tolist() == [2]
            assert starting.is_set()


def test_pending_calls_are_awaited_while_the_loop_goes_on(server: FaultServer, pool: Pool) -> None:
    async def main() -> list[Any]:
        server.hold()
        calls = [MODEL.submit(jets(number), pool=pool) for number in range(20)]

        async def scores(call: sonic.Pending) -> Any:
            return (await call).twice.tolist()

        waiting = [asyncio.create_task(scores(call)) for call in calls]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        server.release()
        return await asyncio.gather(*waiting)

    assert asyncio.run(main()) == [[2.0 * number] for number in range(20)]


def test_calls_that_are_over_are_awaited_again(pool: Pool) -> None:
    async def main() -> None:
        call = MODEL.submit(jets(1, 2), pool=pool)
        assert (await call).twice.tolist() == (await call).twice.tolist() == [2.0, 4.0]
        call.cancel()
        assert call.result().twice.tolist() == [2.0, 4.0]
        assert len(await MODEL.submit(jets(), pool=pool)) == 0
        varied = sonic.Variations(one=jets(1), other=jets(3))
        assert (await MODEL.submit(varied, pool=pool))["other"].twice.tolist() == [6.0]

    asyncio.run(main())


def test_cancelled_waits_cancel_their_call(server: FaultServer, pool: Pool) -> None:
    async def main() -> None:
        server.hold()
        call = MODEL.submit(jets(1), pool=pool)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.1)
        until(call.done)
        with pytest.raises(errors.CancelledError):
            await call

    asyncio.run(main())
    server.release()


def test_calls_stay_in_their_process(pool: Pool) -> None:
    """As results of dask's tasks, which forgot to ask for the scores."""
    with pytest.raises(errors.ConfigError, match=r"send what its result\(\) returns"):
        pickle.dumps(MODEL.submit(jets(1), pool=pool))
