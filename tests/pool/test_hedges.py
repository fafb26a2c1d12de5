"""Requests that are sent to a second server, when the first takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pool.scripted import MODEL, doubled, inferred, objects, pool_of
from tests.waiting import until

if TYPE_CHECKING:
    from tests.pool.scripted import ScriptedServer


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
