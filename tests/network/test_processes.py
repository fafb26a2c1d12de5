"""Nothing is left of what tests start, however the tests end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.network.processes import Service
from tests.server.support import is_gone
from tests.waiting import until

# A process with one of its own, in a session of both, which does not want to end.
STUBBORN = "trap '' TERM; touch {mark}; sleep 1000 & echo $! > {child}; wait; sleep 1000"
OWNER = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.network.processes import Service
signal.signal(signal.SIGINT, signal.default_int_handler)
command, log, left = sys.argv[2:]
options = {"leftovers": [left], "grace_s": 0.2}
with Service(["sh", "-c", command], Path(log), lambda: True, **options) as service:
    print(service.pid, flush=True)
    time.sleep(1000)
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_the_owner_ends(number: signal.Signals, tmp_path: Path) -> None:
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


def test_killed_and_stopped_services_end(tmp_path: Path) -> None:
    """Both end at once, whatever state they are in."""
    with Service(["sleep", "1000"], tmp_path / "killed", lambda: True) as killed:
        killed.kill()
        assert not killed.running
        assert is_gone(killed.pid)
    with Service(["sleep", "1000"], tmp_path / "stopped", lambda: True) as stopped:
        stopped.send(signal.SIGSTOP)
    assert is_gone(stopped.pid)


def test_services_that_do_not_start_say_why(tmp_path: Path) -> None:
    argv = ["sh", "-c", "echo no such port; exit 1"]
    with pytest.raises(RuntimeError, match="no such port"):
        Service(argv, tmp_path / "log", lambda: False).start()
