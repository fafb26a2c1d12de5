"""What is too large, too slow or too much for a proxy or a Triton is split, or sent again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from tests.network.proxies import Nginx, buffer, needs_nginx
from tests.network.tritons import restore, tritons
from tests.transport.shared import check, model, objects
from tests.waiting import until

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.network.tritons import Triton

_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        {start}
        for request in requests:
            x, n = (pb_utils.get_input_tensor_by_name(request, k).as_numpy() for k in "xn")
            {work}
            y = np.stack([x.sum(axis=1), x[:, 0] * n[:, 0]], axis=1).astype(np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: {rows}
input {{ name: "x" data_type: TYPE_FP32 dims: [ 256 ] }}
input {{ name: "n" data_type: TYPE_INT64 dims: [ 3 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}
{batching}
instance_group {{ count: 1 kind: KIND_CPU }}
"""
# What each does for a request, before a batch, and how Triton queues its requests.
_WORK = {
    "one": ("", "", ""),
    "slow": ("time.sleep(0.0003 * len(x))", "", ""),
    "hungry": ("assert len(x) <= 500, 'CUDA out of memory. Tried to allocate 2.00 GiB'", "", ""),
    "short queue": ("", "time.sleep(0.02)", "max_queue_size: 4"),
    "impatient queue": (
        "",
        "time.sleep(0.02)",
        "default_timeout_microseconds: 50000 allow_timeout_override: false",
    ),
}


@pytest.fixture(scope="module")
def both(installation: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Triton]]:
    """Two Tritons with these models, which do not run until they are restored."""
    path = tmp_path_factory.mktemp("limits")
    for name, (work, start, policy) in _WORK.items():
        folder = path / name.replace(" ", "_")
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(_MODEL.format(work=work, start=start))
        batching = f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}" if policy else ""
        config = _CONFIG.format(name=folder.name, rows=8 if policy else 2048, batching=batching)
        (folder / "config.pbtxt").write_text(config)
    with tritons(path, tmp_path_factory.mktemp("triton"), 2) as both:
        yield both


@pytest.fixture
def triton(both: list[Triton]) -> list[Triton]:
    """One that runs."""
    restore(both[:1])
    return both[:1]


def pool_of(url: str) -> Pool:
    return Pool(Settings.make(url, shared_memory=False))


def retries(pool: Pool, name: str = "one", rows: int = 10_000) -> int:
    """Score objects, and return how many requests were sent again."""
    before = pool.statistics.total()
    sent = objects(rows)
    check(model(name)(sent, pool=pool), sent)
    total = pool.statistics.total()
    assert (total.failures, total.rows - before.rows) == (0, rows)
    return int(total.retries - before.retries)


@needs_nginx
def test_requests_above_a_proxys_limit_are_split(
    triton: list[Triton], proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With nginx's own limit of 1 MB; from then on, requests are smaller."""
    with proxy(triton, Nginx, body="1m") as running, pool_of(running.url) as pool:
        assert retries(pool) > 0
        assert retries(pool) == 0
        (message,) = [r.message for r in caplog.records if "bytes are split" in r.message]
        assert "status: 413; let requests be smaller: max_request_bytes" in message


def test_requests_above_envoys_buffer_are_split(triton: list[Triton], proxy: Any) -> None:
    with proxy(triton, filters=[buffer(500_000)]) as running, pool_of(running.url) as pool:
        assert retries(pool) > 0
        assert retries(pool) == 0


@needs_nginx
def test_one_row_above_a_proxys_limit_is_an_error(triton: list[Triton], proxy: Any) -> None:
    message = "a single row of 1048 bytes"
    with (
        proxy(triton, Nginx, body="1k") as running,
        pool_of(running.url) as pool,
        pytest.raises(errors.RequestTooLargeError, match=message),
    ):
        model()(objects(100), pool=pool)


def test_requests_above_a_routes_timeout_are_split(triton: list[Triton], proxy: Any) -> None:
    """A full request takes 0.6 s, and the route is cut after 0.3 s."""
    with proxy(triton, route_timeout_s=0.3) as running, pool_of(running.url) as pool:
        assert retries(pool, "slow", rows=6000) > 0


def test_batches_above_an_accelerators_memory_are_split(triton: list[Triton]) -> None:
    with pool_of(triton[0].url) as pool:
        assert retries(pool, "hungry") > 0
        assert retries(pool, "hungry") == 0


@pytest.mark.parametrize("name", ["short_queue", "impatient_queue"])
def test_requests_refused_by_a_queue_are_sent_again(
    triton: list[Triton], proxy: Any, name: str
) -> None:
    """Of a model that does 50 requests a second, with 8 clients."""
    sent = objects(80)
    with proxy(triton) as running, contextlib.ExitStack() as stack:
        pools = [stack.enter_context(pool_of(running.url)) for _ in range(8)]
        for pending in [model(name).submit(sent, pool=pool) for pool in pools]:
            check(pending.result(timeout_s=60), sent)
        totals = [pool.statistics.total() for pool in pools]
        assert sum(total.failures for total in totals) == 0
        assert sum(total.retries for total in totals) > 0
        assert all(pool.servers[0].circuit != "open" for pool in pools)


def test_shared_memory_through_a_balancer_is_an_error(both: list[Triton], proxy: Any) -> None:
    with proxy(both) as running, Pool(Settings.make(running.url, shared_memory=True)) as pool:
        with pytest.raises(errors.ConfigError) as caught:
            until(lambda: model()(objects(40_000), pool=pool) is None)
        assert "shared_memory=True, but " in str(caught.value)
        assert "several servers behind the URL" in str(caught.value)
