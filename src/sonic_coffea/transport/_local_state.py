"""A per-user record of the local servers on this machine.

Any process of the same user can use a local server by its URL alone: the secret that the server
wants is looked up here, so it never travels in a pickle, a URL or a log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

logger = logging.getLogger(__name__)

STATE_VARIABLE = "SONIC_COFFEA_STATE_DIR"
# Not ::1: local servers listen at 127.0.0.1, and the other port may be anybody's.
_LOOPBACK = frozenset({"127.0.0.1", "localhost"})
_KEPT_FOR_S = 30 * 86400.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """What another process of the same user needs to use a local server.

    Parameters
    ----------
    url : str
        ``grpc://127.0.0.1:PORT``.
    pid, start_ticks : int
        The server process, and when it started in clock ticks since boot: together they cannot
        be mistaken for a later process with the same number.
    supervisor_pid : int or None
        The process that ends the server when its owner is gone; None of a server that is a part of
        its owner.
    header, secret : str
        The gRPC metadata key that the server demands, and its value.
    repository, log : str
        Paths of the model repository and of the server's log.
    started : float
        Seconds since the epoch.
    shm_prefix : str
        Beginning of the names of the server's shared memory regions.
    """

    url: str
    pid: int
    start_ticks: int | None
    supervisor_pid: int | None = None
    header: str
    secret: str = dataclasses.field(repr=False)
    repository: str
    log: str = ""
    started: float = dataclasses.field(default_factory=time.time)
    shm_prefix: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The gRPC metadata that the server demands on every call."""
        return {self.header: self.secret}

    @property
    def alive(self) -> bool:
        """Whether the server process still runs."""
        return process_start_ticks(self.pid) == self.start_ticks


def register(record: ServerRecord) -> Path | None:
    """Write a record that only this user can read, and return where.

    Returns None, with a logged warning, when no private directory can be made: the server then
    works in the process that started it only.
    """
    path = record_path(record.url)
    if path is None:
        logger.warning(
            "no private directory for the record of %s; set %s to one that this user can write",
            record.url,
            STATE_VARIABLE,
        )
        return None
    try:
        _prune(path.parent)
        _write_private(path, json.dumps(dataclasses.asdict(record)).encode())
    except OSError as error:
        logger.warning("cannot write the record of %s: %s", record.url, error)
        return None
    return path


def remove(url: str, pid: int | None = None) -> None:
    """Remove the record of the server at `url` if the server has ended or is process `pid`."""
    for path in _record_paths(url):
        record = _read(path)
        if record is None or not record.alive or record.pid == pid:
            with contextlib.suppress(OSError):
                path.unlink()


def find(url: str) -> ServerRecord | None:
    """Return the record of the local server at `url`, or None if no server was started there.

    The server runs, or it has ended by itself; one that was stopped is not on record. URLs that are
    not on loopback are answered without touching the disk. A record that another user could have
    written is ignored with a logged warning.
    """
    return next(filter(None, map(_read, _record_paths(url))), None)


def lookup(url: str) -> ServerRecord | None:
    """Return the record of the local server that runs at `url`, or None."""
    record = find(url)
    return record if record is not None and record.alive else None


def records() -> list[ServerRecord]:
    """Return the records of this user's servers that run on this machine."""
    return [record for folder in _folders() for _, record in _recorded(folder) if record.alive]


def directory() -> Path | None:
    """Return the private directory for state, made if need be; None where there can be none."""
    return next(filter(_make_private, _candidates()), None)


def record_path(url: str) -> Path | None:
    """Return where the record of `url` is to be written, or None without a private directory."""
    name, base = _record_name(url), directory()
    if name is None or base is None or not _make_private(base / "servers"):
        return None
    return base / "servers" / name


def process_start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses and may itself hold spaces or parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _write_private(path: Path, content: bytes) -> None:
    # mkstemp makes the file 0600 whatever the umask, so it is private before it has content.
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".record-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _candidates() -> list[Path]:
    if not hasattr(os, "getuid"):
        return []
    override = os.environ.get(STATE_VARIABLE)
    if override:
        return [Path(override)]
    # Not the runtime directory: it goes when the user's last login ends, while servers in batch
    # jobs and detached terminals live on. The temporary one serves where home cannot be written.
    return [
        platformdirs.user_state_path("sonic-coffea"),
        Path(tempfile.gettempdir()) / f"sonic-coffea-{os.getuid()}",
    ]


def _make_private(folder: Path) -> bool:
    """Create a directory for this user alone unless it exists; return whether it is private."""
    try:
        # The mode of one that exists is left alone: others may share it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.debug("cannot use %s for state: %s", folder, error)
        return False
    return _is_private(folder) and os.access(folder, os.W_OK | os.X_OK)


def _folders() -> list[Path]:
    return [c / "servers" for c in _candidates() if _is_private(c) and _is_private(c / "servers")]


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return True
    logger.warning("ignoring %s: expected a directory of this user with mode 0700", path)
    return False


def _record_name(url: str) -> str | None:
    parts = urlsplit(url)
    local = parts.hostname in _LOOPBACK and parts.port is not None
    return f"{machine()}-{parts.port}.json" if local else None


def _record_paths(url: str) -> list[Path]:
    """Return where the record of `url` may be; nowhere if it is not on loopback."""
    name = _record_name(url)
    return [] if name is None else [folder / name for folder in _folders()]


@functools.cache
def machine(proc: Path = Path("/proc")) -> str:
    """Return a name of the namespaces in which loopback addresses and process numbers hold.

    Machines (home on a network) and containers may share the directory of records.
    """
    try:
        parts = [(proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()]
        parts += [str((proc / "self/ns" / kind).stat().st_ino) for kind in ("net", "pid")]
    except OSError:
        # Not Linux: no local server runs here, but what is on loopback may be a tunnel's end.
        parts = [platform.node()]
    return hashlib.sha256(":".join(parts).encode()).hexdigest()[:16]


def _recorded(folder: Path) -> Iterator[tuple[Path, ServerRecord]]:
    for path in sorted(folder.glob(f"{machine()}-*.json")):
        record = _read(path)
        if record is not None:
            yield path, record


def _prune(folder: Path) -> None:
    """Remove old records of servers that have ended by themselves."""
    for path, record in _recorded(folder):
        if not record.alive and path.stat().st_mtime < time.time() - _KEPT_FOR_S:
            path.unlink(missing_ok=True)


def _read(path: Path) -> ServerRecord | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("ignoring %s: %s", path, error)
        return None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            logger.warning("ignoring %s: expected a file of this user with mode 0600", path)
            return None
        content = file.read()
    try:
        record = ServerRecord(**json.loads(content))
    except (ValueError, TypeError) as error:
        logger.warning("ignoring %s: %s", path, error)
        return None
    if not record.alive and record.shm_prefix.startswith("sonic_"):
        for left in SHARED_MEMORY.glob(f"{record.shm_prefix}*"):
            with contextlib.suppress(OSError):
                left.unlink()
    return record
