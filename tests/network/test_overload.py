"""Proxies and servers that refuse because there is too much: the sender slows down."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import awkward as ak
import pytest
from tests.network.nginx import needs_nginx
from tests.network.tritons import tritons as run_tritons
from tests.network.watching import circuits
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.network.tritons import Triton
    from tests.scored import Scored

OPEN = "open"
_SLOW = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.02)
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(
                        "scores",
                        pb_utils.get_input_tensor_by_name(r, "x").as_numpy() * 2,
                    )
                ]
            )
            for r in requests
        ]
"""
_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "scores" data_type: TYPE_FP32 dims: [ 1 ] }}
dynamic_batching {{ default_queue_policy {{ {policy} }} }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""
POLICIES = {
    "short": "max_queue_size: 4",
    "impatient": "default_timeout_microseconds: 50000 allow_timeout_override: false",
}


def slow(name: str) -> sonic.Model:
    return sonic.Model(name, {"x": sonic.Row(["pt"])}, {"scores": ["twice"]})


@pytest.fixture(scope="module")
def slow_triton(installation: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """A Triton whose models take 20 ms for 8 rows, and have queues that refuse."""
    folder = tmp_path_factory.mktemp("slow")
    for name, policy in POLICIES.items():
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_SLOW)
        (version.parent / "config.pbtxt").write_text(_CONFIG.format(name=name, policy=policy))
    with run_tritons(folder / "repository", folder, 1) as (running,):
        yield running


def test_few_requests_at_a_time(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
) -> None:
    """Envoy's circuit breaker is no failure of what is behind it."""
    with (
        envoy(two_tritons, circuit_breakers={"max_requests": 4}) as running,
        Pool(Settings.make(running.url)) as pool,
        circuits(pool) as seen,
    ):
        scored(pool, calls=4)
        total = pool.statistics.total()
        assert total.failures == 0
        assert OPEN not in seen
        # It learns what passes, if it has not kept to that anyway. Which counter has what did not,
        # depends on Envoy's version.
        refused = running.statistic("cluster.tritons.upstream_rq_(active|pending)_overflow")
        assert refused < total.requests / 2


def test_many_clients_share_few_requests(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
) -> None:
    with (
        envoy(two_tritons, circuit_breakers={"max_requests": 4}) as running,
        contextlib.ExitStack() as stack,
    ):
        settings = Settings.make(running.url)
        pools = [stack.enter_context(Pool(settings)) for _ in range(8)]
        seen = stack.enter_context(circuits(*pools))
        pendings = scored.submit(*pools)
        scored.check(*pendings)
        assert all(pool.statistics.total().failures == 0 for pool in pools)
        assert OPEN not in seen


def test_a_local_rate_limit(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
) -> None:
    """170 requests where 20 may come at a time, and 100 in a second."""
    with (
        envoy(two_tritons, rate_limit=(20, 5, 0.05)) as running,
        Pool(Settings.make(running.url)) as pool,
        circuits(pool) as seen,
    ):
        scored(pool)
        assert pool.statistics.total().failures == 0
        assert OPEN not in seen


def test_an_overloaded_envoy(
    two_tritons: list[Triton],
    envoy: Any,
    scored: Scored,
) -> None:
    """Nothing gets through while it is overloaded; then all does."""
    with envoy(two_tritons, pressure=True) as running, Pool(Settings.make(running.url)) as pool:
        scored(pool)
        running.press(hard=True)
        (pending,) = scored.submit(pool)
        refused = "http.ingress.downstream_rq_overload_close"
        until(lambda: running.statistic(refused) > 5, what="refused requests")
        running.press(hard=False)
        scored.check(pending)
        total = pool.statistics.total()
        assert (total.failures, total.retries > 0) == (0, True)


@needs_nginx
def test_too_many_requests_by_an_ingress(
    two_tritons: list[Triton],
    nginx: Any,
    scored: Scored,
) -> None:
    """HTTP 429, which it gives for what is above 100 requests a second."""
    zone = "limit_req_zone $binary_remote_addr zone=all:1m rate=100r/s; limit_req_status 429;"
    with (
        nginx(two_tritons, http=zone, location="limit_req zone=all burst=20 nodelay;") as running,
        Pool(Settings.make(running.url)) as pool,
        circuits(pool) as seen,
    ):
        scored(pool)
        total = pool.statistics.total()
        assert (total.failures, total.retries > 0) == (0, True)
        assert OPEN not in seen


@pytest.mark.parametrize("name", POLICIES)
def test_queues_that_refuse(slow_triton: Triton, envoy: Any, jets: Any, name: str) -> None:
    """Of a model that does 50 requests a second, with 8 clients."""
    scorer = slow(name)
    objects = ak.flatten(jets.pt[:200], axis=None)[:160]
    expected = [2 * pt for pt in objects.tolist()]
    events = ak.Array([[{"pt": pt}] for pt in objects.tolist()])
    with envoy([slow_triton]) as running, contextlib.ExitStack() as stack:
        settings = Settings.make(running.url)
        pools = [stack.enter_context(Pool(settings)) for _ in range(8)]
        seen = stack.enter_context(circuits(*pools))
        pendings = [scorer.submit(events, pool=pool) for pool in pools]
        for pending in pendings:
            scores = pending.result(timeout_s=60)
            assert ak.flatten(scores.twice).tolist() == pytest.approx(expected)
        totals = [pool.statistics.total() for pool in pools]
        assert sum(total.failures for total in totals) == 0
        assert sum(total.retries for total in totals) > 0
        assert OPEN not in seen
