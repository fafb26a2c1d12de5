"""One URL, behind which a Triton hangs: others answer what it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.network.haproxy import needs_haproxy

from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from tests.network.tritons import Triton
    from tests.scored import Scored

    import sonic_coffea as sonic


@pytest.mark.parametrize("policy", ["LEAST_REQUEST", "ROUND_ROBIN"])
def test_one_of_two_hangs_in_mid_run(
    two_tritons: list[Triton],
    envoy: Any,
    tagger: sonic.Model,
    jets: Any,
    direct: list[Any],
    scored: Scored,
    policy: str,
) -> None:
    with envoy(two_tritons, policy=policy) as running, Pool(Settings.make(running.url)) as pool:
        scored(pool)
        pendings = scored.submit(*[pool] * 2)
        two_tritons[0].stop()
        pendings.append(tagger.submit(jets, pool=pool))
        scored.check(*pendings, timeout_s=120)
        # It is known by now, and does not cost that much again.
        scored(pool)
        assert pool.statistics.total().failures == 0
        two_tritons[0].go_on()
        scored(pool)
        total = pool.statistics.total()
        assert total.failures == 0
        assert total.rows == 6 * sum(score is not None for event in direct for score in event)


def test_a_pool_that_finds_one_of_two_hanging(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
) -> None:
    """Its first calls, of metadata, may be led to the one that hangs."""
    with envoy(two_tritons, policy="ROUND_ROBIN") as running:
        two_tritons[0].stop()
        with Pool(Settings.make(running.url)) as pool:
            scored(pool, timeout_s=120)
            assert pool.statistics.total().failures == 0


@needs_haproxy
@pytest.mark.parametrize("channels", [1, 4])
def test_the_one_at_the_end_of_a_connection_hangs(
    two_tritons: list[Triton],
    haproxy: Any,
    tagger: sonic.Model,
    scored: Scored,
    channels: int,
) -> None:
    """A balancer of connections leads all that is sent on one to the same Triton."""
    # It takes connections while it hangs, so that the balancer's check does not find out.
    with (
        haproxy(two_tritons, check="") as running,
        Pool(Settings.make(running.url, channels=channels)) as pool,
    ):
        before = {triton: triton.requests("tagger") for triton in two_tritons}
        scored(pool)
        max(two_tritons, key=lambda triton: triton.requests("tagger") - before[triton]).stop()
        pendings = scored.submit(*[pool] * 2)
        scored.check(*pendings, timeout_s=120)
        assert pool.statistics.total().failures == 0
