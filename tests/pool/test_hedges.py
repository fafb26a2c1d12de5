"""Requests that are sent to a second server, when the first takes long."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tests.pool.scripted import LOST, MODEL, ScriptedServer, doubled, inferred, objects, pool_of
from tests.waiting import until

if TYPE_CHECKING:
    import numpy as np


def test_a_straggler_is_sent_to_another_server(servers: dict[str, ScriptedServer]) -> None:
    one, two = servers.values()
    one.gate.clear()
    with pool_of(*servers, hedge_after_s=0.05) as pool:
        assert doubled(MODEL(objects(40), pool=pool)) == list(range(40))
        assert one.requests
        until(lambda: all(e.cancelled.is_set() for e in one.handles))
        assert pool.statistics.total().rows == 40
        assert sum(len(x) for x in two.requests) == 40
        assert doubled(MODEL(objects(4), pool=pool)) == list(range(4))


def test_nothing_is_sent_twice_unless_asked(servers: dict[str, ScriptedServer]) -> None:
    one, two = servers.values()
    one.behaviour = two.behaviour = inferred
    with pool_of(*servers) as pool:
        MODEL(objects(100), pool=pool)
    assert sum(len(x) for x in one.requests + two.requests) == 100


def test_a_failure_of_the_slower_of_two_is_nothing(servers: dict[str, ScriptedServer]) -> None:
    one, two = servers.values()
    sent = threading.Event()

    def slow(x: np.ndarray) -> Any:
        sent.wait(20)
        return 2 * x

    one.behaviour = slow
    two.behaviour = lambda _: (sent.set(), LOST)[1]
    with pool_of(*servers, hedge_after_s=0.01, balance="priority") as pool:
        assert doubled(MODEL(objects(4), pool=pool)) == list(range(4))
        assert len(one.requests) == 1
