"""Tokens and headers that gRPC takes; others are refused before gRPC logs them."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, SonicError
from sonic_coffea.transport._files import unreadable

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-z_.-]+")
# Who renews a token may write the file in two steps.
_RENEWED_WITHIN_S = 1.0
_LOOKS_AGAIN_S = 0.05


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
        while (problem := self._read()) is not None:
            if self._last:
                if not self._told:
                    logger.warning("%s; the token that it had is used", problem)
                self._told = True
                break
            if time.monotonic() >= until:
                raise problem
            time.sleep(_LOOKS_AGAIN_S)
        else:
            self._told = False
        return self._last

    def _read(self) -> ConfigError | None:
        """Read the token, or return why that cannot be done."""
        try:
            token = self.path.read_text(encoding="utf-8").strip()
        except OSError as error:
            reason = str(error.strerror)
        except UnicodeDecodeError:
            # Its own words quote the token.
            reason = "expected text, got bytes that are not UTF-8"
        else:
            if token:
                self._last = token
                return None
            reason = "it is empty"
        return unreadable("token file", self.path, reason)


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
