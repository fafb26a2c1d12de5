from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.server


@contextlib.contextmanager
def running_demo(output: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a demo of many small chunks, of which some are done and most are not."""
    command = [sys.executable, "-m", "sonic_coffea", "demo", "--chunksize", "20", "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 200
        while not list(output.glob(".jets-*/*.parquet")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no chunk was done"
            time.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    with running_demo(tmp_path / "out") as process:
        children = family(process)
        assert len(children) >= 4  # supervisor, server, its models, worker
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert list((tmp_path / "out").iterdir()) == []
