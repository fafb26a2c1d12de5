"""The log files of local servers: where they are, and which of the old ones are kept."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from sonic_coffea.errors import ServerStartError
from sonic_coffea.transport import local_state

_KEPT_LOGS = 20
_DAY_S = 86400.0
# Of other machines, of containers that are gone, and of before this machine started.
_STRANGE_KEPT_FOR_S = 30 * _DAY_S


def new_log(folder: Path | None) -> Path:
    """Make an empty log in `folder`, or beside the user's other state, and remove old ones."""
    if folder is None:
        state = local_state.directory()
        folder = Path(tempfile.mkdtemp(prefix="sonic-coffea-")) if state is None else state / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune_logs(folder)
        fd, name = tempfile.mkstemp(dir=folder, prefix=_log_prefix(), suffix=".log")
    except OSError as error:
        raise ServerStartError(f"cannot write the server's log in {folder}: {error}") from None
    os.close(fd)
    return Path(name).absolute()


def _log_prefix() -> str:
    return f"triton-{local_state.machine()}-"


def _prune_logs(folder: Path) -> None:
    """Remove old logs: this machine's of another day beyond the newest, and others' after a month.

    A server that is starting is in no record yet and its log is read, so no log is removed within a
    day; what other machines with the same home use cannot be known here.
    """
    in_use = {record.log for record in local_state.records()}
    written = {}
    for path in folder.glob("triton-*.log"):
        # Another process may be removing the same ones.
        with contextlib.suppress(OSError):
            written[path] = path.stat().st_mtime
    now = time.time()
    own = [path for path in written if path.name.startswith(_log_prefix())]
    kept = set(sorted(own, key=written.__getitem__)[-_KEPT_LOGS:])
    for path in written.keys() - kept:
        most_s = _DAY_S if path in own else _STRANGE_KEPT_FOR_S
        if str(path) not in in_use and written[path] < now - most_s:
            with contextlib.suppress(OSError):
                path.unlink()
