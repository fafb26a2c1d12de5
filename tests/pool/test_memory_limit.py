"""What is in flight is limited by the memory that a process may use."""

from __future__ import annotations

import os
import resource
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from tests.limits import limited

from sonic_coffea.pool import Settings, _process
from sonic_coffea.pool._process import memory_limit_bytes

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = Settings.make("grpc://s:1")
V2 = {
    "proc/self/cgroup": "0::/system.slice/slurm/job_7/step_0\n",
    "sys/fs/cgroup/system.slice/slurm/job_7/step_0/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/slurm/job_7/memory.max": "20000000\n",
    "sys/fs/cgroup/system.slice/memory.max": "max\n",
}
# Inside of a container, whose group is at the root.
V1 = {
    "proc/self/cgroup": "4:cpu,memory:/docker/abc\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "30000000\n",
}


@pytest.mark.parametrize(("files", "limit"), [(V2, 20_000_000), (V1, 30_000_000)])
def test_control_groups_limit_memory(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    whole = memory_limit_bytes(tmp_path)
    assert whole is not None
    assert whole > 100_000_000
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_limit_bytes(tmp_path) == limit


def test_a_process_goes_by_the_limit_of_its_shell() -> None:
    # Linux does not enforce this one.
    with limited(resource.RLIMIT_RSS, 64_000_000):
        assert SETTINGS.in_flight_bytes(memory_limit_bytes()) == 2_000_000


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As Windows, which has neither.
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setitem(sys.modules, "resource", None)
    assert memory_limit_bytes(tmp_path) is None
    assert SETTINGS.in_flight_bytes(None) == 256_000_000


def test_the_limit_of_a_dask_worker_counts() -> None:
    _process.take_part(threading.Event.wait, 32_000_000)
    try:
        assert SETTINGS.in_flight_bytes(_process.memory_bytes()) == 1_000_000
    finally:
        _process.take_part(threading.Event.wait)
    assert _process.memory_bytes() == memory_limit_bytes()
