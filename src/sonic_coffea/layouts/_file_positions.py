"""Where objects lie in the file in which indices of NanoAOD count, though cut or sorted since."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from awkward.contents import NumpyArray

from sonic_coffea.errors import InputError

if TYPE_CHECKING:
    from awkward.contents import Content
    from numpy.typing import NDArray

    from sonic_coffea.layouts._structure import Int64, Tensor

# What tells the events of a file apart, and the objects of an event: no calibration changes it.
_EVENT = "run", "luminosityBlock", "event"
_DIRECTION = "eta", "phi"
POSITION = "file_position"
"""A field of objects that says it, for whoever noted it before a change."""


@dataclass(frozen=True, slots=True, eq=False)
class FilePositions:
    """The position of each object of a collection in its event's list in the file.

    Parameters
    ----------
    positions : awkward array
        ``events * var * int64``; -1 for an object that is None.
    sizes : array of int64
        How many objects the file has in each event; -1 where nothing tells.
    """

    positions: ak.Array
    sizes: Int64

    def find(self, events: Int64, positions: Tensor) -> tuple[Int64, Int64, Int64]:
        """Find all objects at positions of the file, each in one of the events.

        Returns
        -------
        order, first, count : array of int64
            Those at a position are ``order[first:first + count]`` of all objects.
        """
        own = ak.to_numpy(ak.flatten(self.positions))
        owner = np.repeat(np.arange(len(self.sizes)), ak.num(self.positions))
        return _found([events, positions], [owner, own])

    def places(self, events: Int64, positions: Tensor) -> tuple[Int64, NDArray[np.bool_]]:
        """Return where objects of the file are now in their events, and which it never had.

        A place is -1 if an object was cut away.
        """
        order, first, count = self.find(events, positions)
        local = ak.to_numpy(ak.flatten(ak.local_index(self.positions)))
        places = np.full(len(positions), -1, np.int64)
        places[count > 0] = local[order[first[count > 0]]]
        sizes = self.sizes[events]
        return places, (places < 0) & ((positions < 0) | ((sizes >= 0) & (positions >= sizes)))


def _found(wanted: list[Tensor], listed: list[Tensor]) -> tuple[Int64, Int64, Int64]:
    """Find rows of some columns among others: those are ``order[first:first + count]``."""
    numbers = np.zeros(len(wanted[0]) + len(listed[0]), np.int64)
    for columns in zip(wanted, listed, strict=True):
        column = np.concatenate(columns)
        span = float(column.max(initial=0)) - float(column.min(initial=0))
        if column.dtype.kind != "i" or span > 1 << 20:  # no product may overflow
            numbers, column = (np.unique(x, return_inverse=True)[1] for x in (numbers, column))
        column = column - column.min(initial=0)
        numbers = numbers * (column.max(initial=0) + 1) + column
    here, known = np.split(numbers, [len(wanted[0])])
    order = np.argsort(known, kind="stable")
    first = np.searchsorted(known[order], here)
    return order, first, np.searchsorted(known[order], here, side="right") - first


def file_of(array: Any) -> Any:
    """Return the events as their file has them, or None for arrays that know no file."""
    original = array.attrs.get("@original_array")
    if isinstance(original, ak.Array):  # while coffea looks for the branches that are read
        return original
    factory = array.attrs.get("@events_factory")
    return None if factory is None else factory.events()


def referred_positions(array: Any, name: str, index: str) -> FilePositions | None:
    """Return where objects lie in the file, if it is the file's own index that refers to them.

    Parameters
    ----------
    array : awkward array or dict
        Collections by name.
    name : str
        The collection that the index refers to.
    index : str
        The path of the index: ``"Jet.muonIdx1"``.

    Returns
    -------
    FilePositions or None
        None if the index is not the file's but somebody's own, or if no file is known.
    """
    owner, _, field = index.rpartition(".")
    objects, indexed = (
        reduce(lambda records, part: records[part], path.split(".") if path else [], array)
        for path in (name, owner)
    )
    file = file_of(objects) if isinstance(objects, ak.Array) else None
    if file is None or not isinstance(indexed, ak.Array):
        return None
    known, known_owner = (
        each.layout.purelist_parameter("collection_name") or path
        for each, path in ((objects, name), (indexed, owner))
    )
    if known not in file.fields or known_owner not in file.fields:
        return None
    if field not in file[known_owner].fields:
        return None
    fields = array if isinstance(array, dict) else array.fields
    events = {column: array[column] for column in _EVENT if column in fields}
    return file_positions({**events, known: objects}, known, file)


def touch_position(events: Any, name: str, file: Any) -> None:
    """Touch what `file_positions` reads, in events and a file without data."""
    if POSITION in events[name].fields:
        ak.typetracer.touch_data(events[name][POSITION])
    elif file is not None and not _is_of_file(events[name], file[name]):
        for array in (events, file):
            for field in {*_EVENT}.intersection(array.fields):
                ak.typetracer.touch_data(array[field])
            for field in {*_DIRECTION, "pt"}.intersection(array[name].fields):
                ak.typetracer.touch_data(array[name][field])


def _is_of_file(objects: Any, known: Any) -> bool:
    """Whether a column of a collection is still the file's own, behind indexes; nothing is read."""
    here, own = _records(objects.layout), _records(known.layout)
    if here is None or own is None:
        return False
    names = set(here.fields).intersection(own.fields)
    return any(here.content(name) is own.content(name) for name in names)


def file_positions(events: Any, name: str, file: Any) -> FilePositions:
    """Return where the objects of a collection lie in the file.

    The field ``file_position`` says it, if there is one. awkward's own indexes tell where a column
    of the file is still behind them. Otherwise, an object is the one of the file's event that has
    the same eta and phi.

    Parameters
    ----------
    events : awkward array or dict
        Collections by name, and what tells events apart.
    name : str
        The collection.
    file : awkward array or None
        The events as the file has them. Without, objects must be as the indices count them, and are
        refused if they were cut or sorted.

    Raises
    ------
    InputError
        If the position of an object is not known.
    """
    objects = events[name]
    if POSITION in objects.fields:
        positions = ak.fill_none(objects[POSITION], -1, axis=1)
        return FilePositions(positions, np.full(len(positions), -1))
    if file is None:
        layout = objects.layout
        while not layout.is_list and not layout.is_record:
            layout = layout.content
        if layout.is_list and layout.content.is_indexed:
            raise _unknown(name, "they were cut or sorted, and the events do not know their file")
        counts = ak.to_numpy(ak.fill_none(ak.num(objects), 0))
        return FilePositions(ak.fill_none(ak.local_index(objects, axis=1), [], axis=0), counts)
    if _is_of_file(objects, file[name]):
        return _behind_indexes(objects, file[name])
    return _by_direction(events, name, file)


def _records(node: Content) -> Content | None:
    while not node.is_record:
        if node.is_numpy or node.is_unknown or node.is_union:
            return None
        node = node.content
    return node


def _numbered(node: Content) -> Content:
    """Return the number of each object in the records that lists and indexes lead to."""
    if node.is_record:
        return NumpyArray(np.arange(node.length))
    return node.copy(content=_numbered(node.content))


def _flat(numbers: Any, absent: float) -> Tensor:
    values: Tensor = ak.to_numpy(ak.fill_none(ak.flatten(numbers), absent))
    return values


def _behind_indexes(objects: Any, known: Any) -> FilePositions:
    offsets = np.append(0, np.cumsum(ak.to_numpy(ak.num(known))))
    numbers = ak.fill_none(ak.Array(_numbered(objects.layout)), [], axis=0)
    counts = ak.to_numpy(ak.num(numbers))
    flat = _flat(numbers, -1)
    row = np.searchsorted(offsets, flat, side="right") - 1
    is_there = flat >= 0
    sizes = np.full(len(counts), -1, np.int64)
    sizes[np.repeat(np.arange(len(counts)), counts)[is_there]] = np.diff(offsets)[row[is_there]]
    positions = np.where(is_there, flat - offsets[row], -1)
    return FilePositions(ak.unflatten(positions, counts), sizes)


def _by_direction(events: Any, name: str, file: Any) -> FilePositions:
    objects = events[name]
    known = file[name][_rows(events, name, file)]
    counts, sizes = ak.to_numpy(ak.num(objects)), ak.to_numpy(ak.num(known))
    for field in _DIRECTION:
        if field not in objects.fields or field not in known.fields:
            raise _unknown(name, f"they have no {field!r}")
    same = [f for f in (*_DIRECTION, "pt") if f in objects.fields and f in known.fields]
    if np.array_equal(counts, sizes) and all(
        np.array_equal(_flat(objects[f], np.nan), _flat(known[f], np.nan)) for f in same
    ):
        return FilePositions(ak.local_index(known, axis=1), sizes)
    order, first, number = _found(_directions(objects), _directions(known))
    is_none = _flat(ak.is_none(objects["eta"], axis=1), 0).astype(np.bool_)
    for wrong in np.flatnonzero((number != 1) & ~is_none)[:1].tolist():
        event = np.repeat(np.arange(len(counts)), counts)[wrong]
        raise _unknown(
            name,
            f"the file has {number[wrong]} of them with the eta and phi of one in event {event}",
        )
    local = np.append(_flat(ak.local_index(known, axis=1), -1)[order], -1)
    positions = local[np.where(is_none, -1, first)]
    return FilePositions(ak.unflatten(positions, counts), sizes)


def _directions(objects: Any) -> list[Tensor]:
    """Return the event, eta and phi of each object."""
    event = np.repeat(np.arange(len(objects)), ak.to_numpy(ak.num(objects)))
    return [event, *(_flat(objects[field], np.nan) for field in _DIRECTION)]


def _rows(events: Any, name: str, file: Any) -> Int64:
    """Return where events lie in the file."""
    fields = events if isinstance(events, dict) else events.fields
    for field in _EVENT:
        if field not in fields or field not in file.fields:
            raise _unknown(name, f"without {field!r} events cannot be found in the file")
    wanted, listed = ([ak.to_numpy(x[field]) for field in _EVENT] for x in (events, file))
    order, first, count = _found(wanted, listed)
    if np.any(count != 1):
        raise _unknown(name, f"{', '.join(_EVENT)} do not tell the events apart")
    rows: Int64 = order[first]
    return rows


def _unknown(name: str, why: str) -> InputError:
    return InputError(
        f"the objects of {name!r} are not those of the file any more, and indices of the file "
        f"count in its own lists; where these objects were in them is not known: {why}. Note it "
        f"before you cut or sort: events[{name!r}, {POSITION!r}] = "
        f"ak.local_index(events[{name!r}], axis=1)"
    )
