"""Files that settings name, and tokens and headers that gRPC takes.

Other tokens and headers are refused before gRPC logs them.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, SonicError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-z_.-]+")
# Who renews a token may write the file in two steps.
_RENEWED_WITHIN_S = 1.0
_LOOKS_AGAIN_S = 0.05


def unreadable(role: str, path: str | Path, problem: str) -> ConfigError:
    """Return the error of a file that cannot be used; it names the machine, one of many."""
    return ConfigError(f"cannot read the {role} {str(path)!r} on {socket.gethostname()}: {problem}")


def read_text(role: str, path: str | Path, encoding: str = "utf-8") -> str:
    """Return the text of a file that has a role.

    Raises
    ------
    ConfigError
        Without the error of the system, which coffea takes for that of a broken file of events.
    """
    try:
        return Path(path).expanduser().read_text(encoding)
    except OSError as error:
        problem = str(error.strerror)
    except UnicodeDecodeError:
        # Its own words quote the text, which may be a token.
        problem = "expected text, got bytes that are not UTF-8"
    raise unreadable(role, path, problem)


class TokenFile:
    """A file that holds a token, which is read again for every call, as tokens expire.

    While it is being renewed, and cannot be read or is empty, the token that it had is returned.

    Parameters
    ----------
    path : str or Path
        The file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._last = ""
        self._told = False

    def __call__(self) -> str:
        """Return the token.

        Raises
        ------
        ConfigError
            If the file has held none yet.
        """
        until = time.monotonic() + _RENEWED_WITHIN_S
        while True:
            try:
                self._last, self._told = self._read(), False
            except ConfigError as problem:
                if not self._last:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(_LOOKS_AGAIN_S)
                    continue
                if not self._told:
                    logger.warning("%s; the token that it had is used", problem)
                self._told = True
            return self._last

    def _read(self) -> str:
        if token := read_text("token file", self.path).strip():
            return token
        raise unreadable("token file", self.path, "it is empty")


def token_of(source: Any) -> str:
    """Return a token: the text itself, or what a function returns.

    Raises
    ------
    ConfigError
        If it cannot be had, or gRPC does not take it. It is not shown.
    """
    if not callable(source):
        token, origin = source, "the token has"
    else:
        origin = "the function that token= names returned"
        try:
            token = source()
        except SonicError:
            raise
        except Exception as error:  # noqa: BLE001  it is the user's, and may hold the token
            failure = type(error).__name__
        else:
            failure = ""
        if failure:
            raise ConfigError(f"the function that token= names failed: {failure}")
    if not isinstance(token, str):
        raise ConfigError(f"{origin} {type(token).__name__}, expected str")
    if not token.strip():
        raise ConfigError(f"{origin} no characters, expected a token")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{origin} characters, such as a line break, that no token has")
    return token


def check_header(name: Any, value: Any) -> None:
    """Refuse a header that gRPC does not take.

    Raises
    ------
    ConfigError
        Naming the header; its value is not shown.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name.lower()):
        raise ConfigError(
            "headers: expected names of letters, digits, hyphens, underscores and full stops, "
            f"got {name!r}"
        )
    expected = bytes if name.lower().endswith("-bin") else str
    if not isinstance(value, expected):
        got = type(value).__name__
        raise ConfigError(f"headers: expected {expected.__name__} for {name!r}, got {got}")
    if isinstance(value, str) and not (value.isascii() and value.isprintable()):
        raise ConfigError(
            f"headers: the value of {name!r} has characters, such as a line break, that no header "
            "has; expected printable ASCII"
        )
