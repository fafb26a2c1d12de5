"""Numbers of the pairs of a row's elements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, InputError, nearest
from sonic_coffea.layouts._elements import BLOCK_BYTES, Columns, Elements
from sonic_coffea.layouts._expressions import expression_of, path_of
from sonic_coffea.layouts._features import declare, texts_of
from sonic_coffea.layouts._jagged import Padded, outer_lists, pad_lists
from sonic_coffea.layouts._layout import (
    Batch,
    Bound,
    FieldsLayout,
    constants_of,
    lengths_of,
    order_of,
)
from sonic_coffea.layouts._padding import pad

if TYPE_CHECKING:
    from sonic_coffea.layouts._source import Source
    from sonic_coffea.layouts._structure import Int64, Tensor

VECTORS = (
    ("px", "py", "pz", "energy"),
    ("pt", "eta", "phi", "mass"),
    ("pt", "eta", "phi", "energy"),
)
"""Fields that make a four-vector."""

_VECTOR = "a four-vector, by name: " + " or ".join(f"({', '.join(names)})" for names in VECTORS)

ELEMENT = {
    "px": "pt * cos(phi)",
    "py": "pt * sin(phi)",
    "pz": "pt * sinh(eta)",
    "energy": "sqrt(px**2 + py**2 + pz**2 + mass**2)",
    "pt": "sqrt(px**2 + py**2)",
    "phi": "arctan2(py, px)",
    "rapidity": "0.5 * log(max(energy + pz, 1e-20) / max(energy - pz, 1e-20))",
}
"""Quantities of an element that follow from its four-vector."""

ELEMENTS = {
    f"{name}_{end}": re.sub(r"\b[a-z]+\b(?!\()", rf"\g<0>_{end}", text)
    for end in "ij"
    for name, text in ELEMENT.items()
}
"""The same of the two elements of a pair."""

PAIR = {
    "delta_r": "sqrt((rapidity_i - rapidity_j)**2 + wrap(phi_i - phi_j)**2)",
    "kt": "min(pt_i, pt_j) * delta_r",
    "z": "min(pt_i, pt_j) / max(pt_i + pt_j, eps)",
    "m2": "(energy_i + energy_j)**2 - (px_i + px_j)**2 - (py_i + py_j)**2 - (pz_i + pz_j)**2",
    "ln_kt": "log(max(kt, eps))",
    "ln_z": "log(max(z, eps))",
    "ln_delta_r": "log(max(delta_r, eps))",
    "ln_m2": "log(max(m2, eps))",
}
"""Quantities of a pair."""

DEFAULT = ("ln_kt", "ln_z", "ln_delta_r", "ln_m2")

_ALIASES = {"e": "energy", "m": "mass"}


@dataclass(frozen=True, slots=True, eq=False)
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

    fields: Any
    length: Any
    formulae: Any = None
    fill: Any = 0.0
    _: KW_ONLY
    eps: float = 1e-8
    other: Padded | int | None = None
    axis_order: str = "CLL"
    dtype: Any = "float32"
    sort_by: Any = None

    def __post_init__(self) -> None:
        self._declare()
        order_of(self.axis_order, self, orders=("CLL", "LLC"))
        declare(self, length=lengths_of(self.length, self))
        if not 0 < self.eps < np.inf:
            raise ConfigError(f"Pairwise: expected an eps above 0, got {self.eps}")
        _check_other(self.other)
        formulae = self.formulae
        if formulae is None and all(map(four_vector, self._names())):
            formulae = DEFAULT
        if formulae is not None:
            given = [formulae] if isinstance(formulae, str) else formulae
            formulae = texts_of(given, "Pairwise: expected formulae as a list of strings")
        declare(self, formulae=formulae)
        declare(self, fill=constants_of("fill", self.fill, self, self.channels, "channels"))
        if formulae is None and self.sort_by is not None:
            raise ConfigError("Pairwise: pairs that are given are not sorted; sort them before")
        if isinstance(self.other, Padded if formulae is None else int):
            raise ConfigError(
                "Pairwise: pairs that are given have a length as their other, such as other=5; "
                "pairs that formulae compute have a layout, such as "
                f"other=sonic.Padded([…], 5); got {self.other!r}"
                + (" without formulae" if formulae is None else "")
            )
        if formulae is not None:
            if not formulae:
                raise ConfigError("Pairwise needs at least one formula, got none")
            if self.dtype.kind in "iub":
                raise ConfigError(f"Pairwise computes real numbers, not {self.dtype.name}")
            ones = [dict.fromkeys(names, np.ones((1, 1))) for names in self._names()]
            with np.errstate(all="ignore"):
                self._computed(ones[0], ones[-1])

    @property
    def lengths(self) -> tuple[int, ...]:  # type: ignore[override]
        lengths: tuple[int, ...] = self.length
        return lengths

    @property
    def columns(self) -> tuple[str, ...]:
        others = self.other.columns if isinstance(self.other, Padded) else ()
        return tuple(dict.fromkeys((*super(Pairwise, self).columns, *others)))

    @property
    def channels(self) -> int:
        """How many numbers a pair has."""
        return len(self.features if self.formulae is None else self.formulae)

    def row_shape(self, bucket: int) -> tuple[int, ...]:
        length = self.padded_length(bucket)
        shape = self.channels, length, self._other_length(length)
        return shape if self.axis_order == "CLL" else (*shape[1:], shape[0])

    def bind(self, source: Source, others: Mapping[str, Bound] | None = None) -> Bound:
        del others
        if self.formulae is None:
            return Bound(self, *_stored(source, self))
        columns = self.bound_columns(source)
        if not isinstance(self.other, Padded):
            return Bound(self, columns)
        second = self.other.bound_columns(source)
        fields = [f"field {each.features[0].text!r}" for each in (self, self.other)]
        columns.rows.check_same(second.rows, (fields[0], fields[1]))
        return Bound(self, columns, other=second)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        by_channel = out if self.axis_order == "CLL" else out.transpose(0, 3, 1, 2)
        if self.formulae is None:
            pad_lists(by_channel, bound, batch.rows, self.fill)
            return
        rows = bound.columns.numbers(batch.rows)
        step = max(1, BLOCK_BYTES // (64 * by_channel.shape[2] * by_channel.shape[3]))
        for start in range(0, len(rows), step):
            here = slice(start, start + step)
            self._write_computed(by_channel[here], bound, rows[here])

    def _write_computed(self, out: Tensor, bound: Bound, rows: Int64) -> None:
        """Fill ``out[n, C, L, M]`` of few rows."""
        first, counts = _padded(bound.columns, rows, out.shape[2], self._names()[0])
        second, others = first, counts
        if bound.other is not None:
            second, others = _padded(bound.other, rows, out.shape[3], self._names()[-1])
        valid = (np.arange(int(counts.max(initial=0))) < counts[:, np.newaxis])[:, :, np.newaxis]
        valid = (
            valid & (np.arange(int(others.max(initial=0))) < others[:, np.newaxis])[:, np.newaxis]
        )
        out[:] = np.asarray(self.fill).astype(out.dtype)[:, np.newaxis, np.newaxis]
        with np.errstate(all="ignore"):
            for channel, numbers in enumerate(self._computed(first, second)):
                target = out[:, channel, : valid.shape[1], : valid.shape[2]]
                np.copyto(target, numbers, where=valid, casting="unsafe")
                wrong = ~np.isfinite(target) & valid
                if wrong.any():
                    row = int(rows[np.argmax(wrong.any(axis=(1, 2)))])
                    raise InputError(
                        f"formula {self.formulae[channel]!r} is NaN, or larger than "
                        f"{self.dtype.name} can hold, for a pair of elements in event "
                        f"{bound.rows.event_of(row)}; limit its argument, such as log(max(…, eps)),"
                        " or correct the input",
                        rows=(row, row + 1),
                    )

    def _computed(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[Any]:
        """Return ``[n, L, M]`` of each formula, of ``[n, L]`` and ``[n, M]`` of fields."""
        names = self._names()
        known: dict[str, Any] = {"eps": self.eps}
        for name, numbers in _with_vector(first, names[0]).items():
            known[f"{name}_i"] = numbers[:, :, np.newaxis]
        for name, numbers in _with_vector(second, names[-1]).items():
            known[f"{name}_j"] = numbers[:, np.newaxis]
        return [_evaluated(formula, known, formula) for formula in self.formulae]

    def _names(self) -> list[list[str]]:
        """Return the names of the fields, and of the other elements' fields if `other` has some."""
        layouts = [self, self.other] if isinstance(self.other, Padded) else [self]
        return [[base_name(feature.name) for feature in layout.features] for layout in layouts]

    def _other_length(self, length: Any) -> Any:
        """Return the length of the second axis of pairs, from the length of the first."""
        if self.other is None:
            return length
        return self.other if isinstance(self.other, int) else self.other.length


def _quantity(name: str, known: dict[str, Any], formula: str) -> Any:
    """Return the numbers that a formula names, which are computed at the first use."""
    if name not in known:
        ends = [e for e in "ij" if any(all(f"{c}_{e}" in known for c in v) for v in VECTORS)]
        derived = {n: text for n, text in ELEMENTS.items() if n[-1] in ends}
        if len(ends) == 2:
            derived |= PAIR
        if name not in derived:
            hint = ""
            if not derived:
                hint = f" Quantities such as {DEFAULT[0]} need the fields of {_VECTOR}"
            nearby = nearest(name, [*known, *derived])
            raise ConfigError(f"formula {formula!r}: no {name!r}; {nearby}{hint}")
        known[name] = _evaluated(derived[name], known, formula)
    return known[name]


def _evaluated(text: str, known: dict[str, Any], formula: str) -> Any:
    """Return what an expression gives of the quantities that it names."""
    terms, compute = expression_of(text, "formula")
    if any(reduction for _, reduction in terms):
        raise ConfigError(f"formula {formula!r}: elements have no lists to be reduced")
    names = {term: ".".join(map(str, term[0])) for term in terms}
    return compute({term: _quantity(name, known, formula) for term, name in names.items()})


def base_name(path: Any) -> str:
    """Return how formulae call a field: the last part of its path."""
    return next(step for step in reversed(path_of(path)) if isinstance(step, str))


def four_vector(names: Sequence[str]) -> dict[str, str]:
    """Return which of some fields are the components of a four-vector; none if they are not."""
    known: dict[str, str] = {}
    for name in names:
        end = name.lower().rpartition("_")[2]
        known.setdefault(_ALIASES.get(end, end), name)
    for components in VECTORS:
        if all(c in known for c in components):
            return {c: known[c] for c in components}
    return {}


def _with_vector(fields: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return fields by their names, and the components of a four-vector by theirs."""
    return {**{c: fields[name] for c, name in four_vector(names).items()}, **fields}


def _padded(
    columns: Columns, rows: Int64, length: int, names: Sequence[str]
) -> tuple[dict[str, Tensor], Int64]:
    """Return ``[n, L]`` of each field, to the length of the longest row, and the rows' counts."""
    counts = np.minimum(columns.counts(rows), length)
    elements = Elements(columns, rows, length)
    values = elements.values(np.dtype(np.float64))
    fields = np.empty((len(names), len(rows), int(counts.max(initial=0))))
    zeros = np.zeros(len(names))
    pad(fields.transpose(1, 0, 2), values, elements.starts, elements.counts, zeros)
    return dict(zip(names, fields, strict=True)), counts


def _check_other(other: Any) -> None:
    """Refuse options of the other elements of pairs that would not be used."""
    if other is None or (isinstance(other, int) and not isinstance(other, bool) and other > 0):
        return
    if not isinstance(other, Padded):
        raise ConfigError(f"Pairwise: expected other to be a Padded or a length, got {other!r}")
    used = ("sort_by", "sort_ascending", "missing")
    options = {name: getattr(other, name) for name in used}
    if other != Padded(other.features, other.length, **options):
        raise ConfigError(
            "Pairwise: of other, the fields, the length, sort_by, sort_ascending and missing "
            f"count; leave out the rest of {other!r}"
        )


def _stored(source: Source, layout: Pairwise) -> tuple[Columns, tuple[()], Columns]:
    """Return the columns of the first elements of pairs, and those of the pairs."""
    what = f"field {layout.features[0].text!r}"
    pairs = layout.bound_columns(source)
    needs = "Pairwise needs i x j lists of pairs"
    hint = f"to compute pairs of elements, name formulae, or the fields of {_VECTOR}"
    columns = outer_lists(pairs, what, f"{needs}; {hint}")
    between, offsets = layout.other is not None, columns.offsets
    assert offsets is not None  # noqa: S101
    sizes, counts = np.diff(offsets), pairs.counts(slice(0, len(pairs.rows)))
    first = np.repeat(offsets[:-1], sizes)
    others = counts[first] if between else np.repeat(sizes, sizes)
    for element in np.flatnonzero(counts != others)[:1].tolist():
        row = int(np.searchsorted(offsets, element, side="right")) - 1
        as_many = "one number of j for all i" if between else "as many j as i"
        here = f"beside one of {others[element]}" if between else f"in one of {sizes[row]}"
        raise InputError(
            f"{what} has a list of {counts[element]} pairs {here} in event "
            f"{columns.rows.event_of(row)}; expected i x j lists, with {as_many}"
            + ("" if between else "; for pairs of two collections, declare other=")
        )
    return columns, (), pairs
