"""SuperSONIC's own refusals, by a real Envoy: an index without a body, and few connections."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.commands import run
from tests.network.envoy import REFUSED_INDEX

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from tests.network.tritons import Triton


def test_a_refused_index_stops_no_calls(
    two_tritons: list[Triton],
    envoy: Any,
    tagger: sonic.Model,
    jets: Any,
    direct: list[Any],
    compare: Any,
) -> None:
    with envoy(two_tritons, lua=REFUSED_INDEX) as running:
        with Pool(Settings.make(running.url)) as pool:
            compare(tagger(jets, pool=pool).top, direct)
            total = pool.statistics.total()
            assert (total.failures, total.retries) == (0, 0)
        with Pool(Settings.make(running.url)) as pool:
            unknown = sonic.Model("other", tagger.inputs, {"scores": ["qcd", "top"]})
            with pytest.raises(errors.ModelNotFoundError, match="other"):
                unknown(jets, pool=pool)


def test_commands_say_that_the_index_is_refused(two_tritons: list[Triton], envoy: Any) -> None:
    with envoy(two_tritons, lua=REFUSED_INDEX) as running:
        with Pool(Settings.make(running.url)) as pool:
            (connection,) = pool.connections()
            with pytest.raises(errors.OverloadError, match=r"no new clients .* SuperSONIC"):
                connection.models()
        said = run("models", running.url)
        assert said.returncode == 1
        assert "admits no new clients at the moment" in said.stderr.replace("\n", " ")
        checked = run("check", running.url, "tagger", "--json")
        assert checked.returncode == 0, checked.stdout
        assert all(step["ok"] for step in json.loads(checked.stdout)["steps"])


def test_more_clients_than_connections_are_let_in(
    two_tritons: list[Triton],
    envoy: Any,
    tagger: sonic.Model,
    jets: Any,
    direct: list[Any],
    compare: Any,
) -> None:
    """Eight clients where five may connect at a time, and one more in each second."""
    with envoy(two_tritons, connections=(5, 1, 1.0)) as running, contextlib.ExitStack() as stack:
        settings = Settings.make(running.url)
        pools = [stack.enter_context(Pool(settings)) for _ in range(8)]
        pendings = [tagger.submit(jets, pool=pool) for pool in pools]
        for pending in pendings:
            compare(pending.result(timeout_s=60).top, direct)
        assert all(pool.statistics.total().failures == 0 for pool in pools)
