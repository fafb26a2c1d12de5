"""Where objects lie in the file in which indices of NanoAOD count, though cut or sorted since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import awkward as ak
import numpy as np
from awkward.contents import Content, NumpyArray
from numpy.typing import NDArray

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._expressions import Path
from sonic_coffea.layouts._structure import Int64, Tensor, leaf, offsets_of, ranges

EVENT_ID = "run", "luminosityBlock", "event"
# What tells the objects of an event apart: no calibration changes it.
_DIRECTION = "eta", "phi"
POSITION = "file_position"
"""A field of objects that says it, for whoever noted it before a change."""

Step = tuple[str, Any, Path]
"""On the way to a field: the path so far, the records that it leads to, and the rest of it."""


# By coffea's factory, the events as the file has them.
_files: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class FilePositions:
    """The position of each object of a collection in its event's list in the file.

    Parameters
    ----------
    events, positions : array of int64
        The event of each object, and its position; -1 for an object that is None.
    sizes : array of int64
        How many objects the file has in each event; -1 where nothing tells.
    rows : array of int64
        The number of each event in the file; -1 where nothing tells.
    rejection : InputError, optional
        What to raise if an index leads to other objects than in the collection as it is now.
    """

    events: Int64
    positions: Int64
    sizes: Int64
    rows: Int64
    rejection: InputError | None = None

    def places(self, events: Int64, positions: Tensor) -> tuple[Int64, NDArray[np.bool_]]:
        """Return where objects of the file are now in their events, and which it never had.

        A place is -1 if an object was cut away.
        """
        order, first, count = find_rows([events, positions], [self.events, self.positions])
        local = np.arange(len(self.events)) - np.searchsorted(self.events, self.events)
        places = np.full(len(positions), -1, np.int64)
        places[count > 0] = local[order[first[count > 0]]]
        if self.rejection is not None and np.any((positions >= 0) & (places != positions)):
            raise self.rejection
        sizes = self.sizes[events]
        return places, (places < 0) & ((positions < 0) | ((sizes >= 0) & (positions >= sizes)))


def find_rows(rows: list[Tensor], listed: list[Tensor]) -> tuple[Int64, Int64, Int64]:
    """Find rows of some columns among others.

    Returns
    -------
    order, first, count : array of int64
        Those equal to a row are ``order[first:first + count]`` of the others.
    """
    numbers = np.zeros(len(rows[0]) + len(listed[0]), np.int64)
    for columns in zip(rows, listed, strict=True):
        column = np.concatenate(columns)
        span = float(column.max(initial=0)) - float(column.min(initial=0))
        if column.dtype.kind != "i" or span > 1 << 20:  # no product may overflow
            numbers, column = (np.unique(x, return_inverse=True)[1] for x in (numbers, column))
        column = column - column.min(initial=0)
        numbers = numbers * (column.max(initial=0) + 1) + column
    here, known = np.split(numbers, [len(rows[0])])
    order = np.argsort(known, kind="stable")
    first = np.searchsorted(known[order], here)
    return order, first, np.searchsorted(known[order], here, side="right") - first


def file_of(array: Any, *names: str) -> Any:
    """Return the events as their file has them, or None for arrays that know no file.

    Only the collections with some names need be those of the file.
    """
    original = array.attrs.get("@original_array")
    if isinstance(original, ak.Array):  # while coffea looks for the branches that are read
        return original
    factory = array.attrs.get("@events_factory")
    if factory is None:
        return None
    # They are those of the user, who may have set a collection in place.
    events = factory.events()
    if all(_is_as_read(events[name].layout) for name in names if name in events.fields):
        return events
    if factory not in _files:
        again = object.__new__(type(factory))
        vars(again).update(vars(factory))
        again.__setstate__(factory.__getstate__())  # as a pickle, it knows no events
        _files[factory] = again.events()
    return _files[factory]


def _is_as_read(objects: Content) -> bool:
    """Whether the lists, and a column, of a collection are virtual, and so those of the file."""
    if not (objects.is_list and hasattr(objects, "offsets") and objects.content.is_record):
        return False
    columns = [column.data for column in objects.content.contents if column.is_numpy]
    read = [isinstance(data, np.ndarray) for data in (objects.offsets.data, *columns)]
    return not read[0] and not all(read[1:])


def referred_positions(
    array: Any, objects: Sequence[Step], owners: Sequence[Step]
) -> FilePositions | None:
    """Return where objects lie in the file, if it is the file's own index that refers to them.

    Parameters
    ----------
    array : awkward array or dict
        Collections by name.
    objects : sequence of Step
        The steps to the field that the index refers to, from outside in; the outermost lists are
        those in which it counts.
    owners : sequence of Step
        The steps to the index.

    Returns
    -------
    FilePositions or None
        None if the index is not the file's but somebody's own, if no file is known, or if the
        arrays have no data; then the columns that tell positions are touched.

    Raises
    ------
    InputError
        If it is the file's index, and it is not known to which collection objects belong.
    """
    steps = [step for step in (*objects, *owners) if isinstance(step[1], ak.Array)]
    lists = [step for step in steps[: len(objects)] if step[1].ndim > 1]
    if not lists or len(steps) < len(objects) + len(owners):
        return None
    name, records, _ = lists[0]
    file = file_of(records, *(_named(step) for step in steps))
    places = () if file is None else (file.layout, *_contents(file.layout).values())
    if not any(_has(place, rest) for place in places for _, _, rest in owners):
        return None
    # The innermost first, as coffea names collections, and others are searched for.
    sought = ((_name_in(file, step), *step[2]) for step in reversed(owners))
    is_sure = any(_has(file.layout, path) for path in sought)
    known, is_traced = _name_in(file, lists[0]), ak.backend(records) == "typetracer"
    if not known and POSITION not in records.fields:
        if is_traced:
            return None
        raise _unknown(name, "none of their columns is one of the file")
    fields = array if isinstance(array, dict) else array.fields
    events = {column: array[column] for column in EVENT_ID if column in fields}
    both = {**events, known: records}
    if is_traced:
        touch_position(both, known, file)
        return None
    positions = file_positions(both, known, file)
    if is_sure or POSITION in records.fields:  # whoever noted it means the file's index
        return positions
    owner, _, index = owners[-1]
    return replace(positions, rejection=_ambiguous(".".join([owner, *map(str, index)]), name))


def _named(step: Step) -> str:
    """Return the name that coffea has given to a collection, or else that in the path."""
    name, records, _ = step
    return records.layout.purelist_parameter("collection_name") or name


def _name_in(file: Any, step: Step) -> str:
    """Return the name of a collection in the file, though it has another now; or ``""``."""
    if (name := _named(step)) in file.fields:
        return name
    here, known = step[1].layout, _contents(file.layout).items()
    return next((each for each, content in known if _shares(here, content)), "")


def _has(node: Content, path: Path) -> bool:
    """Whether records have a field; an empty name is that of the records."""
    for name in filter(None, path):
        if name not in (contents := _contents(node)):
            return False
        node = contents[str(name)]
    return True


def _contents(node: Content) -> dict[str, Content]:
    """Return the fields below lists and indexes; sliced to their length, they would be read."""
    record = leaf(node)
    return dict(zip(record.fields, record.contents, strict=True)) if record.is_record else {}


def touch_position(events: Any, name: str, file: Any) -> None:
    """Touch what `file_positions` reads, in events and a file without data."""
    if POSITION in events[name].fields:
        ak.typetracer.touch_data(events[name][POSITION])
    elif file is not None and not _shares(events[name].layout, file[name].layout):
        for array in (events, file):
            for records, names in ((array, EVENT_ID), (array[name], (*_DIRECTION, "pt"))):
                fields = records if isinstance(records, dict) else records.fields
                for field in {*names}.intersection(fields):
                    ak.typetracer.touch_data(records[field])


def _shares(objects: Content, known: Content) -> bool:
    """Whether a column of a collection is still the file's own, behind indexes; nothing is read."""
    here, own = _contents(objects), _contents(known)
    return any(_is_same(here[name], own[name]) for name in {*here}.intersection(own))


def _is_same(here: Content, own: Content) -> bool:
    """Whether two columns have the same numbers in memory, or in the file."""
    if here is own or not (here.is_numpy and own.is_numpy):
        return here is own
    known, other = here.data, own.data
    if isinstance(known, np.ndarray) and isinstance(other, np.ndarray):
        is_same = known.ctypes.data == other.ctypes.data
    else:
        key = getattr(known, "buffer_key", None)
        is_same = key is not None and key == getattr(other, "buffer_key", None)
    return is_same and here.length == own.length  # which may have to be read


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
    counts = ak.to_numpy(ak.fill_none(ak.num(objects), 0))
    event, unknown = np.repeat(np.arange(len(counts)), counts), np.full(len(counts), -1)
    if POSITION in objects.fields:
        return FilePositions(event, _flat(objects[POSITION], -1), unknown, unknown)
    if file is None:
        layout = objects.layout
        while not layout.is_list and not layout.is_record:
            layout = layout.content
        if layout.is_list and layout.content.is_indexed:
            raise _unknown(name, "they were cut or sorted, and the events do not know their file")
        is_none = _flat(ak.Array(_numbered(objects.layout)), -1) < 0
        positions = np.where(is_none, -1, _flat(ak.local_index(objects, axis=1), -1))
        return FilePositions(event, positions, counts, unknown)
    known = file[name]
    number = (
        _flat(ak.Array(_numbered(objects.layout)), -1)
        if _shares(objects.layout, known.layout)
        else _by_direction(events, name, file, event)
    )
    in_file = ak.to_numpy(ak.num(known))
    offsets = offsets_of(in_file)
    is_there, row = number >= 0, np.searchsorted(offsets, number, side="right") - 1
    rows = unknown.copy()
    rows[event[is_there]] = row[is_there]
    if np.any(rows[event[is_there]] != row[is_there]):
        raise _unknown(name, "an event has objects of several events")
    sizes = np.where(rows < 0, -1, np.append(in_file, -1)[rows])
    if np.array_equal(counts, in_file) and np.array_equal(number, np.arange(len(number))):
        sizes = counts  # none was cut: an event without objects has none in the file
    return FilePositions(event, np.where(is_there, number - offsets[row], -1), sizes, rows)


def _numbered(node: Content) -> Content:
    """Return the number of each object in the records that lists and indexes lead to."""
    if node.is_record:
        return NumpyArray(np.arange(node.length))
    return node.copy(content=_numbered(node.content))


def _flat(numbers: Any, absent: float) -> Tensor:
    values: Tensor = ak.to_numpy(ak.fill_none(ak.flatten(numbers), absent))
    return values


def _by_direction(events: Any, name: str, file: Any, event: Int64) -> Int64:
    """Return the number in the file of each object, by its event, eta and phi; -1 for None."""
    objects, known = events[name], file[name]
    fields = events if isinstance(events, dict) else events.fields
    for field in EVENT_ID:
        if field not in fields or field not in file.fields:
            raise _unknown(name, f"without {field!r} events cannot be found in the file")
    both = {*objects.fields}.intersection(known.fields)
    for field in _DIRECTION:
        if field not in both:
            raise _unknown(name, f"they have no {field!r}")
    here, listed = ([ak.to_numpy(array[field]) for field in EVENT_ID] for array in (events, file))
    order, first, count = find_rows(here, listed)
    if np.any(count != 1):
        raise _unknown(name, f"{', '.join(EVENT_ID)} do not tell the events apart")
    rows, sizes = order[first], ak.to_numpy(ak.num(known))
    if np.array_equal(event, np.repeat(np.arange(len(rows)), sizes[rows])) and all(
        np.array_equal(_flat(objects[f], np.nan), _flat(known[rows][f], np.nan))
        for f in both.intersection((*_DIRECTION, "pt"))
    ):
        return ranges((np.cumsum(sizes) - sizes)[rows], sizes[rows])
    here, listed = (
        [row, *(_flat(array[field], np.nan) for field in _DIRECTION)]
        for row, array in ((rows[event], objects), (np.repeat(np.arange(len(sizes)), sizes), known))
    )
    order, first, count = find_rows(here, listed)
    is_none = _flat(ak.is_none(objects["eta"], axis=1), 0).astype(np.bool_)
    for wrong in np.flatnonzero((count != 1) & ~is_none)[:1].tolist():
        many = f"the file has {count[wrong]} of them with the eta and phi of one"
        raise _unknown(name, f"{many} in event {event[wrong]}")
    return np.where(is_none, -1, np.append(order, -1)[first])


def _unknown(name: str, why: str) -> InputError:
    return InputError(
        f"the objects of {name!r} are not those of the file any more, and indices of the file "
        f"count in its own lists; where these objects were in them is not known: {why}. Note it "
        f"before you cut or sort: {_note(name)}"
    )


def _ambiguous(index: str, name: str) -> InputError:
    return InputError(
        f"{index!r} has the name of an index of the file, but not in a collection of the file: it "
        f"may count in the file's lists, or in {name!r} as they are now, which leads to other "
        "objects. If it counts in the file, note where they were before you cut or sort: "
        f"{_note(name)}; otherwise, give it a name that the file does not have"
    )


def _note(name: str) -> str:
    return f"events[{name!r}, {POSITION!r}] = ak.local_index(events[{name!r}], axis=1)"
