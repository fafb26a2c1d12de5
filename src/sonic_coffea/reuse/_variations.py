"""Objects under systematic variations, scored in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak

from sonic_coffea.errors import InputError
from sonic_coffea.layouts import is_lazy, is_tracer

if TYPE_CHECKING:
    from collections.abc import Mapping


class Variations(dict[str, Any]):
    """The same objects under systematic variations, to be scored in one call.

    Rows that a variation does not change are sent once. The scores come back as a dict of arrays,
    each in the structure of its variation. Variations of dask-awkward arrays are scored separately.

    Parameters
    ----------
    collections : mapping, optional
        Names, each with its objects: an awkward array, or a dict with an array for each input of
        the model. Variations may have different objects, because cuts differ, but need the same
        fields.
    **named
        Further variations.

    Examples
    --------
    >>> import awkward as ak
    >>> import sonic_coffea as sonic
    >>> jets = ak.Array([[{"pt": 50.0}, {"pt": 40.0}], []])
    >>> up = ak.with_field(jets, jets.pt * 1.02, "pt")
    >>> list(sonic.Variations(nominal=jets, up=up))
    ['nominal', 'up']
    """

    @property
    def deferred(self) -> bool:
        """Whether they have no data yet: lazy arrays, or typetracers.

        Raises
        ------
        sonic_coffea.errors.InputError
            If only some have none.
        """
        without = {name for name, one in self.items() if is_lazy(one) or is_tracer(one)}
        for name in self:
            if without and name not in without:
                raise InputError(
                    f"variation {name!r} is not lazy, as others are; compute all or none"
                )
        return bool(without)

    def together(self) -> tuple[Any, dict[str, int]]:
        """Return all of them, one after another, and how many events each has.

        Raises
        ------
        sonic_coffea.errors.InputError
            If there are none, or they do not have the same fields.
        """
        if not self:
            raise InputError("expected at least one variation, got none")
        first = next(iter(self.values()))
        if isinstance(first, dict):
            for name, one in self.items():
                if not isinstance(one, dict) or one.keys() != first.keys():
                    raise InputError(f"variation {name!r} has other inputs than the first")
            joined = {key: self._joined({n: one[key] for n, one in self.items()}) for key in first}
            lengths = {name: len(next(iter(one.values()))) for name, one in self.items()}
            return joined, lengths
        return self._joined(self), {name: len(one) for name, one in self.items()}

    @staticmethod
    def _joined(arrays: Mapping[str, Any]) -> ak.Array:
        first = next(iter(arrays.values()))
        for name, one in arrays.items():
            if set(one.fields) != set(first.fields):
                odd = ", ".join(sorted(set(one.fields) ^ set(first.fields)))
                raise InputError(f"variation {name!r} has other fields than the first: {odd}")
        # In the order of the first, and with its methods; columns alone would lose them.
        return ak.concatenate(
            [one if one.fields == first.fields else one[first.fields] for one in arrays.values()]
        )
