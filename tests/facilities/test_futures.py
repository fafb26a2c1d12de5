"""With processes of this machine, coffea's FuturesExecutor scores all rows or says so."""

from __future__ import annotations

import os
import signal
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import loky
import pytest
from coffea import processor
from tests.facilities.analysis import analyse, check, interrupted, serve

import sonic_coffea as sonic

pytestmark = pytest.mark.server  # workers are processes


def test_killed_processes_break_the_executor_loudly() -> None:
    """A killed process breaks its executor, which says so: no result has a part of the rows."""
    with serve() as server, sonic.connect(server.url):
        with loky.ProcessPoolExecutor(2) as workers:

            def run() -> dict[str, Any]:
                return analyse(processor.FuturesExecutor(pool=workers, status=False))

            def kill() -> None:
                os.kill(next(iter(workers._processes)), signal.SIGKILL)

            check(run())
            with pytest.raises(BrokenProcessPool):
                interrupted(run, server, kill)
        with loky.ProcessPoolExecutor(1) as workers:
            check(run())
