"""Numbers of the pairs of a row's elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from awkward.contents import NumpyArray, RegularArray

from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts import _kernels
from sonic_coffea.layouts._binding import bind_columns
from sonic_coffea.layouts._columns import Columns
from sonic_coffea.layouts._formulae import DEFAULT, VECTORS, compile_formulae, four_vector
from sonic_coffea.layouts._layout import (
    Bound,
    DType,
    Fields,
    Layout,
    Tensor,
    declare,
    length_of,
)
from sonic_coffea.layouts._memory import empty
from sonic_coffea.layouts._padded import PaddedLayout
from sonic_coffea.layouts._rows import Int64, Rows, RowSelection, Split, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awkward.contents import Content
    from numpy.typing import DTypeLike

    from sonic_coffea.layouts._fields import Feature, Source
    from sonic_coffea.layouts._formulae import Program


@dataclass(frozen=True, slots=True, init=False)
class Pairwise(PaddedLayout):
    """Numbers of the pairs of a row's elements: ``[N, C, L, L]``.

    The numbers are computed from the elements, ``events * jets * var * {px, py, pz, energy}``,
    while they are packed. Or they are fields, ``events * jets * var * var * number``, where the
    inner lists of a row are as long as the outer list.

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
        four-vector; otherwise, the fields are numbers of pairs.
    fill : float or sequence of float
        The padding: one value for all channels, or one for each.
    eps : float
        Lower limit of a logarithm's argument and of a denominator.
    axis_order : {"CLL", "LLC"}
        ``[N, C, L, L]`` or ``[N, L, L, C]``.
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
    """

    features: tuple[Feature, ...]
    lengths: tuple[int, ...]
    formulae: tuple[str, ...] | None
    fill: tuple[float, ...]
    eps: float
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
        axis_order: str = "CLL",
        dtype: DTypeLike = "float32",
        sort_by: str | None = None,
    ) -> None:
        sizes = length if isinstance(length, (list, tuple)) else (length,)
        lengths = tuple(length_of(n, self) for n in sizes)
        if not lengths or list(lengths) != sorted(set(lengths)):
            raise ConfigError(f"Pairwise: expected a length, or ascending ones, got {length}")
        self._declare(fields, dtype, lengths=lengths, eps=float(eps), sort_by=sort_by)
        if not self.eps > 0:
            raise ConfigError(f"Pairwise: expected an eps above 0, got {eps}")
        if axis_order not in ("CLL", "LLC"):
            raise ConfigError(f"Pairwise: expected axis_order 'CLL' or 'LLC', got {axis_order!r}")
        names = [feature.name for feature in self.features]
        if formulae is None and four_vector(names):
            formulae = DEFAULT
        chosen = (formulae,) if isinstance(formulae, str) else formulae
        declare(self, formulae=None if chosen is None else tuple(chosen), axis_order=axis_order)
        self._declare_fill(fill, self.channels, "channels")
        if self.formulae is None and sort_by is not None:
            raise ConfigError("Pairwise: pairs that are given are not sorted; sort them before")
        if self.formulae is not None:
            if not self.formulae:
                raise ConfigError("Pairwise needs at least one formula, got none")
            if self.dtype.kind in "iub":
                raise ConfigError(f"Pairwise computes real numbers, not {self.dtype.name}")
            self._program()

    @property
    def channels(self) -> int:
        """How many numbers a pair has."""
        return len(self.features if self.formulae is None else self.formulae)

    def row_shape(self, level: int) -> tuple[int, ...]:
        length = self.padded_length(level)
        shape = self.channels, length, length
        return shape if self.axis_order == "CLL" else (*shape[1:], shape[0])

    def bind(self, source: Source) -> Bound:
        if self.formulae is None:
            return Bound(self, _given(source, self))
        columns = bind_columns(
            source,
            self.features,
            jagged=True,
            target=np.dtype(np.float64),
            sort_by=self.sort_by,
        )
        return Bound(self, columns)

    def write(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        by_channel = out if self.axis_order == "CLL" else out.transpose(0, 3, 1, 2)
        if isinstance(columns, _GivenPairs):
            columns.write(by_channel, self.fill, rows)
        else:
            self._compute(by_channel, columns, rows)

    def count_elements(
        self, columns: Columns, rows: RowSelection, levels: Int64
    ) -> tuple[int, int, int]:
        counts = columns.split.counts_of(rows)
        length = np.asarray(self.lengths)[np.minimum(levels, len(self.lengths) - 1)]
        sent, padded = np.minimum(counts, length) ** 2, length**2
        return int(sent.sum()), int((counts**2 - sent).sum()), int((padded - sent).sum())

    def doubt(self, columns: Columns) -> None:
        del columns

    def content(self, tensor: Tensor, columns: Columns) -> Content:
        return Layout.content(self, tensor, columns)

    def _program(self) -> Program:
        names = [feature.name for feature in self.features]
        return compile_formulae(self.formulae or (), names, eps=self.eps)

    def _compute(self, out: Tensor, columns: Columns, rows: RowSelection) -> None:
        program = self._program()
        exact = all(c.values.dtype in _EXACT for c in columns.columns)
        kind = np.dtype(np.float32 if exact else np.float64)
        fields = empty((len(out), len(self.features), out.shape[2]), kind)
        columns.pad(fields, (0.0,) * len(self.features), rows)
        sizes = len(self.features), len(program.elements), len(program.pairs)
        bad = _kernels.pairs(
            out,
            fields,
            columns.split.counts_of(rows),
            np.asarray(self.fill).astype(out.dtype),
            program.elements,
            program.pairs,
            program.constants,
            program.results,
            program.symmetric,
            _largest(self.dtype),
            *(np.empty((lines, out.shape[2])) for lines in sizes),
        )
        if bad >= 0 and self.formulae is not None:
            place, channel = divmod(bad, self.channels)
            row = int(np.arange(len(columns.split.rows))[rows][place])
            raise InputError(
                f"formula {self.formulae[channel]!r} is NaN, or larger than {self.dtype.name} can "
                f"hold, for a pair of elements in event {columns.split.rows.event_of(row)}; limit "
                "its argument, such as log(max(…, eps)), or correct the input",
                rows=(row, row + 1),
            )


_EXACT = frozenset(map(np.dtype, "bBhHf"))
"""Types whose numbers float32 holds."""


def _largest(dtype: DType) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)


@dataclass(frozen=True, slots=True, eq=False)
class _GivenPairs(Columns):
    """Columns of pairs: `inner` has a row for each element, and one without any as its last."""

    inner: Columns | None = None

    def write(self, out: Tensor, fills: Sequence[float], rows: RowSelection) -> None:
        """Fill ``out[n, C, L, L]``."""
        assert self.inner is not None  # noqa: S101
        starts, counts = self.split.starts[rows], self.split.counts_of(rows)
        within = np.arange(out.shape[-1])
        chosen = starts[:, np.newaxis] + within
        chosen[within >= counts[:, np.newaxis]] = -1
        try:
            self.inner.pad(out.transpose(0, 2, 1, 3), fills, chosen.reshape(-1))
        except InputError as error:
            raise type(error)(error.message) from None  # its rows are elements


def _given(source: Source, layout: Pairwise) -> Columns:
    """Read pairs: the rows are those of the outer lists."""
    what = f"field {layout.features[0].name!r}"
    inner = bind_columns(source, layout.features, jagged=True, target=layout.dtype)
    skeleton, offsets = _without_last_list(inner.split.rows.skeleton)
    if offsets is None:
        raise InputError(
            f"{what} has {'one jagged axis' if skeleton is not None else 'None'} where Pairwise "
            "needs i x j lists of pairs without None; to compute pairs of elements, name formulae, "
            f"or the fields of a four-vector: {' or '.join(f'({one})' for one in VECTORS)}"
        )
    starts, stops = offsets[:-1], offsets[1:]
    rows = Rows(skeleton, np.arange(len(starts)), contiguous=True)
    counts = inner.split.counts
    wrong = np.flatnonzero(counts != np.repeat(stops - starts, stops - starts))
    if len(wrong):
        element = int(wrong[0])
        row = int(np.searchsorted(offsets, element, side="right")) - 1
        raise InputError(
            f"{what} has a list of {counts[element]} pairs in one of {stops[row] - starts[row]} in "
            f"event {rows.event_of(row)}; expected i x j lists, with as many j as i"
        )
    nothing = np.zeros(1, np.int64)
    extended = replace(
        inner.split,
        starts=np.concatenate((inner.split.starts, nothing)),
        stops=np.concatenate((inner.split.stops, nothing)),
    )
    split = Split(rows, inner.split.leaf, starts, stops)
    return _GivenPairs(split, inner.columns, (), inner=replace(inner, split=extended))


def _without_last_list(node: Content) -> tuple[Any, Int64 | None]:
    """Return the structure above the innermost lists, numbering them, and their offsets."""
    if isinstance(node, NumpyArray):
        return node, None
    if isinstance(node.content, NumpyArray):
        if node.is_option:
            return None, None
        if isinstance(node, RegularArray):
            offsets = np.arange(node.length + 1) * node.size
        else:
            offsets = np.asarray(read(node.offsets), np.int64)
        return NumpyArray(np.arange(node.length, dtype=np.int64)), offsets
    inner, offsets = _without_last_list(node.content)
    if offsets is not None:
        if isinstance(node, RegularArray):
            inner = RegularArray(inner, node.size, zeros_length=node.length)
        else:
            inner = node.copy(content=inner)
    return inner, offsets
