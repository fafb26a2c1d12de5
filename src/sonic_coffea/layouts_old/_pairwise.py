"""Numbers of the pairs of a row's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts_old import _kernels
from sonic_coffea.layouts_old._binding import bind_columns
from sonic_coffea.layouts_old._columns import Columns
from sonic_coffea.layouts_old._declarations import DType, declare, lengths_of, order_of
from sonic_coffea.layouts_old._formulae import DEFAULT, Program, compile_formulae, four_vector
from sonic_coffea.layouts_old._layout import Bound, Fields, FieldsLayout
from sonic_coffea.layouts_old._memory import empty
from sonic_coffea.layouts_old._padded import Padded
from sonic_coffea.layouts_old._stored_pairs import StoredPairs, stored_pairs

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts_old._fields import Feature, Source
    from sonic_coffea.layouts_old._rows import Int64, RowSelection, Tensor


@dataclass(frozen=True, slots=True, init=False)
class Pairwise(FieldsLayout):
    """Numbers of the pairs of a row's elements: ``[N, C, L, L]``, or ``[N, C, L, M]``.

    The numbers are computed from the elements, ``events * jets * var * {px, py, pz, energy}``,
    while they are packed. Or they are fields, ``events * jets * var * var * number``, where the
    inner lists of a row are as long as the outer list. With `other`, the second element of a pair
    is of another collection of the same row.

    Parameters
    ----------
    fields : sequence of str or Feature
        Fields of the elements, from which the formulae are computed; or fields of the pairs, which
        are the channels.
    length : int or sequence of int
        Elements kept of each row, the first ones; shorter rows are padded. Several lengths work as
        in `Bucketed`.
    formulae : sequence of str, optional
        The channels: ``ln_kt``, ``ln_z``, ``ln_delta_r``, ``ln_m2``, the same without ``ln_``, or
        expressions such as ``"abs(dz_i - dz_j)"`` of the fields' names, with ``_i`` and ``_j`` for
        the two elements of the pair. The default is the first four names if the fields are a
        four-vector, and those of `other`, too; otherwise, the fields are numbers of pairs.
    fill : float or sequence of float
        The padding: one value for all channels, or one for each.
    eps : float
        Lower limit of a logarithm's argument and of a denominator.
    other : Padded or int, optional
        The second elements of the pairs, if they are of another collection: a `Padded` layout with
        their fields, their length M and their order, such as ``Padded(["sv.pt", "sv.eta"], 5)``.
        For fields of pairs, M alone: the inner lists of a row have the same length.
    axis_order : {"CLL", "LLC"}
        ``[N, C, L, L]`` or ``[N, L, L, C]``; with `other`, ``[N, C, L, M]`` or ``[N, L, M, C]``.
    dtype : dtype
        Type of the tensor, float32 by default. The formulae are computed in float64.
    sort_by : str, optional
        As in `Padded`; only for fields of elements.

    Notes
    -----
    A four-vector has fields called px, py, pz, energy (or e), or pt, eta, phi and mass (or m) or
    energy; what precedes an underscore does not matter (``part_px``). The quantities are those of
    the Particle Transformer [1]_ as weaver-core computes them, in ``ParticleTransformer.py``; its
    ``pairwise_lv_fts_pp``, ``pairwise_lv_fts`` in earlier releases, has the four defaults in the
    same order and with the same `eps`. Each line names the function that it follows:

    - pt = sqrt(px² + py²), phi = arctan2(py, px), and the rapidity
      y = 1/2 ln((E + pz) / (E - pz)): ``to_ptrapphim``
    - ``delta_r`` = sqrt((y_i - y_j)² + (phi_i - phi_j)²), the angle from -pi to pi: ``delta_r2``
      and ``delta_phi``
    - ``kt`` = min(pt_i, pt_j) delta_r, ``z`` = min(pt_i, pt_j) / max(pt_i + pt_j, eps):
      ``pairwise_lv_fts_pp``
    - ``m2`` = (E_i + E_j)² - abs(p_i + p_j)²: ``to_m2``
    - ``ln_kt`` = ln(max(kt, eps)), and so on.

    In y, E - pz is at least 1e-20, as in weaver. E + pz is, too: weaver's y is -inf where it is 0.

    .. [1] H. Qu, C. Li, S. Qian, arXiv:2202.03772.

    Examples
    --------
    >>> import awkward as ak
    >>> jets = ak.Array([{"x": [1.0, 3.0]}, {"x": [5.0]}])
    >>> Pairwise("x", 2, formulae=["x_i - x_j"]).pack(jets).tolist()
    [[[[0.0, -2.0], [2.0, 0.0]]], [[[0.0, 0.0], [0.0, 0.0]]]]
    >>> events = ak.Array([{"Jet": [{"pt": 50.0}, {"pt": 30.0}], "Muon": [{"pt": 10.0}]}])
    >>> Pairwise("Jet.pt", 2, "pt_i - pt_j", other=Padded("Muon.pt", 1)).pack(events).tolist()
    [[[[40.0], [20.0]]]]
    """

    jagged = True

    features: tuple[Feature, ...]
    lengths: tuple[int, ...]
    formulae: tuple[str, ...] | None
    fill: tuple[float, ...]
    eps: float
    other: Padded | int | None
    axis_order: str
    dtype: DType
    sort_by: str | None

    def __init__(
        self,
        fields: Fields,
        length: int | Sequence[int],
        formulae: Sequence[str] | str | None = None,
        fill: float | Sequence[float] = 0.0,
        *,
        eps: float = 1e-8,
        other: Padded | int | None = None,
        axis_order: str = "CLL",
        dtype: DTypeLike = "float32",
        sort_by: str | None = None,
    ) -> None:
        sizes = length if isinstance(length, (list, tuple)) else (length,)
        self._declare(fields, dtype, lengths=lengths_of(sizes, self), sort_by=sort_by)
        declare(self, eps=float(eps), axis_order=order_of(axis_order, self, orders=("CLL", "LLC")))
        if not self.eps > 0:
            raise ConfigError(f"Pairwise: expected an eps above 0, got {eps}")
        declare(self, other=_other(other))
        if formulae is None and all(map(four_vector, self._names())):
            formulae = DEFAULT
        chosen = (formulae,) if isinstance(formulae, str) else formulae
        declare(self, formulae=None if chosen is None else tuple(chosen))
        declare(self, fill=self._one_for_each("fill", fill, self.channels, "channels"))
        if self.formulae is None and sort_by is not None:
            raise ConfigError("Pairwise: pairs that are given are not sorted; sort them before")
        if isinstance(self.other, Padded if self.formulae is None else int):
            raise ConfigError(
                "Pairwise: pairs that are given have a length as their other, such as other=5; "
                "pairs that formulae compute have a layout, such as "
                f"other=sonic.Padded([…], 5); got {other!r}"
                + (" without formulae" if self.formulae is None else "")
            )
        if self.formulae is not None:
            if not self.formulae:
                raise ConfigError("Pairwise needs at least one formula, got none")
            if self.dtype.kind in "iub":
                raise ConfigError(f"Pairwise computes real numbers, not {self.dtype.name}")
            self._program()

    @property
    def columns(self) -> tuple[str, ...]:
        others = self.other.columns if isinstance(self.other, Padded) else ()
        return tuple(dict.fromkeys((*super(Pairwise, self).columns, *others)))

    @property
    def channels(self) -> int:
        """How many numbers a pair has."""
        return len(self.features if self.formulae is None else self.formulae)

    def row_shape(self, level: int) -> tuple[int, ...]:
        length = self.padded_length(level)
        shape = self.channels, length, self._other_length(length)
        return shape if self.axis_order == "CLL" else (*shape[1:], shape[0])

    def bind(self, source: Source) -> Bound:
        if self.formulae is None:
            pairs = stored_pairs(
                source,
                self.features,
                target=self.dtype,
                longest=(self.lengths[-1], self._other_length(self.lengths[-1])),
                between=self.other is not None,
            )
            return Bound(self, pairs)
        how: Any = {"jagged": True, "target": np.dtype(np.float64)}
        columns = bind_columns(source, self.features, sort_by=self.sort_by, **how)
        if not isinstance(self.other, Padded):
            return Bound(self, columns)
        other = self.other
        how |= {"sort_by": other.sort_by, "ascending": other.sort_ascending}
        others = bind_columns(source, other.features, missing=other.missing, **how)
        fields = tuple(f"field {each.features[0].name!r}" for each in (self, other))
        columns.split.rows.check_same(others.split.rows, (fields[0], fields[1]))
        ours = columns.split, columns.columns, columns.groups, columns.order
        return Bound(self, _PairColumns(*ours, others=others))

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        by_channel = out if self.axis_order == "CLL" else out.transpose(0, 3, 1, 2)
        if isinstance(columns, StoredPairs):
            columns.write(by_channel, self.fill, rows)
        else:
            self._compute(by_channel, columns, rows)

    def jagged_axes(
        self, columns: Columns, rows: RowSelection, lengths: Int64
    ) -> list[tuple[Int64, Int64]]:
        other_lengths = np.full_like(lengths, self._other_length(lengths))
        first = columns.split.counts_of(rows), lengths
        return [first, (_other_counts(columns, rows), other_lengths)]

    def _names(self) -> list[list[str]]:
        """Return the names of the fields, and of the other elements' fields if `other` has some."""
        layouts = [self, self.other] if isinstance(self.other, Padded) else [self]
        return [[feature.name for feature in layout.features] for layout in layouts]

    def _other_length(self, length: Any) -> Any:
        """Return the length of the second axis of pairs, from the length of the first."""
        if self.other is None:
            return length
        return self.other if isinstance(self.other, int) else self.other.length

    def _program(self) -> Program:
        return compile_formulae(self.formulae or (), *self._names(), eps=self.eps)

    def _compute(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        program = self._program()
        fields = _numbers(columns, rows, out.shape[2])
        others, counts = fields, columns.split.counts_of(rows)
        alike = not isinstance(columns, _PairColumns)
        if isinstance(columns, _PairColumns):
            others = _numbers(columns.others, rows, out.shape[3])
        length = max(out.shape[2:])
        known = np.empty((len(program.elements), length))
        bad = _kernels.pairs(
            out,
            fields,
            counts,
            program.elements,
            others,
            _other_counts(columns, rows),
            program.others,
            np.asarray(self.fill).astype(out.dtype),
            program.pairs,
            program.constants,
            program.results,
            alike,
            program.symmetric,
            float(ml_dtypes.finfo(self.dtype).max),
            np.empty((max(fields.shape[1], others.shape[1]), length)),
            known,
            known if alike else np.empty((len(program.others), length)),
            np.empty((len(program.pairs), length)),
        )
        if bad >= 0 and self.formulae is not None:
            place, channel = divmod(bad, self.channels)
            row = columns.number(rows, place)
            raise InputError(
                f"formula {self.formulae[channel]!r} is NaN, or larger than {self.dtype.name} can "
                f"hold, for a pair of elements in event {columns.split.rows.event_of(row)}; limit "
                "its argument, such as log(max(…, eps)), or correct the input",
                rows=(row, row + 1),
            )


def _other(other: Any) -> Padded | int | None:
    """Return the other elements of pairs, refusing options that would not be used."""
    if other is None or (isinstance(other, int) and not isinstance(other, bool) and other > 0):
        return other
    if not isinstance(other, Padded):
        raise ConfigError(f"Pairwise: expected other to be a Padded or a length, got {other!r}")
    used = ("sort_by", "sort_ascending", "missing")
    options = {name: getattr(other, name) for name in used}
    if other != Padded(other.features, other.length, **options):
        raise ConfigError(
            "Pairwise: of other, the fields, the length, sort_by, sort_ascending and missing "
            f"count; leave out the rest of {other!r}"
        )
    return other


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _PairColumns(Columns):
    """The columns of the first elements of pairs, and of the second ones of another collection."""

    others: Columns


def _other_counts(columns: Columns, rows: RowSelection) -> Int64:
    """Return how many second elements each row's pairs have."""
    if isinstance(columns, StoredPairs):
        return columns.other_counts[rows]
    others = columns.others if isinstance(columns, _PairColumns) else columns
    return others.split.counts_of(rows)


def _numbers(columns: Columns, rows: RowSelection, length: int) -> Tensor:
    """Return ``[n, F, L]`` of the fields of elements."""
    exact = all(c.values.dtype in _EXACT for c in columns.columns)
    count = len(columns.columns)
    kind = np.dtype(np.float32 if exact else np.float64)
    fields = empty((len(columns.split.starts[rows]), count, length), kind)
    columns.pad(fields, (0.0,) * count, rows)
    return fields


_EXACT = frozenset(map(np.dtype, "bBhHf"))
"""Types whose numbers float32 holds."""
