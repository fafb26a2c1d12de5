"""The channels of a tensor: fields or expressions, and the transformation of their numbers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from sonic_coffea._files import read_json
from sonic_coffea.errors import ConfigError, require
from sonic_coffea.layouts._expressions import (
    FUNCTIONS,
    Path,
    Term,
    column_of,
    expression_of,
    path_of,
    picks_of,
    text_of,
)
from sonic_coffea.layouts._options import check_options, checked, declare, equals, hashed, refuse
from sonic_coffea.layouts._structure import Tensor, real_of

Name = str | tuple[str | int, ...]
"""A field: its path with dots, or a tuple of names that may hold dots."""


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
        the replacement of the key None, or raise an `InputError` if there is no such key; NaN and
        ±inf are left to `nonfinite`.
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
        in the lists as they are. Beside ATLAS's ``m_persIndex``, the ``m_persKey`` is read, and
        beside EDM4hep's ``…index``, the ``…collectionID`` if there is one: with 0, a link leads
        nowhere, and links to several collections are refused.
    replace : mapping of number to number, optional
        Replacement for some values, before everything else: ``{-1: 999}``. Others stay.
    nonfinite_last : bool
        Whether NaN and ±inf are replaced after the limits, so that ±inf becomes a limit: the order
        of weaver's own training.

    Attributes
    ----------
    term : Term
        What the field's numbers are known by, or those that an index refers to.
    terms : tuple of Term
        The fields that lie as the rows do, or their elements.
    plain : bool
        Whether the numbers pass unchanged.
    constants : tuple of float
        The shift, the scale, the limits and `nonfinite`.
    moves : tuple of bool
        Whether there are a shift, a scale or limits; limits; and limits that make all numbers
        finite.
    exact : bool
        Whether integers remain integers.
    kind : tuple
        What is declared, but for constants: numbers of one kind and one type are transformed
        together.

    Examples
    --------
    >>> Feature("pf.pt", function="log", shift=1.7, scale=0.7, upper=5)
    Feature('pf.pt', shift=1.7, scale=0.7, upper=5.0, function='log')
    >>> Feature("charge", categories={-1: 0, 0: 1, 1: 2}).categories
    ((-1, 0), (0, 1), (1, 2))
    """

    name: Name
    shift: float = 0.0
    scale: float = 1.0
    lower: float | None = None
    upper: float | None = None
    nonfinite: float | None = None
    function: str | None = None
    power: float | None = None
    within: tuple[float | None, float | None] | None = None
    categories: Any = None
    expression: str | None = None
    index: str | None = None
    replace: Any = None
    nonfinite_last: bool = False
    term: Term = field(init=False, default=((), ""))
    terms: tuple[Term, ...] = field(init=False, default=())
    plain: bool = field(init=False, default=True)
    constants: tuple[float, ...] = field(init=False, default=())
    moves: tuple[bool, ...] = field(init=False, default=())
    exact: bool = field(init=False, default=True)
    kind: tuple[Any, ...] = field(init=False, default=())

    __eq__, __hash__ = equals, hashed

    def __post_init__(self) -> None:
        what = f"feature {self.name!r}"
        check_options(self, what, shift="finite", scale="finite", power="finite")
        checked("within", (self.lower, self.upper), f"{what}: expected lower and upper to be")
        cases = {
            "expected function= or power=, got both": self.function and self.power is not None,
            "expected expression= or index=, got both": self.expression and self.index,
            "replace= has numbers, and no None": None in dict(self.replace or ()),
            "nonfinite_last= needs nonfinite=": self.nonfinite_last and self.nonfinite is None,
        }
        refuse(what, cases)
        if self.expression is None:
            terms: tuple[Term, ...] = ((path_of(self.index or self.name), ""),)
            # In brackets, as a field may have the name of a reduction.
            declare(self, term=(path_of(self.name), f"[{self.index}]" if self.index else ""))
        else:  # which may be the name, too
            terms = expression_of(self.expression)[0]
        declare(self, terms=terms, plain=not set(self.options) - {"expression", "index"})
        limits = _limits(self.lower, self.upper)
        is_limited, is_moved = limits != _limits(None, None), (self.shift, self.scale) != (0.0, 1.0)
        bounds = self.scale != 0.0 and all(map(math.isfinite, limits)) and not self.nonfinite_last
        moves = is_moved or is_limited, is_limited, bounds
        before = self.function, self.power, self.within, self.categories
        exact = not moves[0] and before == (None, None, None, None)
        how = self.nonfinite is None, self.nonfinite_last, self.categories, self.replace
        constants = self.shift, self.scale, *limits, self.nonfinite or 0.0
        kind = self.plain, exact, moves, *how
        declare(self, constants=constants, moves=moves, exact=exact, kind=kind)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All fields that are read."""
        refers = (path_of(self.name),) if self.index else ()
        return (*(path for path, how in self.terms if how != "metadata"), *refers)

    @property
    def metadata(self) -> tuple[str, ...]:
        """The names of the events' metadata that are read."""
        return tuple(text_of(path) for path, how in self.terms if how == "metadata")

    @property
    def options(self) -> dict[str, Any]:
        """What is declared beside the name."""
        values = ((f, getattr(self, f.name)) for f in fields(self)[1:] if f.init)
        return {f.name: value for f, value in values if repr(value) != repr(f.default)}

    @property
    def suffix(self) -> str:
        """What a channel of `OneHot` has after its name, such as ``=22``."""
        pairs: Any = self.categories or ()
        is_one = len(pairs) == 2 and pairs[0][1] == 1 and pairs[1] == (None, 0)
        return f"={pairs[0][0]}" if is_one else ""

    @property
    def text(self) -> str:
        """The name, as messages have it."""
        return text_of(self.name)

    @property
    def last(self) -> str:
        """The last name of its path, which objects of several collections have in common."""
        return next(step for step in path_of(self.name)[::-1] if isinstance(step, str))

    @property
    def channel(self) -> str:
        """The name of the channel where a tensor is unpacked."""
        return self.text + self.suffix

    def __repr__(self) -> str:
        changed = [
            f"{name}={dict(value) if name in ('categories', 'replace') else value!r}"
            for name, value in self.options.items()
        ]
        return f"Feature({', '.join([repr(self.name), *changed])})"

    def real(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type in which numbers of a type, and what replaces them, are computed."""
        others = [*(self.categories or ()), *(self.replace or ())]
        if self.exact and dtype.kind in "iu" and all(_holds(dtype, new) for _, new in others):
            return dtype
        real = real_of(dtype)
        types = (np.min_scalar_type(new) for _, new in others)
        return np.result_type(real, *types) if others else real

    def computed(self, raw: Tensor, out: Tensor) -> Tensor:
        """Return ``function(clip(value, *within))``, in `out` if that changes the numbers."""
        values = _replaced(raw, self.replace, raw, out.dtype) if self.replace else raw
        if self.categories:
            values = _replaced(values, self.categories, math.nan, out.dtype)
        if (self.within, self.power, self.function) == (None, None, None):
            return values
        # A limit, or arctan, would hide that a number is infinite.
        is_hiding = self.nonfinite is None and self.function != "isfinite"
        hidden = ~np.isfinite(values) if is_hiding and not all_finite(values) else None
        if self.within is not None:
            lower, upper = (out.dtype.type(limit) for limit in _limits(*self.within))
            values = values.clip(lower, upper, out)
        # Integers have no absolute value of their least number.
        values = values.astype(out.dtype, copy=False)
        if self.power is not None:
            values = np.asarray(np.power(values, out.dtype.type(self.power), out=out))
        elif self.function is not None:
            function = FUNCTIONS[str(self.function)][0]
            is_ufunc = isinstance(function, np.ufunc)
            values = np.asarray(function(values, out=out) if is_ufunc else function(values))
        if hidden is not None:
            values[hidden] = math.nan
        return values

    def transformed(self, raw: Tensor) -> Tensor:
        """Return numbers as they are sent."""
        sent = np.empty((1, len(raw)), self.real(raw.dtype))
        transform([self], [raw], sent)
        return np.asarray(sent[0])


def transform(features: Sequence[Feature], raws: Sequence[Tensor], out: Tensor) -> bool:
    """Write numbers of channels of one kind as they are sent, in the type that `real` returns.

    Return whether all are finite, and none was hidden that must not be sent: limits hide infinite
    numbers, and a replacement hides those without a category.
    """
    first, (moves, limits, bounds) = features[0], features[0].moves
    for feature, raw, row in zip(features, raws, out, strict=True):
        computed = feature.computed(raw, row)
        if computed is not row:
            row[:] = computed
    if out.dtype.kind in "iu" or not (moves or first.nonfinite is not None):
        return all_finite(out)
    constants = np.asarray([feature.constants for feature in features], out.dtype)
    shift, scale, lower, upper, nonfinite = constants.T[:, :, np.newaxis]
    hides = first.categories or (limits and first.nonfinite is None)
    is_valid = not hides or all_finite(out)
    if first.nonfinite is not None and not first.nonfinite_last:
        _replace_nonfinite(out, nonfinite)
    out -= shift
    out *= scale
    if limits:
        out.clip(lower, upper, out)
    if first.nonfinite_last:
        _replace_nonfinite(out, nonfinite)
    return is_valid and (bounds or all_finite(out))


def _limits(lower: float | None, upper: float | None) -> tuple[float, float]:
    return (-math.inf if lower is None else lower), (math.inf if upper is None else upper)


def _replace_nonfinite(values: Tensor, nonfinite: Tensor) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        np.copyto(values, nonfinite, where=~finite)


def all_finite(values: Tensor) -> bool:
    """Return whether numbers are finite, as integers and strings always are."""
    return values.dtype.kind in "iubO" or bool(np.isfinite(values).all())


def _replaced(
    raw: Tensor, pairs: Sequence[tuple[Any, Any]], default: Any, real: np.dtype[Any]
) -> Tensor:
    """Return what replaces each number; that of None, or the default, but NaN and inf stay."""
    known = dict(pairs)
    result = np.empty(len(raw), real)
    result[:] = known.pop(None, default)
    if not all_finite(raw):
        np.copyto(result, raw, where=~np.isfinite(raw))
    for key, value in known.items():
        result[raw == key] = value
    return result


def _holds(dtype: np.dtype[Any], number: float) -> bool:
    return isinstance(number, int) and np.iinfo(dtype).min <= number <= np.iinfo(dtype).max


Field = Name | float | Feature | Sequence[Feature]
Fields = Field | Sequence[Field]
"""What names the channels of a tensor."""

SortBy = Name | Feature | None
"""What the elements of a row are sorted by."""


def OneHot(name: Name, values: Iterable[float]) -> tuple[Feature, ...]:  # noqa: N802
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
    what = f"OneHot({name!r}): expected values to be"
    each = [checked("number", value, what) for value in checked("values", values, what)]
    if not each or len(set(each)) != len(each):
        raise ConfigError(f"{what} different numbers, got {each}")
    return tuple(Feature(name, categories={value: 1, None: 0}) for value in each)


def Metadata(name: Any, **options: Any) -> Feature:  # noqa: N802
    """Return a channel with a number of the events' metadata, such as the year of the dataset.

    Parameters
    ----------
    name : str
        The key in ``events.metadata``. Its value is a number, a bool, or a string of a number.
    **options
        Other arguments of `Feature`, such as ``categories``.

    Notes
    -----
    Objects have the metadata of their events' file. awkward's attributes name one file: after
    `ak.concatenate` of several, their objects have the metadata of the first. Give such a number as
    a field.

    Examples
    --------
    >>> import awkward as ak
    >>> import sonic_coffea as sonic
    >>> events = ak.with_parameter(ak.Array([{"pt": 50.0}]), "metadata", {"year": "2018"})
    >>> sonic.Row(["pt", sonic.Metadata("year", shift=2016)]).pack(events).tolist()
    [[50.0, 2.0]]
    """
    return Feature(name, expression=f"metadata({name})", **options)


def as_features(named: Any, layout: str) -> tuple[Feature, ...]:
    """Return the channels of a layout as features; anything else is an error."""
    if isinstance(named, (str, Feature)) or not isinstance(named, Iterable):
        named = [named]
    each = checked("fields", named, f"{layout}: expected")
    features = [feature for field in each for feature in _channels(field, layout)]
    if not any(feature.terms for feature in features):
        raise ConfigError(f"{layout} needs at least one field beside constants, for its rows")
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
    if isinstance(field, (int, float, np.number)) and not isinstance(field, bool):
        number = checked("finite", field, f"{layout}: expected")
        if number == field:
            return [Feature(repr(number), expression=repr(number))]
    raise ConfigError(f"{layout}: expected field names, numbers or sonic.Feature, got {field!r}")


def key_of(sort_by: SortBy, layout: str) -> Feature | None:
    """Return what elements are sorted by: a field, or what an expression gives."""
    if sort_by is None or isinstance(sort_by, Feature):
        return sort_by
    name = checked("name", sort_by, f"{layout}: expected sort_by to be")
    is_path = isinstance(name, tuple) or re.fullmatch(r"[\w.]+(\[-?\d+\][\w.]*)*", name)
    return Feature(name, expression=None if is_path else str(name))


# The attributes of scikit-learn's scalers that hold what is subtracted, and what is divided by.
_ATTRIBUTES = {
    "StandardScaler": ("mean_", "scale_"),
    "RobustScaler": ("center_", "scale_"),
    "MaxAbsScaler": ("", "scale_"),
    "MinMaxScaler": ("min_", "scale_"),
}


def Scaled(scaler: Any, fields: Any = None) -> tuple[Feature, ...]:  # noqa: N802
    """Return channels that are scaled as a fitted scaler does it.

    Parameters
    ----------
    scaler : scaler, mapping or path
        scikit-learn's StandardScaler, MinMaxScaler, MaxAbsScaler or RobustScaler, fitted. Or a
        mapping, or a JSON file with it, that has the statistics of each feature:
        ``{"pt": {"mean": 50.0, "std": 20.0}}``, which means ``(pt - mean) / std``, or ``min`` and
        ``max``, which mean ``(pt - min) / (max - min)``.
    fields : sequence or mapping, optional
        The fields, in the model's order. The statistics of each are found by its name, or the last
        part of it; those of other names are not used. The order of a scaler of scikit-learn must be
        this one, and its names, if it has them. A mapping has the fields of other names:
        ``{"pt": "Photon.pt"}``. By default, all names.

    Raises
    ------
    ConfigError
        If the scaler is not fitted, is of a kind that features cannot express, or has other names
        than the fields.

    Examples
    --------
    >>> import sonic_coffea as sonic
    >>> sonic.Scaled({"pt": {"mean": 50.0, "std": 20.0}}, ["Jet.pt"])
    (Feature('Jet.pt', shift=50.0, scale=0.05),)
    """
    if isinstance(scaler, (str, os.PathLike)):
        scaler = read_json(scaler, "the file of statistics")
    if not isinstance(scaler, Mapping):
        names, options = _of_sklearn(scaler)
        features = features_by_name(fields, names, len(options), "the scaler")
    else:
        names = list(scaler)
        if isinstance(fields, Mapping) or fields is None:
            features = features_by_name(fields, names, len(names), "the scaler")
        else:
            features = as_features(fields, "Scaled")
            names = _names_of(features, scaler)
        options = [_of_statistics(name, scaler[name]) for name in names]
    for feature, each in zip(features, options, strict=True):
        if set(each) & set(feature.options):
            raise ConfigError(f"Scaled: expected a field without a scale of its own: {feature!r}")
    return tuple(replace(f, **each) for f, each in zip(features, options, strict=True))


def _names_of(features: Sequence[Feature], statistics: Mapping[str, Any]) -> list[str]:
    """Return the name by which the statistics have each feature; one name is of one column."""
    columns: dict[str, str] = {}
    names = []
    for feature in features:
        column = column_of(feature.name)
        known = (name for name in (feature.text, column, feature.last) if name in statistics)
        name = next(known, feature.text)
        require([name], statistics, "Scaled: no statistics of")
        if columns.setdefault(name, column) != column:
            raise ConfigError(
                f"Scaled: the statistics of {name!r} cannot be both of {columns[name]!r} and of "
                f"{column!r}; rename them to whole names, such as {column!r}"
            )
        names.append(name)
    return names


def features_by_name(
    fields: Any, names: Sequence[str], count: int, owner: str
) -> tuple[Feature, ...]:
    """Return the features that somebody who was trained, or fitted, knows by names.

    Parameters
    ----------
    fields : sequence, mapping or None
        The fields in order, compared with the names; or the fields of some names; or None.
    names : sequence of str
        The names, which may be none.
    count : int
        How many there are.
    owner : str
        Who has them, in messages.

    Raises
    ------
    ConfigError
        If there are no names and no fields, or if they do not fit.
    """
    known = f"{owner} has {count} features: {', '.join(map(repr, names)) or 'without names'}"
    if isinstance(fields, Mapping) or fields is None:
        renamed = fields or {}
        if not names or not set(renamed) <= set(names):
            raise ConfigError(f"{known}; got {[*renamed] or 'no fields'}; name its fields in order")
        fields, names = [renamed.get(name, name) for name in names], ()
    features = as_features(fields, owner)
    pairs = zip(names, features, strict=False)
    alike = all(name in (feature.text, feature.last) for name, feature in pairs)
    if len(features) != count or not alike:
        got = ", ".join(repr(feature.text) for feature in features)
        raise ConfigError(f"{known}; got {got}; expected this order, or a dict by these names")
    return features


def _of_sklearn(scaler: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of a scaler's features, if it has them, and the options of each."""
    kind = type(scaler).__name__
    if kind not in _ATTRIBUTES:
        raise ConfigError(
            f"features cannot express a {kind}; expected {', '.join(_ATTRIBUTES)}, or put it into "
            "the model's ONNX file, before the network (skl2onnx converts it)"
        )
    if not hasattr(scaler, "n_features_in_"):
        raise ConfigError(f"the {kind} is not fitted")
    known: list[Any] = [getattr(scaler, name, None) for name in _ATTRIBUTES[kind]]
    center, width = known
    ones = np.ones(scaler.n_features_in_)
    scales = ones if width is None else 1 / width
    # Without with_mean, scikit-learn computes a mean all the same.
    shifts = 0 * ones if center is None or not getattr(scaler, "with_mean", True) else center
    if kind == "MinMaxScaler":  # it computes value * scale_ + min_
        shifts, scales = -center / width, width
    limits: dict[str, Any] = {}
    if getattr(scaler, "clip", False):
        limits["lower"], limits["upper"] = getattr(scaler, "feature_range", (-1.0, 1.0))
    each = zip(shifts.tolist(), scales.tolist(), strict=True)
    names = getattr(scaler, "feature_names_in_", ())
    return [*map(str, names)], [{"shift": s, "scale": by, **limits} for s, by in each]


def _of_statistics(name: str, statistics: Any) -> dict[str, float]:
    """Return the options of a feature by its statistics."""
    try:
        has = {key: statistics[key] for key in ("mean", "std", "min", "max") if key in statistics}
        shift, other = has.values()
        width = other - shift if "min" in has else other
        valid = set(has) in ({"mean", "std"}, {"min", "max"}) and math.isfinite(shift)
        valid = valid and 0 < width < math.inf
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ConfigError(
            f"the statistics of {name!r}: expected either mean and std, or min and max, with a "
            f"finite width, got {statistics!r}; another rule is that of "
            "Feature(name, shift=, scale=)"
        )
    return {"shift": shift, "scale": 1 / width}
