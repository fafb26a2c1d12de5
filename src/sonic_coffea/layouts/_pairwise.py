"""Numbers of the pairs of a row's elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from sonic_coffea.errors import ConfigError, require
from sonic_coffea.layouts._expressions import expression_of, text_of
from sonic_coffea.layouts._features import Fields, SortBy
from sonic_coffea.layouts._fields import Constants, FieldsLayout
from sonic_coffea.layouts._layout import Batch, Bound, Layout
from sonic_coffea.layouts._options import declare, one_for_each, refuse
from sonic_coffea.layouts._padding import pad
from sonic_coffea.layouts._structure import Tensor

_FOUR_VECTORS = (
    ("px", "py", "pz", "energy"),
    ("pt", "eta", "phi", "mass"),
    ("pt", "eta", "phi", "energy"),
)
"""Fields that make a four-vector."""

_ELEMENT = {
    "px": "pt * cos(phi)",
    "py": "pt * sin(phi)",
    "pz": "pt * sinh(eta)",
    "energy": "sqrt(px**2 + py**2 + pz**2 + mass**2)",
    "pt": "sqrt(px**2 + py**2)",
    "phi": "arctan2(py, px)",
    "rapidity": "0.5 * log(max(energy + pz, 1e-20) / max(energy - pz, 1e-20))",
}
"""Quantities of an element that follow from its four-vector, and from those before."""

_PAIR = {
    "delta_r": "sqrt((rapidity_i - rapidity_j)**2 + delta_phi(phi_i, phi_j)**2)",
    "kt": "min(pt_i, pt_j) * delta_r",
    "z": "min(pt_i, pt_j) / max(pt_i + pt_j, eps)",
    "m2": "(energy_i + energy_j)**2 - (px_i + px_j)**2 - (py_i + py_j)**2 - (pz_i + pz_j)**2",
    "ln_kt": "log(max(kt, eps))",
    "ln_z": "log(max(z, eps))",
    "ln_delta_r": "log(max(delta_r, eps))",
    "ln_m2": "log(max(m2, eps))",
}
"""Quantities of a pair."""

_DEFAULT = ("ln_kt", "ln_z", "ln_delta_r", "ln_m2")

_ALIASES = {"e": "energy", "m": "mass"}


@dataclass(frozen=True, slots=True, eq=False)
class Pairwise(FieldsLayout):
    """Numbers of the pairs of a row's elements: ``[N, C, L, L]``.

    The numbers are computed from the elements, ``events * jets * var * {px, py, pz, energy}``,
    while they are packed. Numbers that the arrays hold, ``events * jets * var * var * number``, are
    packed by `Padded` with ``outer=``.

    Parameters
    ----------
    fields : sequence of str or Feature
        Fields of the elements, from which the formulae are computed.
    length : int or sequence of int
        Elements kept of each row, the first ones; shorter rows are padded. Several lengths work as
        in `Bucketed`.
    formulae : sequence of str, optional
        The channels: ``ln_kt``, ``ln_z``, ``ln_delta_r``, ``ln_m2``, the same without ``ln_``, or
        expressions such as ``"abs(dz_i - dz_j)"`` of the fields' names, with ``_i`` and ``_j`` for
        the two elements of the pair. By default, the first four names. ``eps`` is 1e-8, the lower
        limit of a logarithm's argument and of a denominator.
    fill : float or sequence of float
        The padding: one value for all channels, or one for each.
    axis_order : {"CLL", "LLC"}
        ``[N, C, L, L]`` or ``[N, L, L, C]``.
    dtype : dtype
        Type of the tensor, float32 by default. The formulae are computed in float64.
    sort_by : str, optional
        As in `Padded`.

    Notes
    -----
    A four-vector has fields called px, py, pz, energy (or e), or pt, eta, phi and mass (or m) or
    energy; the same text may precede an underscore in all of them (``part_px``). The quantities are
    those of the Particle Transformer [1]_ as weaver-core computes them, in
    ``ParticleTransformer.py``; its ``pairwise_lv_fts_pp``, ``pairwise_lv_fts`` in earlier releases,
    has the four defaults in the same order and with the same `eps`. Each line names the function
    that it follows:

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

    jagged = True
    choices: ClassVar = {"axis_order": ("CLL", "LLC")}
    content = Layout.content

    fields: Fields
    length: int | Sequence[int]
    formulae: str | Sequence[str] = _DEFAULT
    fill: Constants = 0.0
    _: KW_ONLY
    axis_order: str = "CLL"
    dtype: Any = "float32"
    sort_by: SortBy = None

    def __post_init__(self) -> None:
        if isinstance(self.formulae, str):
            declare(self, formulae=[self.formulae])
        FieldsLayout.__post_init__(self, length="lengths")
        one_for_each("fill", self, self.width)
        cases = {
            "expected at least one formula, got none": not self.formulae,
            f"formulae give real numbers, not {self.dtype.name}": self.dtype.kind in "iub",
        }
        refuse("Pairwise", cases)
        with np.errstate(all="ignore"):
            self._computed(np.ones((len(self.features), 1, 1)))

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.formulae)

    def write(self, out: Tensor, bound: Bound, batch: Batch) -> None:
        by_channel = np.moveaxis(self.by_element(out), -1, 1)
        by_channel[:] = np.asarray(self.fill).astype(out.dtype)[:, np.newaxis, np.newaxis]
        longest = by_channel.shape[2]
        for here, elements in bound.columns.blocks(batch.rows, 64 * longest, longest):
            counts = np.minimum(elements.counts, longest)
            fields = np.empty((len(self.features), len(counts), int(counts.max(initial=0))))
            values = elements.values(fields.dtype)
            zeros = np.zeros((len(counts), len(fields)))
            pad(fields.transpose(1, 0, 2), values, elements.starts, counts, zeros)
            present = bound.columns.present(elements.rows, fields.shape[2])
            valid = present[:, :, np.newaxis] & present[:, np.newaxis]
            with np.errstate(all="ignore"):
                for channel, numbers in enumerate(self._computed(fields)):
                    target = by_channel[here, channel, : valid.shape[1], : valid.shape[2]]
                    np.copyto(target, numbers, where=valid, casting="unsafe")
                    wrong = ~np.isfinite(target) & valid
                    what = f"formula {self.formulae[channel]!r} is NaN, or larger than"
                    elements.refuse(
                        np.repeat(wrong.any(axis=(1, 2)), elements.counts),
                        f"{what} {self.dtype.name} can hold, for a pair of elements in event "
                        "{event}; limit its argument, such as log(max(…, eps)), or correct the "
                        "input",
                        values[0],
                    )

    def _computed(self, fields: Tensor) -> list[Any]:
        """Return ``[n, L, L]`` of each formula, of ``[F, n, L]``.

        Formulae call a field by the last part of its path.
        """
        names = [feature.last for feature in self.features]
        if len(set(names)) < len(names):
            raise ConfigError(f"Pairwise: the last parts of the fields' names differ, got {names}")
        known: dict[str, Any] = {"eps": 1e-8}
        for name, numbers in _quantities(dict(zip(names, fields, strict=True))).items():
            known[f"{name}_i"] = numbers[:, :, np.newaxis]
            known[f"{name}_j"] = numbers[:, np.newaxis]
        return [_evaluated(formula, known, formula) for formula in self.formulae]


def _evaluated(text: str, known: dict[str, Any], formula: str) -> Any:
    """Return what an expression gives of the quantities that it names, computed at first use."""
    terms, compute = expression_of(text, "formula")
    for path, _ in terms:
        name = text_of(path)
        if name in _PAIR and "rapidity_i" not in known:
            raise ConfigError(
                f"formula {formula!r}: {name} needs the fields of a four-vector, "
                f"{' or '.join(map(str, _FOUR_VECTORS))}"
            )
        require([name], [*known, *_PAIR], f"formula {formula!r}: no")
        if name not in known:
            known[name] = _evaluated(_PAIR[name], known, formula)
    return compute({term: known[text_of(term[0])] for term in terms})


def _quantities(fields: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return fields by their names, and what follows from them if they are a four-vector.

    What precedes an underscore in a name does not matter, but all components share it.
    """
    prefixed: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, numbers in fields.items():
        prefix, _, end = name.lower().rpartition("_")
        prefixed[prefix].setdefault(_ALIASES.get(end, end), numbers)
    whole = [
        each for each in prefixed.items() if any(each[1].keys() >= {*v} for v in _FOUR_VECTORS)
    ]
    if not whole:
        return dict(fields)
    prefix, known = whole[0]
    alike = [name for name in fields if name.lower().rpartition("_")[0] == prefix]
    others = prefix and _ELEMENT.keys() & fields.keys()
    if len(whole) > 1 or len(alike) > len(known) or others:
        raise ConfigError(
            "Pairwise: expected the components of one four-vector, once, with one text before the "
            f"underscore, got {', '.join(fields)}"
        )
    known |= fields
    for name, text in _ELEMENT.items():
        terms, _ = expression_of(text, "formula")
        if name not in known and all(text_of(path) in known for path, _ in terms):
            known[name] = _evaluated(text, known, text)
    return known
