"""Every row is scored once, through an Envoy, whichever of the servers behind it are in trouble.

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
from tests.network.proxies import rate_limit
from tests.network.tritons import Triton
from tests.scored import Scored

from sonic_coffea.pool import Pool, Settings

OPEN = "open"


@contextlib.contextmanager
def circuits(pool: Pool) -> Iterator[set[str]]:
    """Collect the states that the circuit breakers of a pool are seen in."""
    seen: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen.update(server.circuit for server in pool.servers)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Case:
    """An Envoy, and what happens to one of the Tritons behind it.

    Parameters
    ----------
    settings : dict
        Of Envoy.
    trouble : callable, optional
        What happens to a Triton, while calls are in flight.
    calls : int
        How many there are at a time.
    retried : bool, optional
        Whether requests are sent again, if that is sure.
    opens : bool
        Whether nothing gets through for a while.
    adapts : bool
        Whether fewer than half of the requests are refused.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    trouble: Callable[[Triton], None] | None = None
    calls: int = 2
    retried: bool | None = None
    opens: bool = False
    adapts: bool = False


CASES = {
    "all well": Case(retried=False),
    "one of two dies": Case(trouble=Triton.kill, retried=True),
    "one of two hangs": Case(trouble=Triton.stop, opens=True),
    "few requests at a time": Case({"max_requests": 4}, calls=4, adapts=True),
    "few requests a second": Case({"filters": [rate_limit(20, 5, 0.05)]}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_are_scored_once(
    case: Case, two_tritons: list[Triton], proxy: Any, scored: Scored, direct: list[Any]
) -> None:
    # On a machine that is busy, a server may be late as if it hung.
    patient = {"hedge_after_s": 60.0} if case.retried is False else {}
    with (
        proxy(two_tritons, **case.settings) as running,
        Pool(Settings.make(running.url, **patient)) as pool,
        circuits(pool) as seen,
    ):
        before = {triton: triton.requests() for triton in two_tritons}
        scored(pool, timeout_s=120)
        pendings = scored.submit(*[pool] * case.calls)
        if case.trouble:
            case.trouble(two_tritons[0])
        pendings += scored.submit(pool)
        scored.check(*pendings, timeout_s=120)
        scored(pool, timeout_s=120)  # what is known by then does not cost that much again
        total = pool.statistics.total()
        rows = sum(score is not None for event in direct for score in event)
        assert total.rows == (len(pendings) + 2) * rows
        assert total.failures == 0
        if case.adapts:
            # Which counter of Envoy's has what did not pass, depends on its version.
            refused = running.statistic("cluster.tritons.upstream_rq_(active|pending)_overflow")
            assert refused < total.requests / 2
        assert case.opens or OPEN not in seen
        assert case.retried is None or (total.retries > 0) == case.retried
        if case.trouble is None:
            assert all(triton.requests() > before[triton] + 5 for triton in two_tritons)
