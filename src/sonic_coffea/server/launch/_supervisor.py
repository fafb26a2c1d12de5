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
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SHM = "/dev/shm"  # noqa: S108  where POSIX shared memory is
# As the kernel numbers them.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


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
    except (OSError, subprocess.SubprocessError) as error:
        _report(event="failed", message=str(error))
        return 1
    abandoned = False
    try:
        abandoned = _watch(job, server, requests)
    finally:
        _end(job, server, abandoned=abandoned)
    _report(event="exited", code=server.returncode, on_request=bool(requests))
    return 0


def _start(job: dict[str, Any], log: int) -> subprocess.Popen[bytes]:
    supervisor = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    # Model processes that outlive the server become children of this process, which reaps them.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Triton's Python backend makes files there that all users can read.
    private = Path(_SHM, job["shared_memory"])
    shutil.rmtree(private, ignore_errors=True)
    private.mkdir(mode=0o700)
    mounts = job["mounts"] and _may_mount(libc, private)

    def prepare() -> None:
        if mounts:
            _mount(libc, private)
        # Should this supervisor be killed too, the kernel ends the server; its stubs notice.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    server = subprocess.Popen(
        job["argv"],
        env=job["env"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509  this process has one thread
    )
    hidden = mounts or not job["mounts"]
    if hidden:
        # For clients that share memory with the server.
        link = Path(job["folder"], "shm")
        link.unlink(missing_ok=True)
        link.symlink_to(private)
    _report(event="started", pid=server.pid, hidden=hidden)
    return server


def _may_mount(libc: ctypes.CDLL, private: Path) -> bool:
    """Try in a child whether the kernel lets this user mount a folder; some systems do not."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _mount(libc, private)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _mount(libc: ctypes.CDLL, private: Path) -> None:
    """Mount a folder over /dev/shm, for this process and those that it starts.

    Root needs a namespace of mounts for it; other users are root in one of users, until they start
    a program. They stay the same users: each is mapped to itself.
    """
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS) != 0:
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    _check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    source, target = os.fsencode(private), os.fsencode(_SHM)
    _check(libc.mount(source, target, None, ctypes.c_ulong(_MS_BIND), None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _watch(job: dict[str, Any], server: subprocess.Popen[bytes], requests: list[int]) -> bool:
    """Return when the server has ended, or has to; True if the owner's end of the pipe is closed.

    An owner that exits closes it some time before it is gone.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    for pid in (job["owner"], server.pid):
        # The pipe alone is not enough: children that the owner forks hold its other end open.
        with contextlib.suppress(OSError, AttributeError):
            poll.register(os.pidfd_open(pid), select.POLLIN)
    while server.poll() is None and not requests and os.getppid() == job["owner"]:
        if any(fd == sys.stdin.fileno() for fd, _ in poll.poll(1000)):
            return not os.read(sys.stdin.fileno(), 1)
    return False


def _end(job: dict[str, Any], server: subprocess.Popen[bytes], *, abandoned: bool) -> None:
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
    shutil.rmtree(Path(_SHM, job["shared_memory"]), ignore_errors=True)
    for region in Path(_SHM).glob(f"{job['shared_memory']}*"):
        with contextlib.suppress(OSError):
            region.unlink()
    if abandoned or os.getppid() != job["owner"]:
        shutil.rmtree(job["folder"], ignore_errors=True)


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
