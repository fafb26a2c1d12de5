"""Requests that are too large, or take too long, for what is before a real Triton or for itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.network.nginx import needs_nginx
from tests.network.tritons import tritons
from tests.transport.shared import check, model, objects

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.network.tritons import Triton

# Takes 0.3 ms a row, or fails with more than 500 rows as an accelerator without memory does.
_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x, n = (pb_utils.get_input_tensor_by_name(request, k).as_numpy() for k in "xn")
            {work}
            y = np.stack([x.sum(axis=1), x[:, 0] * n[:, 0]], axis=1).astype(np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
_WORK = {
    "one": "",
    "slow": "time.sleep(0.0003 * len(x))",
    "hungry": "assert len(x) <= 500, 'CUDA out of memory. Tried to allocate 2.00 GiB'",
}
_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 2048
input {{ name: "x" data_type: TYPE_FP32 dims: [ 256 ] }}
input {{ name: "n" data_type: TYPE_INT64 dims: [ 3 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}
"""


@pytest.fixture(scope="module")
def triton(installation: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Triton]]:
    path = tmp_path_factory.mktemp("limits")
    for name, work in _WORK.items():
        (path / name / "1").mkdir(parents=True)
        (path / name / "1" / "model.py").write_text(_MODEL.format(work=work))
        (path / name / "config.pbtxt").write_text(_CONFIG.format(name=name))
    with tritons(path, tmp_path_factory.mktemp("triton"), 1) as running:
        yield running


def pool_of(url: str, **options: Any) -> Pool:
    return Pool(Settings.make(url, shared_memory=False, **options))


def scored(pool: Pool, name: str = "one", rows: int = 10_000) -> int:
    """Score objects, and return how many requests were sent again."""
    before = pool.statistics.total().retries
    sent = objects(rows)
    check(model(name)(sent, pool=pool), sent)
    total = pool.statistics.total()
    assert total.failures == 0
    return int(total.retries - before)


@needs_nginx
def test_what_is_larger_than_a_proxy_takes_is_split(
    triton: list[Triton], nginx: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With nginx's own limit of 1 MB; from then on, requests are smaller."""
    with nginx(triton, body="1m") as running, pool_of(running.url) as pool:
        assert scored(pool) > 0
        assert scored(pool) == 0
        (message,) = [r.message for r in caplog.records if "bytes are split" in r.message]
        assert "status: 413; let requests be smaller: max_request_bytes" in message


def test_what_is_larger_than_envoys_buffer_is_split(triton: list[Triton], envoy: Any) -> None:
    with envoy(triton, max_request_bytes=500_000) as running, pool_of(running.url) as pool:
        assert scored(pool) > 0
        assert scored(pool) == 0


@needs_nginx
def test_a_row_that_is_larger_than_a_proxy_takes_is_an_error(
    triton: list[Triton], nginx: Any
) -> None:
    with nginx(triton, body="1k") as running, pool_of(running.url) as pool:
        begun = time.monotonic()
        with pytest.raises(errors.RequestTooLargeError, match="a single row of 1048 bytes"):
            model()(objects(100), pool=pool)
        assert time.monotonic() - begun < 10.0


def test_what_takes_longer_than_a_route_may_is_split(triton: list[Triton], envoy: Any) -> None:
    """A full request takes 0.6 s, and the route is cut after 0.3 s."""
    with envoy(triton, route_timeout_s=0.3) as running, pool_of(running.url) as pool:
        assert scored(pool, "slow", rows=6000) > 0
        total = pool.statistics.total()
        assert total.rows == 6000


def test_a_batch_that_an_accelerator_has_no_memory_for_is_split(triton: list[Triton]) -> None:
    with pool_of(triton[0].url) as pool:
        assert scored(pool, "hungry") > 0
        assert scored(pool, "hungry") == 0
