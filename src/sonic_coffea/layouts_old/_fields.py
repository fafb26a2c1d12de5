"""The fields that a layout reads, and the transformations of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np

from sonic_coffea.errors import ConfigError, FieldError, nearest
from sonic_coffea.layouts_old._expressions import expression_of
from sonic_coffea.layouts_old._paths import path_of, picks_of

if TYPE_CHECKING:
    from awkward.contents import Content

    from sonic_coffea.layouts_old._rows import Int64, Split, Tensor

_NAMES = "log log1p sqrt abs exp tanh sin cos log10 arctan sinh cosh arcsinh"
FUNCTIONS: dict[str, Callable[[Any], Any]] = {name: getattr(np, name) for name in _NAMES.split()}
FUNCTIONS["sign_log"] = lambda x: np.sign(x) * np.log1p(np.abs(x))
"""Element-wise functions that a feature may name. Kernels know each by its place here."""


_UNCHANGED = (None,) * 5


@dataclass(frozen=True, slots=True, repr=False)
class Feature:
    """One field, transformed.

    ``clip((function(clip(value, *within)) - shift) * scale, lower, upper)``; without `within` and
    `function`, this is the rule of weaver and of the CMS software, whose ``median`` is `shift` and
    whose ``norm_factor`` is `scale`. It is computed in the precision that numpy would use for the
    field's own type (float32 for float32), then cast to the tensor's.

    Parameters
    ----------
    name : str
        A field or behaviour property, with dots where it is nested: ``"pf.pt"``. ``"Jet[0].pt"`` is
        the pt of the first object in the row's list.
    shift, scale : float
        `shift` is subtracted, then `scale` multiplies.
    lower, upper : float, optional
        Clip limits, applied last.
    nonfinite : float, optional
        Replacement for NaN and ±inf, before the shift; NaN lets NaN pass. By default, they raise
        an `InputError`.
    function : str, optional
        Applied before the shift: one of log, log1p, log10, sqrt, abs, exp, sin, cos, tanh, arctan,
        sinh, cosh, arcsinh, or sign_log, which is ``sign(value) * log(1 + |value|)``.
    power : float, optional
        Computes ``value ** power`` in place of a function.
    within : (float or None, float or None), optional
        Clip limits, applied first: ``within=(1e-3, None)`` before a logarithm.
    categories : mapping of number to number, optional
        Replacement for each value, before everything else: ``{-1: 0, 1: 1}``. Other values take
        the replacement of the key None, or raise an `InputError` if there is no such key.
    expression : str, optional
        An expression of fields, numbers, operators, comparisons and functions, such as
        ``"log(pf.pt / pt)"``. It takes the place of the field `name`, which then only names the
        channel. Integers are int64 in it, and numbers of outer objects are repeated.
    index : str, optional
        A field of indices into the list that holds `name`, in the same event:
        ``Feature("Muon.pt", index="Jet.muonIdx1")``. A negative index refers to no object. Indices
        count within the event, unlike coffea's indices of a whole file (``…IdxG``).

    Attributes
    ----------
    plain : bool
        Whether the numbers pass unchanged.

    Examples
    --------
    >>> Feature("pf.pt", function="log", shift=1.7, scale=0.7, upper=5.0)
    Feature('pf.pt', shift=1.7, scale=0.7, upper=5.0, function='log')
    >>> Feature("charge", categories={-1: 0, 0: 1, 1: 2}).categories
    ((-1, 0), (0, 1), (1, 2))
    """

    name: str
    shift: float = 0.0
    scale: float = 1.0
    lower: float | None = None
    upper: float | None = None
    nonfinite: float | None = None
    function: str | None = None
    power: float | None = None
    within: tuple[float | None, float | None] | None = None
    categories: tuple[tuple[float | None, float], ...] | Mapping[Any, float] | None = None
    expression: str | None = None
    index: str | None = None
    plain: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        what = f"feature {self.name!r}"
        if not self.name:
            raise ConfigError("a feature is named by a string such as 'pf.pt', got an empty one")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ConfigError(f"{what}: lower ({self.lower}) is above upper ({self.upper})")
        if self.function is not None and self.function not in FUNCTIONS:
            raise ConfigError(
                f"{what}: no function {self.function!r}; {nearest(self.function, FUNCTIONS)}"
            )
        if self.power is not None and self.function is not None:
            raise ConfigError(f"{what}: expected function= or power=, got both")
        if self.within is not None:
            object.__setattr__(self, "within", _limits(self.within, what))
        if self.categories is not None:
            object.__setattr__(self, "categories", _pairs(self.categories, what))
        if self.expression is not None and self.index is not None:
            raise ConfigError(f"{what}: expected expression= or index=, got both")
        for path in (*self.paths, *((self.name,) if self.index else ())):
            path_of(path)
        clipped = self.lower is not None or self.upper is not None
        plain = self.shift == 0.0 and self.scale == 1.0 and not clipped and not self.computed
        object.__setattr__(self, "plain", plain)

    @property
    def paths(self) -> tuple[str, ...]:
        """The fields that lie as the rows do, or their elements."""
        if self.expression is not None:
            return expression_of(self.expression).paths
        return (self.index or self.name,)

    @property
    def computed(self) -> bool:
        """Whether more than the shift, the scale and the limits changes the numbers."""
        changed = self.nonfinite, self.function, self.power, self.within, self.categories
        return changed != _UNCHANGED

    def apply(self, values: Tensor) -> Tensor:
        """Transform numbers, without the replacement of NaN and ±inf."""
        with np.errstate(all="ignore"):
            if self.categories is not None:
                known = {k: v for k, v in self.pairs if k is not None}
                other = dict(self.pairs).get(None, np.nan)
                stands = [v if np.isnan(v) else known.get(v, other) for v in values.tolist()]
                values = np.asarray(stands, values.dtype)
            if self.within is not None:
                values = np.clip(values, *map(values.dtype.type, limits(self.within)))
            if self.power is not None:
                values = values ** values.dtype.type(self.power)
            elif self.function is not None:
                values = FUNCTIONS[self.function](values)
        return values

    @property
    def pairs(self) -> tuple[tuple[float | None, float], ...]:
        """The categories, each with what stands for it."""
        return tuple(self.categories or ())

    @property
    def only(self) -> float | None:
        """The value for which it is 1, if it is 0 for all others."""
        if len(self.pairs) == 2 and self.pairs[0][1] == 1 and self.pairs[1] == (None, 0):
            return self.pairs[0][0]
        return None

    @property
    def channel(self) -> str:
        """What the channel is called where a tensor is unpacked."""
        return self.name if self.only is None else f"{self.name}={self.only}"

    def __repr__(self) -> str:
        changed = [
            f"{f.name}={dict(self.pairs) if f.name == 'categories' else getattr(self, f.name)!r}"
            for f in fields(self)[1:]
            if f.init and getattr(self, f.name) != f.default
        ]
        return f"Feature({', '.join([repr(self.name), *changed])})"


def limits(pair: tuple[float | None, float | None]) -> tuple[float, float]:
    """Return two limits as numbers; None is infinite."""
    return -np.inf if pair[0] is None else pair[0], np.inf if pair[1] is None else pair[1]


def _pairs(categories: Any, what: str) -> tuple[tuple[float | None, float], ...]:
    pairs = categories.items() if isinstance(categories, Mapping) else categories
    pairs = tuple((key, value) for key, value in pairs)
    keys = [key for key, _ in pairs if key is not None]
    numbers = [*keys, *(value for _, value in pairs)]
    if not keys or not all(isinstance(n, (int, float, np.number)) for n in numbers):
        raise ConfigError(f"{what}: expected categories={{value: number}}, got {dict(pairs)!r}")
    return pairs


def _limits(within: Any, what: str) -> tuple[float | None, float | None]:
    if not isinstance(within, Sequence) or len(within) != 2:
        raise ConfigError(f"{what}: expected within=(least, most), got {within!r}")
    least, most = within
    if least is not None and most is not None and least > most:
        raise ConfigError(f"{what}: within=({least}, {most}) has its limits the wrong way round")
    return least, most


@dataclass(frozen=True, slots=True)
class OneHot:
    """One channel for each of some values of a field: 1 where the field has the value, else 0.

    All channels are 0 for any other value.

    Parameters
    ----------
    name : str
        The field.
    values : sequence of number
        The values, one for each channel.

    Examples
    --------
    >>> import awkward as ak
    >>> import sonic_coffea as sonic
    >>> leptons = ak.Array([{"charge": -1}, {"charge": 1}])
    >>> sonic.Row([sonic.OneHot("charge", [-1, 1])]).pack(leptons).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        values = tuple(self.values)
        if not values or len(set(values)) != len(values):
            raise ConfigError(f"OneHot({self.name!r}): expected different values, got {values}")
        object.__setattr__(self, "values", values)

    @property
    def features(self) -> tuple[Feature, ...]:
        """The channels."""
        return tuple(Feature(self.name, categories={v: 1, None: 0}) for v in self.values)


@dataclass(slots=True, eq=False)  # making a frozen one takes twice as long
class Column:
    """The numbers of one field: ``values``, read through ``index`` if there is one.

    With `gaps`, the index is -1 where a number is missing. It has a place for each element of the
    rows; or, `by_row`, for each row, all of whose elements have the same number. Or each row has
    the number of one object of a list, the `pick`.
    """

    feature: Feature
    values: Tensor
    index: Int64 | None
    gaps: bool = False
    by_row: bool = False
    pick: tuple[Split, int] | None = None

    def where(self, elements: Int64, rows: Int64) -> Int64:
        """Return where the numbers of some elements of some rows lie."""
        if self.pick is not None:
            lists, place = self.pick
            at = lists.starts[rows] + place
            picked: Int64 = np.where(at < lists.stops[rows], at, -1)
            return picked
        if self.index is None:
            return elements
        places: Int64 = self.index[rows if self.by_row else elements]
        return places


def as_features(named: Any, layout: str) -> tuple[Feature, ...]:
    """Return the channels of a layout as features; anything else is an error."""
    if isinstance(named, (str, Feature, OneHot)) or not isinstance(named, Iterable):
        named = [named]
    features = [feature for field in named for feature in _channels(field, layout)]
    if not features:
        raise ConfigError(f"{layout} needs at least one field, got none")
    if not any(feature.paths for feature in features):
        raise ConfigError(f"{layout} needs a field beside constants, which says how many rows")
    return tuple(features)


def _channels(field: Any, layout: str) -> Sequence[Feature]:
    if isinstance(field, Feature):
        return [field]
    if isinstance(field, str):
        return [Feature(name) for name in picks_of(field)]
    if isinstance(field, OneHot):
        return field.features
    if isinstance(field, (int, float, np.number)) and np.isfinite(field):
        return [Feature(str(field), expression=repr(float(field)))]
    raise ConfigError(f"{layout}: expected field names, numbers or sonic.Feature, got {field!r}")


class Source:
    """Records, or a dict of arrays, of a call; what fields have in common is looked up once."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._collections: dict[str, Content] = {}

    def collection(self, path: str) -> tuple[Content | None, str]:
        """Return the records that hold the field at a dotted path, and the field's name in them.

        None if the field is an array of its own in a dict.
        """
        prefix, _, name = path.rpartition(".")
        if not prefix and isinstance(self._array, dict):
            return None, name
        if prefix not in self._collections:
            whole = self.column(prefix) if prefix else _layout(self._array)
            self._collections[prefix] = whole
        return self._collections[prefix], name

    def names(self, path: str = "") -> list[str]:
        """Return the fields of the records at a path, or of all there is."""
        if not path and isinstance(self._array, dict):
            return list(self._array)
        return list(self.column(path).fields if path else _layout(self._array).fields)

    def column(self, path: str) -> Content:
        """Return the column at a dotted path; nothing is read yet.

        Raises
        ------
        FieldError
            Naming the nearest fields that there are.
        """
        parts = path.split(".")
        array = self._array
        if isinstance(array, dict):
            if parts[0] not in array:
                raise _missing(parts[0], path, list(array))
            array, parts = array[parts[0]], parts[1:]
        layout = _layout(array)
        for part in parts:
            known = part in layout.fields
            layout = layout[part] if known else _property(layout, array, part, path)
        return layout


def _layout(array: Any) -> Content:
    # What awkward does for everything else costs more than the rest of a small input.
    return array.layout if isinstance(array, ak.Array) else ak.to_layout(array)


def _property(layout: Content, array: Any, name: str, path: str) -> Content:
    """Read a property that a behaviour defines, such as a vector's ``pt`` or a cross-reference."""
    behaviour: Mapping[Any, Any] | None = getattr(array, "behavior", None)
    wrapped = ak.Array(layout, behavior=behaviour, attrs=getattr(array, "attrs", None))
    if name.startswith("_") or not hasattr(type(wrapped), name):
        raise _missing(name, path, layout.fields)
    value = getattr(wrapped, name)
    if callable(value) or not isinstance(value, ak.Array):
        raise _missing(name, path, layout.fields)
    return ak.to_layout(value)


def _missing(name: str, path: str, known: list[str]) -> FieldError:
    inside = f" (in {path!r})" if name != path else ""
    if not known:
        return FieldError(
            f"no field {name!r}{inside}, as the array has none; give records, or a dict of columns "
            f"such as {{{name!r}: array}}"
        )
    return FieldError(f"no field {name!r}{inside}; {nearest(name, known)}")
