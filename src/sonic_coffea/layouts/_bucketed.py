"""A jagged axis padded to the next of a few lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonic_coffea.errors import ConfigError
from sonic_coffea.layouts._layout import DType, Fields, length_of
from sonic_coffea.layouts._padded import PaddedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._fields import Feature


@dataclass(frozen=True, slots=True, init=False)
class Bucketed(PaddedLayout):
    """A jagged axis padded to the next of a few lengths; rows of like length share a request.

    ``events * jets * var * number`` becomes ``[n, F, L]``, with another `L` in each request.

    Parameters
    ----------
    fields : sequence of str or Feature
        The channels of the tensor, in order.
    lengths : sequence of int
        What rows are padded to; longer rows are truncated to the last.
    fill, axis_order, dtype, sort_by
        As of `Padded`.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": [4.0]}])
    >>> Bucketed("pt", lengths=(2, 4, 8)).pack(jets).shape
    (2, 1, 4)
    """

    features: tuple[Feature, ...]
    lengths: tuple[int, ...]
    fill: tuple[float, ...]
    axis_order: str
    dtype: DType
    sort_by: str | None

    def __init__(
        self,
        fields: Fields,
        lengths: Sequence[int] = (16, 32, 64, 128),
        fill: float | Sequence[float] = 0.0,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
        *,
        sort_by: str | None = None,
    ) -> None:
        sizes = tuple(length_of(n, self) for n in lengths)
        if not sizes or list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"Bucketed: expected ascending lengths, got {list(lengths)}")
        self._declare(fields, dtype, lengths=sizes, sort_by=sort_by)
        self._declare_padding(fill, axis_order)
