"""The log of a local server: its path, and the errors in it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from pathlib import Path

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server._folders import log_folder

# Triton's two formats are "E1123 22:01:11.5 ..." and "2026-11-23T22:01:11Z E ...".
_RECORD = re.compile(r"[IWEF]\d{4} |\d{4}-\S+ [IWEF] |[|+]|\s*$")
_HEAD = re.compile(r'(?:E\d{4} \S+|\d{4}-\S+ E) \d+ \S+\] "?')
# All but errors, and models that could not be loaded; what every server without a GPU logs.
_QUIET = re.compile(
    r'[IW]\d{4} |\d{4}-\S+ [IW] |\+|\|(?!.*UNAVAILABLE)|"?\s*$|.*CudaDriverHelper has not been init'
)
_USAGE = "Usage: tritonserver"
_QUOTED_LINES = 20
_LONGEST = 2000
_LEAST_BYTES = 65536
_KEPT_FOR_S = 30 * 86400.0


def new_log() -> Path:
    """Make an empty log among the user's own, and remove old ones.

    Raises
    ------
    sonic_coffea.errors.ServerStartError
        If there is no folder for it, or no space.
    """
    try:
        folder = log_folder()
        _prune(folder)
        fd, name = tempfile.mkstemp(dir=folder, prefix="triton-", suffix=".log")
        with os.fdopen(fd, "wb") as file:
            # What a full disk takes no more, a server could not say.
            file.write(bytes(_LEAST_BYTES))
            file.flush()
            file.truncate(0)
    except OSError as error:
        raise ServerStartError(f"cannot write the server's log: {error}") from None
    return Path(name)


def _prune(folder: Path) -> None:
    """Remove logs that nobody has written to for a month."""
    for path in folder.glob("triton-*.log"):
        # Another process may be removing the same ones.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _KEPT_FOR_S:
                path.unlink()


def error_lines(log: str) -> list[str]:
    """Return the last errors in a log, without repeats; if there are none, its end."""
    # After a wrong argument, Triton prints all options, some 500 lines. The reason is before or
    # after them.
    before, _, after = log.partition(_USAGE)
    lines = (before if before.strip() else after).splitlines()
    errors = [_HEAD.sub("", line) for line in lines if not _QUIET.match(line)]
    texts = "\n".join(errors or lines).replace("\\n", "\n").splitlines()
    return [text[:_LONGEST] for text in dict.fromkeys(texts)][-_QUOTED_LINES:]


def last_words(log: str) -> str | None:
    """Return the first line of what follows Triton's last record, such as ``Signal (11)``."""
    words = None
    for line in reversed(log.splitlines()):
        if line.strip() and _RECORD.match(line):
            break
        words = line.strip()[:_LONGEST] or words
    return words
