"""Calls in an event loop, which goes on while they are on their way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.doubling import MODEL, jets, served
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(served()) as running:
        yield running


@pytest.fixture
def pool(server: FakeServer) -> Iterator[Pool]:
    with Pool(Settings.make(server.url)) as one:
        MODEL(jets(1), pool=one)
        yield one


def test_pending_calls_are_awaited_while_the_loop_goes_on(server: FakeServer, pool: Pool) -> None:
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
        assert len(await MODEL.submit(jets(), pool=pool)) == 0
        varied = sonic.Variations(one=jets(1), other=jets(3))
        assert (await MODEL.submit(varied, pool=pool))["other"].twice.tolist() == [6.0]

    asyncio.run(main())


def test_failures_are_raised_where_they_are_awaited(server: FakeServer, pool: Pool) -> None:
    async def main() -> None:
        with pytest.raises(errors.ServerLostError):
            await MODEL.submit(jets(1), pool=impatient)

    with Pool(Settings.make(server.url, retry_timeout_s=0.1)) as impatient:
        MODEL(jets(1), pool=impatient)
        server.stop()
        asyncio.run(main())


def test_cancelled_waits_cancel_their_call(server: FakeServer, pool: Pool) -> None:
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
