"""Objects under systematic variations, scored in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import awkward as ak

from sonic_coffea.errors import InputError
from sonic_coffea.layouts import (
    EVENT_ID,
    Feature,
    Layout,
    array_of,
    has_no_data,
    metadata_of,
    only_columns,
)

# The name of objects that are not a dict of inputs, beside those of inputs and of options.
OBJECTS = "the objects"


class Variations(dict[str, Any]):
    """The same objects under systematic variations, to be scored in one call.

    Rows that a variation does not change are sent once; graphs (`Flat`) are all sent. The scores
    come back as a dict of arrays, each in the structure of its variation. A field that has other
    types in some variations is computed in their common type, such as float64, in all. Variations
    of dask-awkward arrays are scored separately.

    Parameters
    ----------
    collections : mapping, optional
        Names, each with its objects: an awkward array, or a dict with an array for each input of
        the model. Variations may have different objects, because cuts differ, but all have the
        fields that the model reads.
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
        without = {name for name, array in self.items() if has_no_data(array)}
        for name in self:
            if without and name not in without:
                raise InputError(
                    f"variation {name!r} is not lazy, as others are; compute all or none"
                )
        return bool(without)

    def together(
        self, layouts: Sequence[tuple[str, Layout]]
    ) -> tuple[dict[str, ak.Array], dict[str, int]]:
        """Return the arrays of all, one after another, and how many events each has.

        Each variation is a dict, of the objects or of inputs, and of options that are arrays.

        Parameters
        ----------
        layouts : sequence of (str, Layout)
            The layouts of the models, by the names of their inputs. Fields that none of them reads
            are left out: they would be copied, and read from the file.

        Raises
        ------
        sonic_coffea.errors.InputError
            If there are none, some lack fields of others, an index leads to several files, or the
            metadata that are read differ.
        """
        # Of a dict of columns, the length is that of the columns.
        each = {n: {key: _as_array(a, key) for key, a in one.items()} for n, one in self.items()}
        first = next(iter(each.values()), {})
        if not first:
            raise InputError("expected at least one variation, got none")
        for name, inputs in each.items():
            if inputs.keys() != first.keys():
                raise InputError(f"variation {name!r} has other inputs than the first")
        every = [array for inputs in each.values() for array in inputs.values()]
        # awkward would take the file of the first for that of all.
        files = {id(array.attrs.get("@events_factory")) for array in every}
        attrs: dict[str, Any] | None = {} if len(files - {id(None)}) > 1 else None
        if attrs is not None and any(follows_index(layout) for _, layout in layouts):
            raise InputError(
                "the variations are of several files, and the model follows indices of a file; "
                "score them one by one"
            )
        joined = {
            key: _joined(
                {n: inputs[key] for n, inputs in each.items()},
                [layout for name, layout in layouts if key in (OBJECTS, name)],
                attrs,
            )
            for key in first
        }
        sizes = {}
        for name, inputs in each.items():
            sizes[name], *others = map(len, inputs.values())
            # Together, another variation might have the events that this one lacks.
            if {*others} - {sizes[name]}:
                counts = ", ".join(f"{key!r} {len(array)}" for key, array in inputs.items())
                raise InputError(
                    f"arrays of variation {name!r} have different lengths: {counts}; vary the "
                    "objects of all events, or score variations one by one"
                )
        return joined, sizes


def _joined(
    arrays: Mapping[str, ak.Array], layouts: Sequence[Layout], attrs: dict[str, Any] | None
) -> ak.Array:
    """Return the arrays of an input, one after another, as far as its layouts read them."""
    columns = [column for layout in layouts for column in _columns_of(layout)]
    each = {n: only_columns(a, columns) if columns else a for n, a in arrays.items()}
    first = next(iter(each.values()))
    for name, array in each.items():
        if odd := set(array.fields) ^ set(first.fields):
            fields = ", ".join(sorted(odd))
            raise InputError(
                f"variation {name!r} has other fields than the first: {fields}; give the same "
                "fields in all"
            )
    # awkward finds the fields of records by their names, in any order.
    joined = ak.concatenate([*each.values()], attrs=attrs)
    features = (feature for layout in layouts for feature in _features_of(layout))
    metadata = [name for feature in features for name in feature.metadata]
    if not metadata:
        return joined
    known = [metadata_of(array) or {} for array in arrays.values()]
    if any(one.get(name) != known[0].get(name) for one in known for name in metadata):
        raise InputError(
            "the variations have different metadata, which the model reads; set the number as "
            "a field of each variation, or score them one by one"
        )
    # Where there are none, the file's would be taken for them.
    return ak.with_parameter(joined, "metadata", known[0])


def _columns_of(layout: Layout) -> list[str]:
    """Return the fields that a layout reads, and those that they may be found by."""
    # Fields need not name the collection of a part, and may be in another one, too.
    columns = [*layout.columns, *(name for name, _ in getattr(layout, "parts", ()))]
    if follows_index(layout):  # any field may tell where the objects lie in the file
        columns = [*EVENT_ID, *(column.partition(".")[0] for column in columns)]
    return columns


def _features_of(layout: Layout) -> list[Feature]:
    """Return the channels of a layout, or of its parts, and what its elements are sorted by."""
    parts = [part for _, part in getattr(layout, "parts", ())] or [layout]
    keys = (getattr(part, "key", None) for part in parts)
    return [*(feature for part in parts for feature in part.features), *filter(None, keys)]


def follows_index(layout: Layout) -> bool:
    """Return whether a layout reads what an index refers to, which may count in the file."""
    return any(feature.index is not None for feature in _features_of(layout))


def _as_array(objects: Any, what: str) -> ak.Array:
    try:
        return array_of(objects)
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{what}: expected an array of each variation: {error}") from None
