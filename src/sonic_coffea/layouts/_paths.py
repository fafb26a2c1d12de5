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
    """The name of a field, taken apart.

    Attributes
    ----------
    text : str
        As it was written: ``"Jet[1].pt"``.
    column : str
        Without the index: ``"Jet.pt"``.
    pick : int or None
        Which object of each list is meant: 1; negative ones count from the end.
    """

    text: str
    column: str
    pick: int | None

    @property
    def picked(self) -> str:
        """The object that is meant: ``"Jet[1]"``."""
        return self.text.partition("]")[0] + "]"


@lru_cache(maxsize=4096)
def path_of(text: str) -> Path:
    """Take the name of a field apart.

    Raises
    ------
    ConfigError
        If it has brackets that are no index.
    """
    found = _PATH.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"field {text!r}: expected a path with one index at most, such as 'pf.pt' or "
            "'Jet[0].pt'"
        )
    pick = found["pick"]
    column = found["lists"] + (found["rest"] or "")
    return Path(text, column, None if pick is None else int(pick))


def picks_of(text: str) -> tuple[str, ...]:
    """Return the names of the first objects: ``"Jet[:2].pt"`` has two."""
    found = _SLICE.fullmatch(text)
    if found is None:
        return (text,)
    return tuple(f"{found['lists']}[{i}]{found['rest']}" for i in range(int(found["stop"])))
