"""The supervisor: the process between a local server and its owner; standard library only.

Run as a script, it starts the server, waits until the server listens, and starts it again if it
ends by itself. When the owner says so or is gone, or after a SIGTERM, it ends the server and all
processes that the server left. It reads one line of JSON from standard input, the job, then waits
for another line, or the end of that pipe. It writes each new state to standard output, as a line of
JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

_SHM = "/dev/shm"  # noqa: S108  where POSIX shared memory is
# As the kernel numbers them.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def main() -> None:
    """Read the job, and do it."""
    # Unbuffered: what follows the line is left for select.
    job = json.loads(os.fdopen(0, "rb", buffering=0, closefd=False).readline())
    # Signals meant for a terminal's foreground group or a whole job must not break the clean-up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Model processes that outlive the server become children of this process, which reaps them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(job).run()


class Stop(Exception):  # noqa: N818  not an error
    """The server has to end."""


class Supervisor:
    """Runs the server of a job until it is stopped, or fails for good."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.requests: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: self.requests.append(number))
        self.folder = Path(job["folder"])
        # The system's own, also when `_mount` has put the private one in its place.
        self.shm = Path(f"/proc/self/fd/{os.open(_SHM, os.O_RDONLY)}")
        self.private = self.shm / job["shared_memory"]
        self.server: subprocess.Popen[bytes] | None = None
        # What the owner is told of the server, with each new state.
        self.facts: dict[str, Any] = {"since": 0, "hidden": True}
        self.was_ready = False
        self.failures = 0
        self.deadline = time.monotonic() + job["startup_timeout_s"]

    def run(self) -> None:
        """Start the server, and again while that may help, with a pause that doubles."""
        try:
            while True:
                problem, again = self.serve()
                self.end()
                if again and self.failures == 5:
                    problem, again = f"{problem}, again and again, and is not started again", False
                if not again:
                    self.report("ended", problem)
                    return
                pause_s = self.job["first_pause_s"] * 2**self.failures
                self.failures += 1
                self.report("backing off", f"{problem}, and is started again in {pause_s:g} s")
                self.wait(pause_s)
        except Stop:
            self.end()
            self.report("stopped")
        finally:
            self.end()
            for folder in (self.private, self.folder):
                shutil.rmtree(folder, ignore_errors=True)

    def report(self, state: str, problem: str = "") -> None:
        facts = {**self.facts, "on_request": bool(self.requests)}
        with contextlib.suppress(OSError):
            os.write(1, json.dumps({**facts, "state": state, "problem": problem}).encode() + b"\n")

    def wait(self, seconds: float) -> None:
        """Wait for this time, unless the server has to end.

        An owner that exits closes the pipe some time before it is gone. The pipe alone is not
        enough: children that the owner forks hold its other end open.
        """
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            readable, _, _ = select.select([0], [], [], min(left_s, 0.1))
            if readable or self.requests or os.getppid() != self.job["owner"]:
                raise Stop

    def serve(self) -> tuple[str, bool]:
        """Run the server once; return why it ended, and whether another start may help."""
        if self.was_ready:
            self.deadline = time.monotonic() + self.job["startup_timeout_s"]
        try:
            server = self.start()
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot be started: {error}", False
        while server.poll() is None and not _listens(self.job["address"]):
            self.wait(0.02)
            if time.monotonic() > self.deadline:
                return f"was not ready after {self.job['startup_timeout_s']:g} s", self.was_ready
        if server.poll() is not None:
            crashed = _signal_of(server) > 0 and time.monotonic() < self.deadline
            return _end_of(server), self.was_ready or crashed
        self.was_ready = True
        self.report("running")
        started = looked = time.monotonic()
        dead, problem = set[str](), ""
        while server.poll() is None:
            self.wait(0.1)
            if time.monotonic() > looked + 1.0:
                before, dead, looked = dead, _dead_children(server.pid), time.monotonic()
                if before & dead:  # Triton starts a model's process only once
                    problem = "was ended, as a model's process had died"
                    server.kill()
                    server.wait()
        # A server that has run for a minute did not fail at its start.
        if time.monotonic() - started > 60.0:
            self.failures = 0
        return problem or _end_of(server), self.job["restart"]

    def start(self) -> subprocess.Popen[bytes]:
        job, supervisor = self.job, os.getpid()
        libc = ctypes.CDLL(None)
        # Triton's Python backend makes files there that all users can read.
        self.private.mkdir(mode=0o700, exist_ok=True)
        if job.get("mounts") and not self.private.samefile(_SHM):
            with contextlib.suppress(OSError):
                _mount(libc, Path(_SHM, self.private.name))
        # Some systems do not let this user mount a folder.
        hidden = not job.get("mounts") or self.private.samefile(_SHM)

        def prepare() -> None:
            # Should this supervisor be killed too, the kernel ends the server; its stubs notice.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(1)

        with Path(job["record"]["log"]).open("ab") as log:
            self.facts["since"] = log.tell()
            server = self.server = subprocess.Popen(
                job["argv"],
                env=job["env"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509  this process has one thread
            )
        self.facts |= {"pid": server.pid, "hidden": hidden}
        link = self.folder / "shm"
        if hidden and not link.is_symlink():
            # For clients that share memory with the server.
            link.symlink_to(Path(_SHM, self.private.name))
        pids = {"pid": server.pid, "supervisor_pid": supervisor, "started": time.time()}
        part = self.folder / ".server.json"
        part.write_text(json.dumps({**job["record"], **pids}), encoding="utf-8")
        part.replace(self.folder / "server.json")
        return server

    def end(self) -> None:
        """End the server and all that it left; harmless when there is nothing."""
        server, self.server = self.server, None
        if server is None:
            return
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(self.job["stop_timeout_s"])
        # The group and not the process: model processes of a server that died outlive it a while,
        # and could still create regions in shared memory.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-server.pid, 0)
        if "cleanup" in self.job:
            # A container that a daemon runs outlives the client that started it.
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self.job["cleanup"], capture_output=True, check=False, timeout=30.0)
        for region in (*self.private.glob("*"), *self.shm.glob(f"{self.private.name}_*")):
            with contextlib.suppress(OSError):
                region.unlink()


def _listens(address: Any) -> bool:
    """Whether a server listens at a Unix socket, or at a host and port; its models are loaded."""
    is_path = isinstance(address, str)
    with socket.socket(socket.AF_UNIX if is_path else socket.AF_INET) as client:
        client.settimeout(1.0)
        return client.connect_ex(address if is_path else tuple(address)) == 0


def _dead_children(pid: int) -> set[str]:
    """Return the children of a process that have ended, and that it has not waited for."""
    dead = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            for child in children.read_text().split():
                # The name may hold any character.
                if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    dead.add(child)
    return dead


def _signal_of(server: Any) -> int:
    """Return the signal that ended a server, or 0; container engines add 128 to it."""
    code = server.returncode
    return -code if code < 0 else max(code - 128, 0) if code < 160 else 0


def _end_of(server: Any) -> str:
    if number := _signal_of(server):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit status {server.returncode}"


def _mount(libc: ctypes.CDLL, private: Path) -> None:
    """Mount a folder over /dev/shm, for this process and those that it starts.

    Root needs a namespace of mounts for it; other users are root in one of users, until they start
    a program. They stay the same users: each is mapped to itself.
    """
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS) != 0:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
            return
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            Path("/proc/self", name).write_text(text, encoding="ascii")
    # Without mounts of its own, this process would mount over the /dev/shm of the whole machine.
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) == 0:
        source, target = os.fsencode(private), os.fsencode(_SHM)
        libc.mount(source, target, None, ctypes.c_ulong(_MS_BIND), None)


if __name__ == "__main__":
    main()
