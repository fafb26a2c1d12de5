"""Each balancer, with all that is behind it well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.network.haproxy import needs_haproxy
from tests.network.nginx import needs_nginx

from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from tests.network.tritons import Triton
    from tests.scored import Scored

    import sonic_coffea as sonic


@pytest.mark.parametrize("policy", ["LEAST_REQUEST", "ROUND_ROBIN"])
def test_envoy(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
    policy: str,
) -> None:
    with envoy(two_tritons, policy=policy) as running, Pool(Settings.make(running.url)) as pool:
        scored(pool)
        assert pool.statistics.total().failures == 0
        assert all(running.requests_of(triton) > 20 for triton in two_tritons)


@needs_nginx
@pytest.mark.parametrize("channels", [1, 4])
def test_nginx(
    two_tritons: list[Triton],
    nginx: Any,
    tagger: sonic.Model,
    scored: Scored,
    channels: int,
) -> None:
    before = [triton.requests("tagger") for triton in two_tritons]
    with (
        nginx(two_tritons) as running,
        Pool(Settings.make(running.url, channels=channels)) as pool,
    ):
        scored(pool)
        assert pool.statistics.total().failures == 0
    after = [triton.requests("tagger") for triton in two_tritons]
    assert all(now > then + 5 for then, now in zip(before, after, strict=True))


@needs_haproxy
@pytest.mark.parametrize("mode", ["tcp", "http"])
def test_haproxy(
    two_tritons: list[Triton],
    haproxy: Any,
    scored: Scored,
    mode: str,
) -> None:
    with haproxy(two_tritons, mode=mode) as running, Pool(Settings.make(running.url)) as pool:
        scored(pool)
        assert pool.statistics.total().failures == 0
