"""Calls in an event loop, which goes on while they are on their way."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
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

MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})


def jets(*numbers: float) -> ak.Array:
    return ak.zip({"pt": np.asarray(numbers, np.float32)})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({"m": FakeModel.of(MODEL, lambda x: {"y": 2 * x["x"]})}) as running:
        yield running


@pytest.fixture
def pool(server: FakeServer) -> Iterator[Pool]:
    with Pool(Settings.make(server.url)) as one:
        MODEL(jets(1), pool=one)
        yield one


def test_pending_calls_are_awaited_without_a_thread(server: FakeServer, pool: Pool) -> None:
    """However many there are, and with one thread for what blocks."""

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        server.hold()
        calls = [MODEL.submit(jets(number), pool=pool) for number in range(20)]

        async def scores(call: sonic.Pending) -> Any:
            return (await call).twice.tolist()

        waiting = [asyncio.create_task(scores(call)) for call in calls]
        await asyncio.sleep(0)
        # The loop goes on, and the thread is free.
        assert await asyncio.wait_for(loop.run_in_executor(None, lambda: 5), 60) == 5
        assert not any(task.done() for task in waiting)
        server.release()
        return await asyncio.gather(*waiting)

    assert asyncio.run(main()) == [[2.0 * number] for number in range(20)]


def test_what_is_over_is_awaited_again(pool: Pool) -> None:
    async def main() -> None:
        call = MODEL.submit(jets(1, 2), pool=pool)
        assert (await call).twice.tolist() == (await call).twice.tolist() == [2.0, 4.0]
        assert len(await MODEL.submit(jets(), pool=pool)) == 0
        varied = sonic.Variations(one=jets(1), other=jets(3))
        assert (await MODEL.submit(varied, pool=pool))["other"].twice.tolist() == [6.0]

    asyncio.run(main())


def test_a_failure_is_raised_where_it_is_awaited(server: FakeServer, pool: Pool) -> None:
    async def main() -> None:
        with pytest.raises(errors.ServerLostError):
            await MODEL.submit(jets(1), pool=impatient)

    with Pool(Settings.make(server.url, retry_timeout_s=0.1)) as impatient:
        MODEL(jets(1), pool=impatient)
        server.stop()
        asyncio.run(main())


def test_a_wait_that_is_cancelled_cancels_the_call(server: FakeServer, pool: Pool) -> None:
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


def test_a_loop_that_is_closed_is_no_concern_of_the_pool(server: FakeServer, pool: Pool) -> None:
    loop = asyncio.new_event_loop()
    server.hold()
    call = MODEL.submit(jets(1), pool=pool)
    # As one that is killed: nothing is cancelled.
    waiting = call.__await__()
    asyncio.events._set_running_loop(loop)
    try:
        next(waiting)
    finally:
        asyncio.events._set_running_loop(None)
        loop.close()
    server.release()
    until(call.done)
    assert MODEL(jets(3), pool=pool).twice.tolist() == [6.0]
