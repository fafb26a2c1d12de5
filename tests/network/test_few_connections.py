"""More clients than connections that SuperSONIC's Envoy lets in at a time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from tests.network.tritons import Triton
    from tests.scored import Scored


def test_more_clients_than_connections_are_let_in(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
) -> None:
    """Eight clients where five may connect at a time, and one more in each second."""
    with envoy(two_tritons, connections=(5, 1, 1.0)) as running, contextlib.ExitStack() as stack:
        settings = Settings.make(running.url)
        pools = [stack.enter_context(Pool(settings)) for _ in range(8)]
        pendings = scored.submit(*pools)
        scored.check(*pendings)
        assert all(pool.statistics.total().failures == 0 for pool in pools)
