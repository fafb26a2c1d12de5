"""Which Python on this machine can run the server's model code."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ServerStartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Interpreter", "choose"]

logger = logging.getLogger(__name__)

_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
_ASK = """
import json, sys, sysconfig, venv
print(json.dumps({
    "tag": "%d.%d" % sys.version_info[:2],
    "folders": [sysconfig.get_config_var("LIBDIR") or "", sys.base_prefix + "/lib"],
}))
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python and the shared library of its version (``3.11``), not always its own."""

    tag: str
    executable: str
    library: Path


def choose(tags: Sequence[str]) -> Interpreter:
    """Return the Python in use if its version is among `tags`, else another one on this machine.

    Raises
    ------
    sonic_coffea.errors.ServerStartError
        If there is none, or none with a shared library.
    """
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    lacking = []
    for tag in sorted(tags, key=lambda tag: tag != own):
        found = [(path, _ask(path)) for path in _candidates(tag)]
        usable = [(path, about) for path, about in found if about and about["tag"] == tag]
        if not usable:
            continue
        folders = [*usable[0][1]["folders"], *_SYSTEM_FOLDERS]
        folders += [folder for _, about in usable[1:] for folder in about["folders"]]
        library = _library(tag, folders)
        if library is not None:
            return Interpreter(tag=tag, executable=usable[0][0], library=library)
        lacking.append(tag)
    if lacking:
        raise ServerStartError(
            f"the local server needs libpython{lacking[0]}.so.1.0, which this Python was built "
            f"without and no other Python {lacking[0]} found here has; install it (Debian, Ubuntu: "
            f"libpython{lacking[0]}; the Pythons of conda and uv bring it)"
        )
    raise ServerStartError(
        f"the local server needs Python {', '.join(sorted(tags))}, and this one is {own}; install "
        "one of these beside it (it need not be in the analysis environment)"
    )


def _candidates(tag: str) -> Iterator[str]:
    seen = set()
    for path in _everywhere(tag):
        key = os.path.realpath(path)
        if key not in seen and os.access(path, os.X_OK):
            seen.add(key)
            yield path


def _everywhere(tag: str) -> Iterator[str]:
    if tag == f"{sys.version_info[0]}.{sys.version_info[1]}":
        yield sys.executable
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder:
            yield str(Path(folder) / f"python{tag}")
    for folder in ("/usr/bin", "/usr/local/bin"):
        yield str(Path(folder) / f"python{tag}")
    home = Path.home()
    for pattern in (
        f".pyenv/versions/{tag}.*/bin/python3",
        f".local/share/uv/python/cpython-{tag}.*/bin/python3",
    ):
        yield from map(str, sorted(home.glob(pattern)))


def _ask(executable: str) -> dict[str, Any] | None:
    try:
        done = subprocess.run(
            [executable, "-I", "-c", _ASK], capture_output=True, check=True, timeout=30.0
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.debug("cannot use %s: %s", executable, error)
        return None
    return answer


def _library(tag: str, folders: Sequence[str]) -> Path | None:
    for folder in folders:
        path = Path(folder) / f"libpython{tag}.so.1.0"
        if folder and path.is_file():
            return path.resolve()
    return None
