"""The log of a local server: its path, the errors in it, and the models it has loaded."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from pathlib import Path

from sonic_coffea.errors import ServerStartError
from sonic_coffea.transport import local_state

_ERROR = re.compile(r'^E\d{4} [\d:.]+ \d+ \S+\] "?(.*?)"?$')
_RECORD = re.compile(r"^([IWEF]\d{4} |[|+]|\s*$)")
_UNAVAILABLE = re.compile(r"UNAVAILABLE: (.*?)\s*\|?$")
_LIFECYCLE = re.compile(
    r"\"(?:loading: (?P<loading>.+):(?P<version>\d+)"
    r"|successfully loaded '(?P<loaded>.+?)'(?: version \d+)?"
    r"|successfully unloaded '(?P<unloaded>.+)' version (?P<gone>\d+))\"$"
)
_USAGE = "Usage: tritonserver"
_LONGEST = 2000
# Every server on a machine without a GPU logs it.
_HARMLESS = ("CudaDriverHelper has not been initialized",)
_KEPT_FOR_S = 30 * 86400.0


def new_log(folder: Path | None) -> Path:
    """Make an empty log in `folder`, or beside the user's other state, and remove old ones."""
    if folder is None:
        state = local_state.directory()
        folder = Path(tempfile.mkdtemp(prefix="sonic-coffea-")) if state is None else state / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder)
        fd, name = tempfile.mkstemp(dir=folder, prefix="triton-", suffix=".log")
    except OSError as error:
        raise ServerStartError(f"cannot write the server's log in {folder}: {error}") from None
    os.close(fd)
    return Path(name).absolute()


def _prune(folder: Path) -> None:
    """Remove logs that nobody has written to for a month, except those of running servers."""
    in_use = {record.log for record in local_state.records()}
    for path in folder.glob("triton-*.log"):
        # Another process may be removing the same ones.
        with contextlib.suppress(OSError):
            if str(path) not in in_use and path.stat().st_mtime < time.time() - _KEPT_FOR_S:
                path.unlink()


def error_lines(log: str) -> list[str]:
    """Return the errors in a log, in order and without repeats; if there are none, its end."""
    # After a wrong argument, Triton prints all options, some 500 lines. The reason is before or
    # after them.
    before, usage, after = log.partition(_USAGE)
    if usage:
        log = before if before.strip() else "\n".join(filter(str.strip, after.splitlines()[-3:]))
    errors: list[str] = []
    open_error = False
    for line in log.splitlines():
        match = _ERROR.match(line)
        if match and not match[1].startswith(_HARMLESS):
            errors.append(match[1].replace("\\n", "\n"))
            open_error = True
        elif _RECORD.match(line):
            open_error = False
            unavailable = _UNAVAILABLE.search(line)
            if unavailable:
                errors.append(unavailable[1].strip())
        elif open_error:
            errors[-1] += f"\n{line}"
    if not errors:
        errors = [line for line in log.splitlines() if line.strip()][-5:]
    return [text.strip()[:_LONGEST] for text in dict.fromkeys(errors)]


def last_words(log: str) -> str | None:
    """Return the first line of what follows Triton's last record, such as ``Signal (11)``."""
    words = None
    for line in reversed(log.splitlines()):
        if line.strip() and _RECORD.match(line):
            break
        words = line.strip()[:_LONGEST] or words
    return words


def loaded_models(log: str) -> list[str]:
    """Return the models that the server had loaded, and not unloaded, when its log ends."""
    loading: dict[str, set[str]] = {}
    versions: dict[str, set[str]] = {}
    for line in log.splitlines():
        match = _LIFECYCLE.search(line)
        if match is None:
            continue
        if name := match["loading"]:
            loading.setdefault(name, set()).add(match["version"])
        elif name := match["loaded"]:
            versions.setdefault(name, set()).update(loading.pop(name, ()))
        else:
            versions.get(match["unloaded"], set()).discard(match["gone"])
    return [name for name, served in versions.items() if served]
