"""Names of fields: dotted paths, with at most one index into a list."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from sonic_coffea.errors import ConfigError

_PATH = re.compile(r"(?P<lists>[^\[\]]+)(\[(?P<pick>-?\d+)\])?(?P<rest>\.[^\[\]]+)?")
_SLICE = re.compile(r"(?P<lists>[^\[\]]+)\[:(?P<stop>\d+)\](?P<rest>(\.[^\[\]]+)?)")


@dataclass(frozen=True, slots=True)
class Path:
    """The name of a field, ``"Jet[1].pt"``, taken apart into a column, ``"Jet.pt"``, and a pick, 1.

    A negative pick counts from the end of each list.
    """

    text: str
    column: str
    pick: int | None

    @property
    def picked(self) -> str:
        """The picked object: ``"Jet[1]"``."""
        return self.text.partition("]")[0] + "]"


@lru_cache(maxsize=4096)
def path_of(text: str) -> Path:
    """Take the name of a field apart.

    Raises
    ------
    ConfigError
        If it has brackets that are no index.
    """
    match = _PATH.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"field {text!r}: expected a path with one index at most, such as 'pf.pt' or "
            "'Jet[0].pt'"
        )
    pick = match["pick"]
    column = match["lists"] + (match["rest"] or "")
    return Path(text, column, None if pick is None else int(pick))


def picks_of(text: str) -> tuple[str, ...]:
    """Return the names of the first objects: ``"Jet[:2].pt"`` has two."""
    match = _SLICE.fullmatch(text)
    if match is None:
        return (text,)
    return tuple(f"{match['lists']}[{i}]{match['rest']}" for i in range(int(match["stop"])))
