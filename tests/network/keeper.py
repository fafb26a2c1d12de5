"""Runs one process, and ends all that is left of it as soon as the owner is gone or says so.

Run as a script, with the standard library only. It reads one line of JSON on standard input, writes
the process's number to standard output, and then waits for standard input to close.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    libc = ctypes.CDLL(None)
    # What a killed process leaves becomes a child of this one, in the same process group.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    with Path(job["log"]).open("ab") as log:
        process = subprocess.Popen(
            job["argv"],
            env=job["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509  this process has one thread
        )
    print(process.pid, flush=True)  # noqa: T201
    poll = select.poll()
    # A child that the owner forks holds the other end of standard input open.
    for watched in (sys.stdin.fileno(), os.pidfd_open(job["owner"]), os.pidfd_open(process.pid)):
        poll.register(watched, select.POLLIN | select.POLLHUP)
    poll.poll()
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(job["grace_s"])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # What is in other groups, and what that leaves in turn, has no owner any more either.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):
        while True:
            for number in children.read_text().split() if children.exists() else ():
                os.kill(int(number), signal.SIGKILL)
            os.waitpid(-1, 0)
    for pattern in job["leftovers"]:
        for left in Path("/dev/shm").glob(pattern):  # noqa: S108
            left.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
