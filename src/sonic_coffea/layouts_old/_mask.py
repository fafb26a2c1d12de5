"""Masks: 1 for an element, 0 for padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts_old._columns import Columns
from sonic_coffea.layouts_old._declarations import DType, declare, length_of, order_of, target_of
from sonic_coffea.layouts_old._layout import Bound, Layout, ordered, with_axes
from sonic_coffea.layouts_old._nodes import split

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts_old._fields import Source
    from sonic_coffea.layouts_old._rows import RowSelection, Tensor


@dataclass(frozen=True, slots=True, init=False)
class Mask(Layout):
    """1 where there is a constituent, 0 where there is padding: ``[N, 1, L]``, or ``[N, L]``.

    Parameters
    ----------
    length : int, optional
        Length of the mask. By default, it is the length of the input whose elements are counted;
        beside `Bucketed`, it differs between requests.
    of : str, optional
        The field whose elements are counted, instead of an input's. The elements are not read, so
        they may be of any type, such as records.
    beside : str, optional
        The model's input whose elements are counted; by default, the first jagged input.
    axis_order : {"FL", "LF", "L"}
        ``[N, 1, L]``, ``[N, L, 1]`` or ``[N, L]``.
    dtype : dtype
        Type of the tensor, float32 by default.

    Examples
    --------
    >>> import awkward as ak
    >>> Mask(3, of="pt").pack(ak.Array([{"pt": [3.0, 2.0]}])).tolist()
    [[[1.0, 1.0, 0.0]]]
    """

    length: int | None
    of: str | None
    beside: str | None
    axis_order: str
    dtype: DType
    lengths: tuple[int, ...] = field(repr=False, compare=False)

    def __init__(
        self,
        length: int | None = None,
        of: str | None = None,
        *,
        beside: str | None = None,
        axis_order: str = "FL",
        dtype: DTypeLike = "float32",
    ) -> None:
        if of is not None and beside is not None:
            raise ConfigError(f"Mask: expected of={of!r} or beside={beside!r}, got both")
        checked = None if length is None else length_of(length, self)
        target = target_of(dtype, self)
        lengths = () if checked is None else (checked,)
        declare(self, length=checked, of=of, beside=beside, axis_order=order_of(axis_order, self))
        declare(self, dtype=target, lengths=lengths)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.of,) if self.of else ()

    def counted_input(self, jagged: Sequence[str]) -> str | None:
        if self.of is not None:
            return None
        if not jagged:
            raise ConfigError("Mask needs of=, as the model has no jagged input")
        if self.beside is not None and self.beside not in jagged:
            raise ConfigError(
                f"Mask beside {self.beside!r}, which is no jagged input; "
                f"{nearest(self.beside, jagged)}"
            )
        return self.beside or jagged[0]

    def bind(self, source: Source) -> Bound:
        if self.of is None:
            raise ConfigError(
                "Mask does not know what to count; give of=, the name of a jagged field, "
                "or use it beside a Padded input"
            )
        lists = split(source.column(self.of), jagged=True, what=f"field {self.of!r}")
        # In a model, `among` has told; by itself, the longest row does.
        lengths = self.lengths or (int(lists.counts.max(initial=1)),)
        return Bound(self._of_lengths(lengths), Columns(lists, (), ()))

    def among(self, inputs: Mapping[str, Layout]) -> Mask:
        if self.lengths:
            return self
        jagged = {name: layout for name, layout in inputs.items() if layout.jagged}
        counted = self.counted_input(list(jagged))
        if counted is not None:
            jagged = {counted: jagged[counted]}
        lengths = {layout.lengths for layout in jagged.values() if layout.lengths}
        if len(lengths) != 1:
            names = ", ".join(map(repr, jagged)) or "none"
            tell = f"inputs {names} have several" if lengths else f"no input is padded, of {names}"
            raise ConfigError(f"Mask needs a length, as {tell}")
        return self._of_lengths(*lengths)

    def _of_lengths(self, lengths: tuple[int, ...]) -> Mask:
        return declare(copy(self), lengths=lengths)

    def row_shape(self, level: int) -> tuple[int, ...]:
        return ordered(self.axis_order, 1, self.padded_length(level) or -1)

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        columns.mark(with_axes(out, self.axis_order), rows)
