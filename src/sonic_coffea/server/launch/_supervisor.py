"""The supervisor: the process between a local server and its owner; standard library only.

Run as a script, it starts the server. When the owner says so or is gone, or after a SIGTERM, it
ends the server and all processes that the server left. It reads one line of JSON from standard
input, then waits for another line, or the end of that pipe. It reports each event as one line of
JSON on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# The start of Triton's own lines; a container's entry point may write others before them.
_RECORD = re.compile(rb"(?m)^[IWEF]\d{4} \d\d:")


def main() -> int:
    # Unbuffered: what follows the line is left for poll.
    job = json.loads(os.fdopen(0, "rb", buffering=0, closefd=False).readline())
    # Signals meant for a terminal's foreground group or a whole job must not break the clean-up.
    requests: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: requests.append(number))
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        server = _start(job, log)
    except OSError as error:
        _report(event="failed", message=str(error))
        return 1
    _report(event="started", pid=server.pid)
    try:
        _watch(job, server, requests)
    finally:
        _end(job, server, forget=bool(requests))
    _report(event="exited", code=server.returncode, on_request=bool(requests))
    return 0


def _start(job: dict[str, Any], log: int) -> subprocess.Popen[bytes]:
    supervisor = os.getpid()
    libc = ctypes.CDLL(None)
    # Model processes that outlive the server become children of this process, which reaps them.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def prepare() -> None:
        # Should this supervisor be killed too, the kernel ends the server; its stubs notice.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    return subprocess.Popen(
        job["argv"],
        env=job["env"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509  this process has one thread
    )


def _watch(job: dict[str, Any], server: subprocess.Popen[bytes], requests: list[int]) -> None:
    """Return when the server has ended, or has to."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    for pid in (job["owner"], server.pid):
        # The pipe alone is not enough: children that the owner forks hold its other end open.
        with contextlib.suppress(OSError, AttributeError):
            poll.register(os.pidfd_open(pid), select.POLLIN)
    visible = True
    while server.poll() is None and not requests and os.getppid() == job["owner"]:
        if visible and _RECORD.search(Path(job["log"]).read_bytes()):
            # A server that logs has read its arguments, so the secret can go from them.
            _hide(job["secret"].encode())
            visible = False
        events = poll.poll((_POLL_S if visible else 1.0) * 1000)
        if any(fd == sys.stdin.fileno() for fd, _ in events):
            return


def _hide(secret: bytes) -> None:
    """Overwrite the secret in command lines, where the system lets this user do that.

    All processes are searched: a server in a container is not the process that was started.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, OverflowError):
            if secret not in (folder / "cmdline").read_bytes():
                continue
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            start, end = int(fields[45]), int(fields[46])
            with (folder / "mem").open("r+b", buffering=0) as memory:
                memory.seek(start)
                arguments = memory.read(end - start)
                memory.seek(start)
                memory.write(arguments.replace(secret, b"x" * len(secret)))


def _end(job: dict[str, Any], server: subprocess.Popen[bytes], *, forget: bool) -> None:
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(job["grace_s"])
    # The group and not the process: model processes of a server that died outlive it for a while.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    _reap_group(server.pid)
    if job["cleanup"] is not None:
        # A container that a daemon runs outlives the client that started it.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                job["cleanup"], env=job["env"], capture_output=True, check=False, timeout=30.0
            )
    for region in Path("/dev/shm").glob(f"{job['shm_prefix']}*"):  # noqa: S108
        with contextlib.suppress(OSError):
            region.unlink()
    if not forget:
        # The record tells later clients that whatever listens at the port is another server.
        return
    with contextlib.suppress(OSError, ValueError, TypeError):
        if json.loads(Path(job["record"]).read_bytes()).get("pid") == server.pid:
            Path(job["record"]).unlink()


def _reap_group(group: int) -> None:
    """Wait for the end of the killed model processes, which could still create regions."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-group, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.005)


def _report(**event: Any) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
