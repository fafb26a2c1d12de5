"""What a layout reads: a field of the arrays, and what happens to its numbers on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import awkward as ak

from sonic_coffea.errors import ConfigError, FieldError, nearest

if TYPE_CHECKING:
    from awkward.contents import Content


@dataclass(frozen=True, slots=True)
class Feature:
    """One field, transformed as ``clip((value - shift) * scale, lower, upper)``.

    This is the rule of weaver and of the CMS software, whose ``median`` is `shift` and whose
    ``norm_factor`` is `scale`. It is computed in the precision that numpy would use for the field's
    own type (float32 for float32), then cast to the tensor's.

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

    Examples
    --------
    >>> Feature("pf.pt", shift=1.7, scale=0.7, upper=5.0)
    Feature('pf.pt', shift=1.7, scale=0.7, upper=5.0)
    """

    name: str
    shift: float = 0.0
    scale: float = 1.0
    lower: float | None = None
    upper: float | None = None
    nonfinite: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a feature is named by a string such as 'pf.pt', got an empty one")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ConfigError(
                f"feature {self.name!r}: lower ({self.lower}) is above upper ({self.upper})"
            )

    @property
    def plain(self) -> bool:
        """Whether the numbers pass unchanged."""
        return (
            self.shift == 0.0
            and self.scale == 1.0
            and self.lower is None
            and self.upper is None
            and self.nonfinite is None
        )

    def __repr__(self) -> str:
        changed = [
            f"{name}={value!r}"
            for name, value, default in (
                ("shift", self.shift, 0.0),
                ("scale", self.scale, 1.0),
                ("lower", self.lower, None),
                ("upper", self.upper, None),
                ("nonfinite", self.nonfinite, None),
            )
            if value != default
        ]
        return f"Feature({', '.join([repr(self.name), *changed])})"


def as_features(fields: Any, layout: str) -> tuple[Feature, ...]:
    """Return the fields of a layout as features, refusing what is not one."""
    if isinstance(fields, (str, Feature)):
        fields = [fields]
    wrong = [f for f in fields if not isinstance(f, (str, Feature))]
    if wrong:
        raise ConfigError(f"{layout}: expected field names or sonic.Feature, got {wrong[0]!r}")
    features = tuple(f if isinstance(f, Feature) else Feature(f) for f in fields)
    if not features:
        raise ConfigError(f"{layout} needs at least one field, got none")
    return features


def column(array: Any, path: str) -> Content:
    """Return the column at a dotted path, materialised; nothing else is read.

    Raises
    ------
    FieldError
        Naming the nearest fields that there are.
    """
    parts = path.split(".")
    if isinstance(array, dict):
        if parts[0] not in array:
            raise _missing(parts[0], path, list(array))
        array, parts = array[parts[0]], parts[1:]
    layout = ak.to_layout(array)
    while parts:
        if parts[0] in layout.fields:
            layout = layout[parts[0]]
        else:
            layout = _behaviour(layout, array, parts[0], path)
        parts = parts[1:]
    return layout.materialize()


def _behaviour(layout: Content, array: Any, name: str, path: str) -> Content:
    """Read a property that a behaviour defines, such as a vector's ``pt`` or a cross-reference."""
    wrapped = ak.Array(
        layout, behavior=getattr(array, "behavior", None), attrs=getattr(array, "attrs", None)
    )
    known = layout.fields
    if name.startswith("_") or not hasattr(type(wrapped), name):
        raise _missing(name, path, known)
    value = getattr(wrapped, name)
    if callable(value) or not isinstance(value, ak.Array):
        raise _missing(name, path, known)
    return ak.to_layout(value)


def _missing(name: str, path: str, known: list[str]) -> FieldError:
    inside = f" (in {path!r})" if name != path else ""
    return FieldError(f"no field {name!r}{inside}; {nearest(name, known)}")
