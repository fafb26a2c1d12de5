"""One URL, behind which some Tritons are dead: what is refused says nothing of the URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.network.haproxy import needs_haproxy
from tests.network.nginx import needs_nginx
from tests.network.watching import circuits
from tests.waiting import until

from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from tests.network.tritons import Triton
    from tests.scored import Scored


OPEN = "open"


@pytest.mark.parametrize("policy", ["LEAST_REQUEST", "ROUND_ROBIN"])
@pytest.mark.parametrize("number", [2, 4])
def test_one_of_several_is_dead(
    four_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
    policy: str,
    number: int,
) -> None:
    with (
        envoy(four_tritons[:number], policy=policy) as running,
        Pool(Settings.make(running.url)) as pool,
    ):
        scored(pool)
        four_tritons[0].kill()
        with circuits(pool) as seen:
            scored(pool, calls=3)
        total = pool.statistics.total()
        assert total.failures == 0
        assert total.retries > 0
        assert OPEN not in seen


def test_a_pool_that_finds_one_of_several_dead(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
) -> None:
    """Its first calls, of metadata, are refused as any others."""
    with envoy(two_tritons) as running:
        two_tritons[0].kill()
        for _ in range(4):
            with Pool(Settings.make(running.url)) as pool:
                scored(pool)
                assert pool.statistics.total().failures == 0


@needs_nginx
def test_nginx_before_a_dead_one(
    two_tritons: list[Triton],
    nginx: Any,
    scored: Scored,
) -> None:
    """It answers 502 for each request that it leads there, as it does not count failures."""
    with (
        nginx(two_tritons, upstream="max_fails=0") as running,
        Pool(Settings.make(running.url)) as pool,
    ):
        scored(pool)
        with circuits(pool) as seen:
            pendings = scored.submit(*[pool] * 2)
            # What it has is answered by the other.
            two_tritons[0].kill()
            scored.check(*pendings)
        total = pool.statistics.total()
        assert (total.failures, total.retries > 0) == (0, True)
        assert OPEN not in seen


@needs_haproxy
def test_haproxy_before_a_dead_one(
    two_tritons: list[Triton],
    haproxy: Any,
    scored: Scored,
) -> None:
    """It answers 503 for each request that it leads there, as it does not check."""
    with (
        haproxy(two_tritons, mode="http", check="", backend="retries 0") as running,
        Pool(Settings.make(running.url)) as pool,
    ):
        scored(pool)
        two_tritons[0].kill()
        with circuits(pool) as seen:
            scored(pool)
        total = pool.statistics.total()
        assert (total.failures, total.retries > 0) == (0, True)
        assert OPEN not in seen


def test_all_of_them_die_and_one_comes_back(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
) -> None:
    """While nothing gets through, the circuit is open, and few requests are spent on it."""
    with (
        envoy(two_tritons) as running,
        Pool(Settings.make(running.url, retry_timeout_s=200)) as pool,
    ):
        scored(pool)
        # Submitted later, a call might ask for the model first, and wait for an answer.
        pendings = scored.submit(*[pool] * 4)
        for triton in two_tritons:
            triton.kill()
        until(lambda: pool.servers[0].circuit == OPEN, what="an open circuit")
        before = running.statistic("http.ingress.downstream_rq_total")
        two_tritons[1].start()
        spent = running.statistic("http.ingress.downstream_rq_total") - before
        scored.check(*pendings, timeout_s=200)
        assert pool.statistics.total().failures == 0
        # Triton has taken 2 s to start, or more.
        assert spent < 200
