"""Folders of this user alone: of local servers, where their sockets are, and of their logs.

Whatever is in such a folder is reached by processes of this user on this machine and by nobody
else, so a server in it needs no secret. A server's folder is locked as long as the server, or the
process that minds it, is there: the kernel releases the lock, whatever ends them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from sonic_coffea.errors import ServerStartError

try:
    import fcntl
except ImportError:  # Windows, where no local server runs
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

STATE_VARIABLE = "SONIC_COFFEA_STATE_DIR"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is
_RECORD = "server.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """What other processes of the same user can know of a local server.

    Parameters
    ----------
    url : str
        Where it listens.
    pid : int
        The server's process.
    supervisor_pid : int
        The process that ends the server when its owner is gone.
    repository, log : str
        Paths of the model repository and of the server's log.
    started : float
        Seconds since the epoch.
    """

    url: str
    pid: int
    supervisor_pid: int
    repository: str
    log: str
    started: float = dataclasses.field(default_factory=time.time)


class ServerFolder:
    """The folder of one local server, with a short path, as those of sockets are limited."""

    def __init__(self) -> None:
        self.path = socket_folder() / secrets.token_hex(4)
        self._lock: int | None = None

    @property
    def shared_memory(self) -> str:
        """How the names of the server's files in /dev/shm begin."""
        return _shared_memory(self.path)

    def open(self) -> int:
        """Make the folder unless it is there, and return the descriptor that keeps it locked."""
        if self._lock is None:
            try:
                # Another process must not find the folder before it is locked.
                hidden = Path(tempfile.mkdtemp(dir=socket_folder(), prefix=".new-"))
                self._lock = os.open(hidden, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                hidden.rename(self.path)
            except OSError as error:
                raise ServerStartError(f"cannot make a server's folder: {error}") from None
            for folder in self.path.parent.glob("[!.]*"):
                if not _is_locked(folder):
                    _remove(folder)
        return self._lock

    def record(self, record: ServerRecord) -> None:
        """Let other processes of this user find the server."""
        part = self.path / f".{_RECORD}"
        with contextlib.suppress(FileNotFoundError):  # it is being closed
            part.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
            part.replace(self.path / _RECORD)

    def close(self) -> None:
        """Remove the folder and what the server left in shared memory; harmless when it is gone."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def local_servers() -> list[ServerRecord]:
    """Return the records of this user's local servers on this machine."""
    found = []
    with contextlib.suppress(ServerStartError):
        for folder in sorted(socket_folder().glob("[!.]*")):
            # A folder without a record is one of a server that is being started.
            with contextlib.suppress(FileNotFoundError):
                text = (folder / _RECORD).read_text(encoding="utf-8")
                if _is_locked(folder):
                    found.append(ServerRecord(**json.loads(text)))
    return found


def socket_folder() -> Path:
    """Return the folder of this user's servers on this machine, made if need be.

    Not below the home directory, which machines may share, and not in the runtime directory unless
    there is no other: it goes when the user's last login ends, while batch jobs live on.
    """
    if not hasattr(os, "getuid"):
        raise ServerStartError("local servers need a system with Unix sockets")
    name = f"sonic-coffea-{os.getuid()}"
    override = os.environ.get(STATE_VARIABLE)
    if override:
        # Not inside the other folder, whose servers would take it for one that a server left.
        name += f"-{hashlib.sha256(override.encode()).hexdigest()[:8]}"
    places = ["/tmp", tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", "")]  # noqa: S108
    return _first_private([Path(place, name) for place in places if place])


def log_folder() -> Path:
    """Return the folder of logs, which outlive their servers; made if need be."""
    override = os.environ.get(STATE_VARIABLE)
    temporary = Path(tempfile.gettempdir(), f"sonic-coffea-{os.getuid()}")
    places = [platformdirs.user_state_path("sonic-coffea"), temporary]
    folder = _first_private([Path(override)] if override else places) / "logs"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


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


def _is_locked(folder: Path) -> bool:
    try:
        fd = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _shared_memory(folder: Path) -> str:
    return f"sonic-coffea-{folder.name}"


def _remove(folder: Path) -> None:
    """Remove a server's folder, and what it left in shared memory."""
    for path in (folder, *SHARED_MEMORY.glob(f"{_shared_memory(folder)}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
