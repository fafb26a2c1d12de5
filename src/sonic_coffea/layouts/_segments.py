"""Ranges of places in a call whose rows may share requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Segment:
    """Places `start` to `stop` of a call, whose rows may share requests.

    Attributes
    ----------
    row_bytes : int or array of int64
        Bytes of each row in a request: all the same, or one by one.
    length : int
        What rows are padded to, where that depends on the request; else 0.
    """

    start: int
    stop: int
    row_bytes: int | NDArray[np.int64]
    length: int = 0
