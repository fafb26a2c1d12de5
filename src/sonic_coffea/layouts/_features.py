"""The channels of a tensor: fields or expressions, and the transformation of their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.layouts._expressions import (
    FUNCTIONS,
    Path,
    Term,
    expression_of,
    path_of,
    picks_of,
    text_of,
)

if TYPE_CHECKING:
    from sonic_coffea.layouts._structure import Tensor

_MOST = int(np.finfo(np.float64).max)
_SIMPLE: dict[str, tuple[Any, str]] = {
    "str": (str, "a string"),
    "str | None": ((str, type(None)), "a string"),
    "bool": (bool, "True or False"),
}
ONE_ARGUMENT = tuple(name for name, (_, least, _) in FUNCTIONS.items() if least == 1)


def equals(self: Any, other: object) -> bool:
    """Return whether two declarations have the same text, also with NaN in it."""
    return self is other or (type(self) is type(other) and repr(self) == repr(other))


def hashed(self: Any) -> int:
    """Return the hash of a declaration's text."""
    return hash(repr(self))


def declare(self: Any, **values: Any) -> None:
    """Set attributes of a frozen declaration."""
    for name, value in values.items():
        object.__setattr__(self, name, value)


def own_types(self: Any, what: str = "") -> None:
    """Check the options of a declaration whose types are simple, as its annotations say.

    Numbers, strings and bools of numpy become Python's own, whose text differs.
    """
    for each in fields(self):
        if each.init:
            value, kind = getattr(self, each.name), str(each.type)
            value = value.item() if isinstance(value, np.generic) else value
            expected = f"{what or type(self).__name__}: expected {each.name} to be"
            if kind.startswith("float") and not (value is None and "None" in kind):
                value = _number(value, f"{expected} a number")
            types, words = _SIMPLE.get(kind, (object, ""))
            if not isinstance(value, types):
                raise ConfigError(f"{expected} {words}, got {value!r}")
            declare(self, **{each.name: value})


def one_of(choices: Sequence[str], value: Any, what: str) -> None:
    """Refuse an option that is none of its choices."""
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        raise ConfigError(f"{what} to be {', '.join(others)} or {last}, got {value!r}")


def refuse(what: str, *cases: tuple[Any, str]) -> None:
    """Raise the message of the first case that holds, if one does."""
    for holds, message in cases:
        if holds:
            raise ConfigError(f"{what}: {message}")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Feature:
    """One channel: a field, an expression or a reference, transformed.

    ``clip((function(clip(value, *within)) - shift) * scale, lower, upper)``; without `within` and
    `function`, this is the rule of weaver and of the CMS software, whose ``median`` is `shift` and
    whose ``norm_factor`` is `scale`. It is computed in the precision that numpy would use for the
    field's own type (float32 for float32), then cast to the tensor's.

    Parameters
    ----------
    name : str or tuple
        A field or behaviour property, with dots where it is nested: ``"pf.pt"``. ``"Jet[0].pt"`` is
        the pt of the first object in the row's list. A tuple is a path whose names may hold dots:
        ``("Jet", "Jet.PT")``.
    shift, scale : float
        `shift` is subtracted, then `scale` multiplies.
    lower, upper : float, optional
        Clip limits, applied last.
    nonfinite : float, optional
        Replacement for NaN and ±inf, before the shift; NaN lets NaN pass. By default, they raise
        an `InputError`.
    function : str, optional
        Applied before the shift: log, log1p, log10, sqrt, abs, exp, sin, cos, tanh, arctan, or
        another function of one argument that expressions have; also sign_log, which is
        ``sign(value) * log(1 + |value|)``.
    power : float, optional
        Computes ``value ** power`` in place of a function.
    within : (float or None, float or None), optional
        Clip limits, applied first: ``within=(1e-3, None)`` before a logarithm.
    categories : mapping of number to number, optional
        Replacement for each value, before everything else: ``{-1: 0, 1: 1}``. Other values take
        the replacement of the key None, or raise an `InputError` if there is no such key.
    expression : str, optional
        An expression of fields, numbers, operators, comparisons and functions, such as
        ``"log(pf.pt / pt)"``, ``"num(Jet)"`` or ``"mass(Jet[0], Jet[1])"``. It takes the place of
        the field `name`, which then only names the channel. Integers are int64 in it, and numbers
        of outer objects are repeated.
    index : str, optional
        A field of indices into the list that holds `name`, in the same event:
        ``Feature("Muon.pt", index="Jet.muonIdx1")``. A negative index refers to no object. Indices
        count within the event, unlike coffea's indices of a whole file (``…IdxG``). An index of
        the file counts in the file's own lists: NanoEvents know them, so that their muons may be
        sorted or cut, and an index to one that was cut refers to no object. Any other index counts
        in the lists as they are.
    replace : mapping of number to number, optional
        Replacement for some values, before everything else: ``{-1: 999}``. Others stay.
    nonfinite_last : bool
        Whether NaN and ±inf are replaced after the limits, so that ±inf becomes a limit: the order
        of weaver's own training.

    Attributes
    ----------
    plain : bool
        Whether the numbers pass unchanged.

    Examples
    --------
    >>> Feature("pf.pt", function="log", shift=1.7, scale=0.7, upper=5)
    Feature('pf.pt', shift=1.7, scale=0.7, upper=5.0, function='log')
    >>> Feature("charge", categories={-1: 0, 0: 1, 1: 2}).categories
    ((-1, 0), (0, 1), (1, 2))
    """

    name: Any
    shift: float = 0.0
    scale: float = 1.0
    lower: float | None = None
    upper: float | None = None
    nonfinite: float | None = None
    function: str | None = None
    power: float | None = None
    within: Any = None
    categories: Any = None
    expression: str | None = None
    index: str | None = None
    replace: Any = None
    nonfinite_last: bool = False
    plain: bool = field(init=False, default=True)

    __eq__, __hash__ = equals, hashed

    def __post_init__(self) -> None:
        if not isinstance(self.name, (str, tuple)) or not self.name:
            raise ConfigError(f"a feature is named by a string such as 'pf.pt', got {self.name!r}")
        what = f"feature {self.text!r}"
        own_types(self, what)
        for name in ("categories", "replace"):
            if getattr(self, name) is not None:
                declare(self, **{name: _pairs(getattr(self, name), what, name)})
        if self.within is not None:
            declare(self, within=_limits(self.within, what))
        lower, upper = self.lower, self.upper
        refuse(
            what,
            (
                lower is not None and upper is not None and lower > upper,
                f"lower ({lower}) is above upper ({upper})",
            ),
            (self.function and self.power is not None, "expected function= or power=, got both"),
            (self.expression and self.index, "expected expression= or index=, got both"),
        )
        if self.function is not None and self.function not in ONE_ARGUMENT:
            nearby = nearest(self.function, ONE_ARGUMENT)
            raise ConfigError(f"{what}: no function {self.function!r}; {nearby}")
        for path in self.paths:
            path_of(path)
        declare(self, plain=not set(self.options) - {"expression", "index"})

    @property
    def terms(self) -> tuple[Term, ...]:
        """The fields that lie as the rows do, or their elements."""
        if self.expression is not None:
            return expression_of(self.expression)[0]
        return ((path_of(self.index or self.name), ""),)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All fields that are read."""
        refers = (path_of(self.name),) if self.index else ()
        return (*(path for path, how in self.terms if how != "metadata"), *refers)

    @property
    def options(self) -> dict[str, Any]:
        """What is declared beside the name."""
        values = ((f, getattr(self, f.name)) for f in fields(self)[1:] if f.init)
        return {f.name: value for f, value in values if repr(value) != repr(f.default)}

    @property
    def only(self) -> float | None:
        """The value for which it is 1, if it is 0 for all others."""
        pairs: Any = self.categories or ()
        if len(pairs) == 2 and pairs[0][1] == 1 and pairs[1] == (None, 0):
            value: float | None = pairs[0][0]
            return value
        return None

    @property
    def text(self) -> str:
        """The name, as messages have it."""
        return text_of(self.name)

    @property
    def channel(self) -> str:
        """The name of the channel where a tensor is unpacked."""
        return self.text if self.only is None else f"{self.text}={self.only}"

    def __repr__(self) -> str:
        changed = [
            f"{name}={dict(value) if name in ('categories', 'replace') else value!r}"
            for name, value in self.options.items()
        ]
        return f"Feature({', '.join([repr(self.name), *changed])})"

    def mapped(self, raw: Tensor) -> Tensor:
        """Return numbers with their categories or replacements; NaN stays, or is unknown."""
        if self.replace:
            raw = _replaced(raw, self.replace, raw)
        if not self.categories:
            return raw
        default = dict(self.categories).get(None, math.nan)
        result = _replaced(raw, [p for p in self.categories if p[0] is not None], default)
        if raw.dtype.kind == "f":
            result[np.isnan(raw)] = math.nan
        return result

    def computed(self, raw: Tensor, out: Tensor) -> Tensor:
        """Return ``function(clip(value, *within))``, in `out` if that changes the numbers."""
        values = self.mapped(raw)
        if self.within is not None:
            values = _clipped(values, self.within[0], self.within[1], out)
        if (self.power, self.function) != (None, None) and values.dtype != out.dtype:
            np.copyto(out, values)  # integers have no absolute value of their least number
            values = out
        if self.power is not None:
            values = np.power(values, out.dtype.type(self.power), out=out)
        elif self.function is not None:
            function = FUNCTIONS[self.function][0]
            if isinstance(function, np.ufunc):
                values = function(values, out=out, casting="unsafe")
            else:
                out[:] = function(values)
                values = out
        return values

    def standardised(self, values: Tensor, out: Tensor) -> Tensor:
        """Return ``clip((value - shift) * scale, lower, upper)``, in `out` if that changes them."""
        if not self.nonfinite_last:
            values = self._finite(values, out)
        if self.shift != 0.0:
            values = np.subtract(values, out.dtype.type(self.shift), out=out)
        if self.scale != 1.0:
            values = np.multiply(values, out.dtype.type(self.scale), out=out)
        values = _clipped(values, self.lower, self.upper, out)
        return self._finite(values, out) if self.nonfinite_last else values

    def transformed(self, raw: Tensor) -> Tensor:
        """Return numbers as they are sent, in new memory."""
        out = np.empty(len(raw), np.result_type(raw.dtype, np.float32))
        return self.standardised(self.computed(raw, out), out)

    def _finite(self, values: Tensor, out: Tensor) -> Tensor:
        """Return numbers with those that are not finite replaced."""
        if self.nonfinite is None or all_finite(values):
            return values
        return np.where(np.isfinite(values), values, out.dtype.type(self.nonfinite))


def all_finite(values: Tensor) -> bool:
    """Return whether numbers are finite."""
    return values.dtype.kind in "iub" or bool(np.isfinite(values).all())


def _clipped(values: Tensor, lower: float | None, upper: float | None, out: Tensor) -> Tensor:
    if lower is None and upper is None:
        return values
    limits = (None if limit is None else out.dtype.type(limit) for limit in (lower, upper))
    clipped: Tensor = np.clip(values, *limits, out=out)
    return clipped


def _replaced(raw: Tensor, pairs: Iterable[tuple[Any, Any]], default: Any) -> Tensor:
    """Return what replaces each number, or the default for the others."""
    real = np.result_type(raw.dtype, np.float32)
    result = np.empty(len(raw), real)
    result[:] = default
    for key, value in pairs:
        result[raw == key] = value
    return result


def one_after_the_other(values: Any, expected: str) -> list[Any]:
    """Return several values of a declaration in their order, refusing what has none.

    Raises
    ------
    ConfigError
        With what was expected, if it is anything else.
    """
    if isinstance(values, (str, bytes, AbstractSet, Mapping)) or not isinstance(values, Iterable):
        raise ConfigError(f"{expected}, got {values!r}")
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise ConfigError(f"{expected}, got an array of shape {list(values.shape)}")
    return list(values)


def texts_of(values: Any, expected: str) -> tuple[str, ...]:
    """Return several strings of a declaration, refusing anything else."""
    texts = one_after_the_other(values, expected)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{expected}, got {values!r}")
    return tuple(map(str, texts))


def number_of(value: Any, expected: str) -> float:
    """Return a number of a declaration, as one of Python's own.

    Raises
    ------
    ConfigError
        With what was expected, if it is anything else.
    """
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, (int, float)) or (isinstance(number, int) and abs(number) > _MOST):
        raise ConfigError(f"{expected}, got {value!r}")
    return number


def _number(value: Any, expected: str) -> float:
    number = number_of(value, expected)
    # One NaN, so that text and equality are those of the declaration.
    return math.nan if math.isnan(number) else float(number)


def _whole(value: Any) -> float:
    return int(value) if float(value).is_integer() else float(value)


def _pairs(pairs: Any, what: str, name: str) -> tuple[tuple[float | None, float], ...]:
    expected = f"{what}: expected {name}={{value: number}}"
    try:
        items = list(dict(pairs).items())
    except (TypeError, ValueError):
        items = []
    keys = [key for key, _ in items if key is not None]
    if not keys or (name == "replace" and len(keys) < len(items)):
        raise ConfigError(f"{expected}, got {pairs!r}")
    numbers = [
        (k if k is None else number_of(k, expected), number_of(v, expected)) for k, v in items
    ]
    return tuple((k if k is None else _whole(k), _whole(v)) for k, v in numbers)


def _limits(within: Any, what: str) -> tuple[float | None, float | None]:
    if not isinstance(within, Sequence) or isinstance(within, str) or len(within) != 2:
        raise ConfigError(f"{what}: expected within=(least, most), got {within!r}")
    least, most = (
        None if x is None else _number(x, f"{what}: expected each limit of within to be a number")
        for x in within
    )
    if least is not None and most is not None and least > most:
        raise ConfigError(f"{what}: within=({least}, {most}) has its limits the wrong way round")
    return least, most


def OneHot(name: Any, values: Iterable[float]) -> tuple[Feature, ...]:  # noqa: N802
    """Return one channel for each of some values of a field: 1 where it has the value, else 0.

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
    what = f"OneHot({name!r}): expected"
    if not isinstance(name, (str, tuple)) or not name:
        raise ConfigError(f"{what} the name of a field")
    given = one_after_the_other(values, f"{what} a list of values")
    each = tuple(number_of(value, f"{what} numbers as values") for value in given)
    if not each or len(set(each)) != len(each):
        raise ConfigError(f"{what} different values, got {each}")
    field = str(name) if isinstance(name, str) else name
    return tuple(Feature(field, categories={value: 1, None: 0}) for value in each)


def Metadata(name: Any, **options: Any) -> Feature:  # noqa: N802
    """Return a channel with a number of the events' metadata, such as the year of the dataset.

    Parameters
    ----------
    name : str
        The key in ``events.metadata``. Its value is a number, a bool, or a string of a number.
    **options
        Other arguments of `Feature`, such as ``categories``.

    Examples
    --------
    >>> import awkward as ak
    >>> import sonic_coffea as sonic
    >>> events = ak.with_parameter(ak.Array([{"pt": 50.0}]), "metadata", {"year": "2018"})
    >>> sonic.Row(["pt", sonic.Metadata("year", shift=2016)]).pack(events).tolist()
    [[50.0, 2.0]]
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"Metadata: expected the name of a key, got {name!r}")
    return Feature(name, expression=f"metadata({name})", **options)


def as_features(named: Any, layout: str) -> tuple[Feature, ...]:
    """Return the channels of a layout as features; anything else is an error."""
    if isinstance(named, (str, Feature)) or not isinstance(named, Iterable):
        named = [named]
    named = one_after_the_other(named, f"{layout}: expected a list of fields")
    features = [feature for field in named for feature in _channels(field, layout)]
    if not features:
        raise ConfigError(f"{layout} needs at least one field, got none")
    if not any(feature.terms for feature in features):
        raise ConfigError(f"{layout} needs a field beside constants, which says how many rows")
    return tuple(features)


def _channels(field: Any, layout: str) -> Sequence[Feature]:
    if isinstance(field, Feature):
        return [field]
    if isinstance(field, str):
        return [Feature(name) for name in picks_of(field)]
    if isinstance(field, (list, tuple)) and all(isinstance(one, Feature) for one in field):
        return field
    if isinstance(field, tuple):
        return [Feature(field)]
    if isinstance(field, (int, float, np.number)) and np.isfinite(field):
        return [Feature(repr(float(field)), expression=repr(float(field)))]
    raise ConfigError(f"{layout}: expected field names, numbers or sonic.Feature, got {field!r}")


def key_of(sort_by: Any, layout: str) -> Feature | None:
    """Return what elements are sorted by: a field, or what an expression gives."""
    if sort_by is None or isinstance(sort_by, Feature):
        return sort_by
    if not isinstance(sort_by, (str, tuple)) or not sort_by:
        raise ConfigError(
            f"{layout}: expected sort_by to be a field or an expression, got {sort_by!r}"
        )
    is_path = isinstance(sort_by, tuple) or re.fullmatch(r"[\w.]+(\[-?\d+\][\w.]*)*", sort_by)
    return Feature(sort_by, expression=None if is_path else str(sort_by))
