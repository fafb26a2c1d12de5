"""Private folders of this user: one for each local server, with its socket, and one for logs.

Only processes of this user on this machine can enter them, so a server there needs no secret. A
server's folder is locked while the server or its supervisor lives: the kernel releases the lock,
however they end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import platformdirs

from sonic_coffea._files import is_locked
from sonic_coffea.errors import ServerStartError

STATE_VARIABLE = "SONIC_COFFEA_STATE_DIR"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is


def make_folder(path: Path | None) -> tuple[Path, int]:
    """Make a server's folder, at a new path if it has none; it is short, as a socket's must be.

    Return the path, and the descriptor that keeps the folder locked.
    """
    import fcntl  # not on Windows, where no local server runs

    path = path or _socket_folder() / secrets.token_hex(4)
    try:
        SHARED_MEMORY.stat()  # where the server's models get their rows
        # Another process must not find the folder before it is locked.
        hidden = Path(tempfile.mkdtemp(dir=path.parent, prefix=".new-"))
        opened = os.open(hidden, os.O_RDONLY)
        # Where this process has no standard streams, those of the supervisor would replace it.
        descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(opened)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        hidden.rename(path)
    except OSError as error:
        raise ServerStartError(f"cannot make a server's folder: {error}") from None
    for folder in path.parent.glob("[!.]*"):
        if not is_locked(folder):
            remove_folder(folder)
    return path, descriptor


def remove_folder(folder: Path) -> None:
    """Remove a server's folder, and what it left in shared memory."""
    for path in (folder, *SHARED_MEMORY.glob(f"{shared_memory(folder)}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def shared_memory(folder: Path) -> str:
    """Return the name of a server's folder in /dev/shm."""
    return f"sonic-coffea-{folder.name}"


def local_servers() -> list[dict[str, Any]]:
    """Return the local servers of this user on this machine.

    Each is a dict of its ``url``, the process that serves (``pid``), the one that ends the
    server when its owner is gone (``supervisor_pid``), the paths of the model ``repository`` and
    of the ``log``, and when it was ``started``, in seconds since the epoch.
    """
    servers = []
    with contextlib.suppress(ServerStartError):
        for folder in sorted(_socket_folder().glob("[!.]*")):
            # A folder without a record is one of a server that is being started.
            with contextlib.suppress(FileNotFoundError):
                text = (folder / "server.json").read_text(encoding="utf-8")
                if is_locked(folder):
                    servers.append(json.loads(text))
    return servers


def new_log() -> Path:
    """Make an empty log, which is kept for a month; remove older logs.

    Raises
    ------
    sonic_coffea.errors.ServerStartError
        If there is no folder for it, or no space.
    """
    folder = state_folder() / "logs"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in folder.glob("triton-*.log"):
            # Another process may be removing the same logs.
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - 30 * 86400:
                    path.unlink()
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="triton-", suffix=".log")
        with os.fdopen(descriptor, "wb") as file:
            # A server could not report that the disk is full.
            file.write(bytes(1 << 16))
            file.flush()
            file.truncate(0)
    except OSError as error:
        raise ServerStartError(f"cannot write the server's log: {error}") from None
    return Path(name)


def state_folder() -> Path:
    """Return this user's folder for logs and copies of backends, made if need be."""
    if override := os.environ.get(STATE_VARIABLE):
        return _first_private([Path(override).absolute()])
    # Not in the folder of servers, where it would look like one that a server left.
    name = f"sonic-coffea-{os.getuid()}-state"
    places = [Path(os.environ.get("TMPDIR", "/tmp"), name), Path("/tmp", name)]  # noqa: S108
    with contextlib.suppress(RuntimeError):  # this user has no home
        places.insert(0, platformdirs.user_state_path("sonic-coffea"))
    return _first_private(places)


def _socket_folder() -> Path:
    """Return the folder of this user's servers on this machine, made if need be.

    Not below the home directory, which machines may share, and not in the runtime directory unless
    there is no other: it goes when the user's last login ends, while batch jobs live on.
    """
    if not hasattr(os, "getuid"):
        raise ServerStartError("local servers need a system with Unix sockets")
    name = f"sonic-coffea-{os.getuid()}"
    override = os.environ.get(STATE_VARIABLE)
    if override:
        # Beside the default folder: inside it, this would look like a folder that a server left.
        name += f"-{hashlib.sha256(override.encode()).hexdigest()[:8]}"
    # Not `tempfile.gettempdir`, which fails where a disk is full.
    theirs, run = (os.environ.get(variable, "") for variable in ("TMPDIR", "XDG_RUNTIME_DIR"))
    places = ["/tmp", theirs, "/var/tmp", run]  # noqa: S108
    return _first_private(Path(place, name) for place in places if place)


def _first_private(folders: Iterable[Path]) -> Path:
    """Return the first folder that is, or can be made, this user's alone."""
    problems = []
    for folder in folders:
        try:
            # The mode of one that exists is left alone: others may share it.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            problems.append(str(error))
            continue
        private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if private and not status.st_mode & 0o077 and os.access(folder, os.W_OK | os.X_OK):
            return folder
        problems.append(f"{folder} is not a directory of this user with mode 0700")
    raise ServerStartError(
        f"no private directory for local servers: {'; '.join(problems)}; set {STATE_VARIABLE} or "
        "XDG_RUNTIME_DIR to directories that only this user can enter"
    )
