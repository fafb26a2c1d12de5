"""Nothing is left of what tests start, however the tests end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.network.processes import Kept
from tests.server.support import is_gone
from tests.waiting import until

# A process with one of its own, in a session of both, which does not want to end.
STUBBORN = "trap '' TERM; touch {mark}; sleep 1000 & echo $! > {child}; wait; sleep 1000"
OWNER = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.network.processes import Kept
signal.signal(signal.SIGINT, signal.default_int_handler)
kept = Kept(["sh", "-c", sys.argv[2]], Path(sys.argv[3]), leftovers=[sys.argv[4]], grace_s=0.2)
try:
    print(kept.pid, flush=True)
    time.sleep(1000)
finally:
    kept.end()
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_owner_ends(number: signal.Signals, tmp_path: Path) -> None:
    name = f"sonic_test_left_{os.getpid()}"
    mark, child = Path("/dev/shm") / name, tmp_path / "child"  # noqa: S108
    command = STUBBORN.format(mark=mark, child=child)
    argv = [sys.executable, "-c", OWNER, str(ROOT), command, str(tmp_path / "log"), f"{name}*"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        until(lambda: child.exists() and child.read_text().endswith("\n"))
        assert mark.exists()
        owner.send_signal(number)
    until(lambda: is_gone(pid) and is_gone(int(child.read_text())), 30, "the end of both")
    until(lambda: not mark.exists(), 30, "the end of what they left")


def test_one_that_is_killed_or_stopped(tmp_path: Path) -> None:
    """Both end at once, whatever state they are in."""
    killed = Kept(["sleep", "1000"], tmp_path / "killed")
    killed.kill()
    assert not killed.running
    assert is_gone(killed.pid)
    killed.end()
    stopped = Kept(["sleep", "1000"], tmp_path / "stopped")
    stopped.send(signal.SIGSTOP)
    stopped.end()
    assert is_gone(stopped.pid)


def test_what_does_not_start_says_why(tmp_path: Path) -> None:
    kept = Kept(["sh", "-c", "echo no such port; exit 1"], tmp_path / "log")
    with pytest.raises(RuntimeError, match="no such port"):
        kept.wait(lambda: False)
