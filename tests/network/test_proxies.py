"""Every row is scored once, through any proxy, whichever of the servers behind it are in trouble.

What is refused or lost is sent again, and says nothing of the URL: its circuit stays closed while
anything gets through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.network.processes import needs
from tests.network.proxies import Envoy, Nginx, Proxy, rate_limit
from tests.network.tritons import Triton
from tests.scored import Scored

from sonic_coffea.pool import Pool, Settings

OPEN = "open"
# One that is too busy with others: HTTP 429 for what is above 100 requests a second.
BUSY = {
    "http": "limit_req_zone $binary_remote_addr zone=all:1m rate=100r/s; limit_req_status 429;",
    "location": "limit_req zone=all burst=20 nodelay;",
}


@contextlib.contextmanager
def circuits(*pools: Pool) -> Iterator[set[str]]:
    """Collect the states that the circuit breakers of pools are seen in."""
    seen: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen.update(server.circuit for pool in pools for server in pool.servers)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Case:
    """A proxy, and what happens to the first Triton behind it.

    Parameters
    ----------
    kind, settings : type, dict
        The proxy.
    trouble : callable, optional
        What happens to a Triton, while calls are in flight.
    at_first : bool
        Whether it happens before there is a pool.
    pools, calls : int
        How many there are; each pool makes so many calls at a time.
    retried : bool, optional
        Whether requests are sent again, if that is sure.
    opens : bool
        Whether nothing gets through for a while.
    adapts : bool
        Whether fewer than half of the requests are refused.
    """

    kind: type[Proxy] = Envoy
    settings: dict[str, Any] = field(default_factory=dict)
    trouble: Callable[[Triton], None] | None = None
    at_first: bool = False
    pools: int = 1
    calls: int = 2
    retried: bool | None = None
    opens: bool = False
    adapts: bool = False


CASES = {
    "Envoy": Case(retried=False),
    "nginx": Case(Nginx, retried=False),
    "one of two dies": Case(trouble=Triton.kill, retried=True),
    "one of two is dead": Case(trouble=Triton.kill, at_first=True),
    "one of two behind nginx dies": Case(Nginx, trouble=Triton.kill, retried=True),
    "one of two hangs": Case(trouble=Triton.stop, opens=True),
    "few requests at a time": Case(settings={"max_requests": 4}, calls=4, adapts=True),
    "few requests a second": Case(settings={"filters": [rate_limit("http", 20, 5, 0.05)]}),
    "few requests a second by nginx": Case(Nginx, BUSY, retried=True),
    "few new connections": Case(
        settings={"listener_filters": [rate_limit("listener", 5, 1, 1.0)]},
        pools=8,
        calls=1,
        opens=True,
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name, marks=needs(*c.kind.programs)) for name, c in CASES.items()],
)
def test_rows_are_scored_once(
    case: Case, two_tritons: list[Triton], proxy: Any, scored: Scored, direct: list[Any]
) -> None:
    with (
        proxy(two_tritons, case.kind, **case.settings) as running,
        contextlib.ExitStack() as stack,
    ):
        before = {triton: triton.requests() for triton in two_tritons}
        if case.trouble and case.at_first:
            case.trouble(two_tritons[0])
        # On a machine that is busy, a server may be late as if it hung.
        patient = {"hedge_after_s": 60.0} if case.retried is False else {}
        settings = Settings.make(running.url, **patient)
        pools = [stack.enter_context(Pool(settings)) for _ in range(case.pools)]
        seen = stack.enter_context(circuits(*pools))
        scored(pools[0], timeout_s=120)
        busiest = max(two_tritons[case.at_first :], key=lambda t: t.requests() - before[t])
        pendings = scored.submit(*pools * case.calls)
        if case.trouble and not case.at_first:
            case.trouble(busiest)
        pendings += scored.submit(pools[0])
        scored.check(*pendings, timeout_s=120)
        scored(pools[0], timeout_s=120)  # what is known by then does not cost that much again
        calls = len(pendings) + 2
        totals = [pool.statistics.total() for pool in pools]
        rows = sum(score is not None for event in direct for score in event)
        assert sum(total.rows for total in totals) == calls * rows
        assert sum(total.failures for total in totals) == 0
        if case.adapts:
            # Which counter of Envoy's has what did not pass, depends on its version.
            refused = running.statistic("cluster.tritons.upstream_rq_(active|pending)_overflow")
            assert refused < totals[0].requests / 2
        assert case.opens or OPEN not in seen
        retries = sum(total.retries for total in totals)
        assert case.retried is None or (retries > 0) == case.retried
        if case.trouble is None:
            assert all(triton.requests() > before[triton] + 5 for triton in two_tritons)
