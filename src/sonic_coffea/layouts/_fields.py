"""What a layout reads: a field of the arrays, and what happens to its numbers on the way."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import awkward as ak

from sonic_coffea.errors import ConfigError, FieldError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from awkward.contents import Content
    from numpy.typing import NDArray

    from sonic_coffea.layouts._rows import Int64

FUNCTIONS = ("log", "log1p", "sqrt", "abs", "exp", "tanh", "sin", "cos")
"""Element-wise functions that a feature may name."""


@dataclass(frozen=True, slots=True, repr=False)
class Feature:
    """One field, transformed as ``clip((function(value) - shift) * scale, lower, upper)``.

    Without a function this is the rule of weaver and of the CMS software, whose ``median`` is
    `shift` and whose ``norm_factor`` is `scale`. It is computed in the precision that numpy would
    use for the field's own type (float32 for float32), then cast to the tensor's.

    Parameters
    ----------
    name : str
        A field or behaviour property, dotted where it is nested: ``"pf.pt"``.
    shift, scale : float
        Subtracted first; multiplied then.
    lower, upper : float, optional
        Clip limits, applied last.
    nonfinite : float, optional
        What replaces NaN and ±inf, before the shift. By default they raise an `InputError`.
    function : {"log", "log1p", "sqrt", "abs", "exp", "tanh", "sin", "cos"}, optional
        Applied before everything else.

    Examples
    --------
    >>> Feature("pf.pt", function="log", shift=1.7, scale=0.7, upper=5.0)
    Feature('pf.pt', shift=1.7, scale=0.7, upper=5.0, function='log')
    """

    name: str
    shift: float = 0.0
    scale: float = 1.0
    lower: float | None = None
    upper: float | None = None
    nonfinite: float | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a feature is named by a string such as 'pf.pt', got an empty one")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ConfigError(
                f"feature {self.name!r}: lower ({self.lower}) is above upper ({self.upper})"
            )
        if self.function is not None and self.function not in FUNCTIONS:
            raise ConfigError(
                f"feature {self.name!r}: no function {self.function!r}; "
                f"{nearest(self.function, FUNCTIONS)}"
            )

    @property
    def plain(self) -> bool:
        """Whether the numbers pass unchanged."""
        limits = self.lower, self.upper, self.nonfinite, self.function
        return (self.shift, self.scale, *limits) == (0.0, 1.0, None, None, None, None)

    def __repr__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)[1:]
            if getattr(self, f.name) != f.default
        ]
        return f"Feature({', '.join([repr(self.name), *changed])})"


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """The numbers of one field: ``values``, read through ``index`` if there is one."""

    feature: Feature
    values: NDArray[Any]
    index: Int64 | None


def as_features(named: Any, layout: str) -> tuple[Feature, ...]:
    """Return the fields of a layout as features, refusing what is not one."""
    if isinstance(named, (str, Feature)):
        named = [named]
    wrong = [f for f in named if not isinstance(f, (str, Feature))]
    if wrong:
        raise ConfigError(f"{layout}: expected field names or sonic.Feature, got {wrong[0]!r}")
    features = tuple(f if isinstance(f, Feature) else Feature(f) for f in named)
    if not features:
        raise ConfigError(f"{layout} needs at least one field, got none")
    return features


class Source:
    """The arrays of one call; what several fields have in common is looked up once.

    Parameters
    ----------
    array : awkward array or mapping
        Records, or a dict of arrays by field name.
    """

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
