"""The arrays of a call, and the columns in them, taken apart where paths lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import awkward as ak
import numpy as np
from awkward.contents import Content, EmptyArray, IndexedOptionArray, ListOffsetArray, NumpyArray
from awkward.index import Index64

from sonic_coffea.errors import FieldError, InputError, nearest
from sonic_coffea.layouts._expressions import Path, text_of
from sonic_coffea.layouts._file_positions import FilePositions, file_of, referred_positions
from sonic_coffea.layouts._frames import records_of
from sonic_coffea.layouts._structure import (
    STRINGS,
    Int64,
    Levels,
    Structure,
    Tensor,
    down,
    merged,
    numbered,
    read,
    through,
    whole,
    without_options,
)


@contextmanager
def of_field(path: Path) -> Iterator[None]:
    """Name the field in the errors of what is made of it."""
    try:
        yield
    except FieldError:
        raise
    except InputError as error:
        raise InputError(f"field {text_of(path)!r} {error.message}") from None


class Source:
    """Records, or a dict of arrays, of a call; what fields have in common is looked up once.

    Parameters
    ----------
    array : awkward array or dict
        The arrays.
    part : str, optional
        A collection that paths need not name.
    """

    def __init__(self, array: Any, part: str | None = None) -> None:
        array = records_of(array)
        self._array, self._part = array, part
        self._is_traced = is_tracer(array)
        self._places: dict[Path, Structure] = {}
        self._read: dict[tuple[int, bool], tuple[Structure, tuple[Tensor, slice | Int64]]] = {}

    def within(self, part: str) -> Source:
        """Return the same, in which a part's collection need not be named."""
        return Source(self._array, part)

    def place(self, path: Path, *, reduction: str = "", lists: bool = False) -> Structure:
        """Return where the numbers, strings or records of a path are; only what is above is read.

        Of a typetracer, the column is touched, or for `lists` what is above it, and it is empty.

        Raises
        ------
        FieldError
            Naming the nearest fields that there are.
        InputError
            If types are mixed in a way that no tensor has.
        """
        if reduction == "metadata":
            return self._constant(text_of(path))
        with of_field(path):
            full = path if self._part is None else self._full(path)
            if self._is_traced:
                return self._traced(full, lists=lists).place(full, reduction=reduction)
            place = self._place(full)
            return _reduced(place, reduction) if reduction else place

    def numbers(self, place: Structure, *, strings: bool = False) -> tuple[Tensor, slice | Int64]:
        """Return the numbers, or strings, of a place, which inputs share, and where they lie.

        They are read once: an array with a cache of its own may forget them.
        """
        key = id(place), strings
        if key not in self._read:
            self._read[key] = place, numbers(place, strings=strings)
        return self._read[key][1]

    def _constant(self, name: str) -> Structure:
        """Return a number of the events' metadata for each event."""
        arrays = list(self._array.values()) if isinstance(self._array, dict) else [self._array]
        known = next(filter(None, map(_metadata, arrays)), None)
        if known is None:
            raise InputError(
                f"no metadata with {name!r}, as the arrays have none; give coffea's events, or "
                "ak.with_parameter(array, 'metadata', {…})"
            )
        if name not in known:
            raise FieldError(f"the events' metadata have no {name!r}; {nearest(name, known)}")
        value = known[name]
        with suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
        if not isinstance(value, (int, float, np.number)):
            raise InputError(f"{name!r} of the events' metadata is {value!r}; expected a number")
        return whole(NumpyArray(np.full(0 if self._is_traced else len(arrays[0]), value)))

    def _traced(self, path: Path, *, lists: bool) -> Source:
        """Touch a column of typetracers, and return arrays of length zero that have it."""
        names = tuple(step for step in path if isinstance(step, str))
        column = self._column(names)
        ak.typetracer.touch_data(ak.Array(_without_leaves(column) if lists else column))
        array, inner = self._array, names
        if isinstance(array, dict):
            array, inner = array[names[0]], names[1:]
        form = _layout(array).form.select_columns(".".join(inner)) if inner else column.form
        zero = form.length_zero_array(highlevel=False)
        if inner and not form.columns():  # what a behaviour defines
            source = Source(None)
            source._places[names] = whole(column.form.length_zero_array(highlevel=False))
            return source
        return Source({names[0]: zero} if isinstance(self._array, dict) else zero)

    def file_positions(self, path: Path, index: Path) -> FilePositions | None:
        """Return where the objects of a collection lie in the file that an index counts in."""
        if self._is_traced:
            return None
        return referred_positions(self._array, ".".join(map(str, path)), ".".join(map(str, index)))

    def _full(self, path: Path) -> Path:
        """Return a path that begins with the collection of the part."""
        part, first = str(self._part), str(path[0])
        if part not in self.names():
            return path
        within = first in self.names(part)
        if first in self.names() and within:
            text = text_of(path)
            raise FieldError(
                f"field {text!r} is one of the record and one of {part!r}; write "
                f"{f'{part}.{text}'!r}, or give the part another name"
            )
        return (part, *path) if within or first not in self.names() else path

    def names(self, part: str | None = None) -> list[str]:
        """Return the fields of a collection, or of all there is."""
        if part is None and isinstance(self._array, dict):
            return list(self._array)
        return list((self._column((part,)) if part else _layout(self._array)).fields)

    def _place(self, path: Path) -> Structure:
        if path not in self._places:
            self._places[path] = self._reached(path)
        return self._places[path]

    def _reached(self, path: Path) -> Structure:
        if not path:
            return whole(_layout(self._array))
        step = path[-1]
        if isinstance(step, int):
            return _picked(self._place(path[:-1]), step, text_of(path))
        if len(path) == 1 and isinstance(self._array, dict):
            return self.taken_apart(path)
        above = self._place(path[:-1])
        node = above.node
        if node is not None and node.is_record and step in node.fields:
            field = node.contents[node.field_to_index(step)]
            return _with_gaps(
                down(above.events, above.levels, field, above.at), "None", len(above.levels)
            )
        if any(isinstance(name, int) for name in path):
            raise _missing(step, path, list(node.fields) if node is not None else [])
        return self.taken_apart(path)

    def taken_apart(self, path: Path) -> Structure:
        """Return a column, taken apart from the outermost axis on."""
        return _with_gaps(whole(self._column(path)), "plain")

    def _column(self, path: Path) -> Content:
        """Return the column at a path without indices; nothing is read yet."""
        array: Any = self._array
        steps = list(map(str, path))
        if isinstance(array, dict):
            if steps[0] not in array:
                raise _missing(steps[0], path, list(array))
            array = array[steps.pop(0)]
        layout = _layout(array)
        for name in steps:
            known = name in layout.fields
            layout = layout[name] if known else _property(layout, array, name, path)
        return layout


def _metadata(array: Any) -> Any:
    """Return the metadata of coffea's events, also of objects in them; None if there are none."""
    if not isinstance(array, ak.Array):
        return None
    known = array.layout.purelist_parameter("metadata")
    file = file_of(array) if known is None else None
    return known if file is None else file.layout.purelist_parameter("metadata")


def is_tracer(arrays: Any) -> bool:
    """Whether arrays, or any of a dict, have a type and no data."""
    each = arrays.values() if isinstance(arrays, dict) else [arrays]
    return any(isinstance(a, ak.Array) and a.layout.backend.name == "typetracer" for a in each)


def is_lazy(arrays: Any) -> bool:
    """Whether arrays, or any of a dict, are dask-awkward's."""
    each = arrays.values() if isinstance(arrays, dict) else [arrays]
    # No need to import it for those who do not use it.
    return any(type(a).__module__.partition(".")[0] == "dask_awkward" for a in each)


def over_partitions(function: Callable[[Any], Any], arrays: Any, *, label: str, token: str) -> Any:
    """Apply a function of arrays to every partition.

    Parameters
    ----------
    function : callable
        Of an array, or of a dict of arrays; also of typetracers.
    arrays : dask_awkward.Array or dict
        One array, or a dict of arrays with the same partitions.
    label : str
        What dask calls the task.
    token : str
        What tells this function from others with this label.

    Raises
    ------
    InputError
        If only some of the arrays are lazy.
    """
    import dask_awkward
    from dask.base import tokenize

    each = (arrays,)
    if isinstance(arrays, dict):
        for name, array in arrays.items():
            if not is_lazy(array):
                raise InputError(f"array {name!r} is not lazy, as others are; compute all or none")
        function, each = partial(_of_dict, function, tuple(arrays)), tuple(arrays.values())
    key = tokenize(token, *(array.name for array in each))
    return dask_awkward.map_partitions(function, *each, label=label, token=key)


def _of_dict(function: Callable[[Any], Any], names: tuple[str, ...], *arrays: Any) -> Any:
    return function(dict(zip(names, arrays, strict=True)))


def _without_leaves(node: Content) -> Content:
    """Return the lists and options of a column."""
    if node.is_list or node.is_option or node.is_indexed:
        is_last = node.is_list and node.content.purelist_depth == 1
        return node.copy(
            content=EmptyArray().to_typetracer() if is_last else _without_leaves(node.content)
        )
    return node


def _with_gaps(place: Structure, gap: str, above: int = 0) -> Structure:
    """Return numbers of objects: one that is None is missing, and its object is not."""
    first = max(len(without_options(place.levels)), above)
    if place.node is None or place.node.is_record or first == len(place.levels):
        return place
    options = (replace(level, gap=level.gap or gap) for level in place.levels[first:])
    return replace(place, levels=(*place.levels[:first], *options))


def _layout(array: Any) -> Content:
    # What awkward does for everything else costs more than the rest of a small input.
    if isinstance(array, ak.Array):
        return array.layout
    if isinstance(array, ak.Record):
        raise InputError("expected an array of records, got one record; array[i : i + 1] has one")
    layout = None
    # To awkward, one number is an array of one, and a set is in any order.
    if not isinstance(array, (int, float, complex, str, bytes, np.generic, AbstractSet)):
        with suppress(TypeError, ValueError):
            layout = ak.to_layout(array)
    if not isinstance(layout, Content):
        raise InputError(f"expected an array, or a dict of arrays, got {type(array).__name__}")
    return layout


def _property(layout: Content, array: Any, name: str, path: Path) -> Content:
    """Read a property that a behaviour defines, such as a vector's ``pt`` or a cross-reference."""
    behaviour: Mapping[Any, Any] | None = getattr(array, "behavior", None)
    wrapped = ak.Array(layout, behavior=behaviour, attrs=getattr(array, "attrs", None))
    if name.startswith("_") or not hasattr(type(wrapped), name):
        raise _missing(name, path, layout.fields)
    value = getattr(wrapped, name)
    if callable(value) or not isinstance(value, ak.Array):
        raise _missing(name, path, layout.fields)
    return ak.to_layout(value)


def _missing(name: str, path: Path, known: list[str]) -> FieldError:
    inside = f" (in {text_of(path)!r})" if path != (name,) else ""
    if not known:
        return FieldError(
            f"no field {name!r}{inside}, as the array has none; give records, or a dict of columns "
            f"such as {{{name!r}: array}}"
        )
    return FieldError(f"no field {name!r}{inside}; {nearest(name, known)}")


def innermost(place: Structure) -> tuple[Levels, Int64, Int64 | None]:
    """Return the levels above the innermost lists, these lists' offsets, and options in them."""
    levels = without_options(place.levels)
    if not levels:
        raise InputError(
            f"has one number where a list is needed (its type is {place.type}); a jagged axis is "
            "expected, such as the constituents of a jet, and an index picks one object of it; for "
            "one number per object use Row"
        )
    return levels[:-1], levels[-1].data, merged(place.levels[len(levels) :])


def _picked(place: Structure, pick: int, text: str) -> Structure:
    """Return one object of each list; -1 is the last."""
    levels, offsets, option = innermost(place)
    at = offsets[:-1] + pick if pick >= 0 else offsets[1:] + pick
    at = np.where((at >= offsets[:-1]) & (at < offsets[1:]), at, -1)
    if option is not None:
        at = through(option, at)
    chosen = at[at >= 0]
    chosen = chosen + place.at.start if isinstance(place.at, slice) else place.at[chosen]
    levels = (*levels, numbered(at >= 0, gap=text))
    return down(place.events, levels, place.node, chosen)


def _reduced(place: Structure, reduction: str) -> Structure:
    """Return one number of each list: of a record, how many elements it has."""
    levels, offsets, option = innermost(place)
    content: Content = NumpyArray(np.diff(offsets))
    if reduction != "num":
        data, at = numbers(place)
        values = np.asarray(data[at])
        content = NumpyArray(values.astype(np.float32) if values.dtype == np.float16 else values)
        if option is not None:
            content = IndexedOptionArray(Index64(option), content)
        lists = ak.Array(ListOffsetArray(Index64(offsets), content))
        content = getattr(ak, reduction)(lists, axis=1).layout
    return down(place.events, levels, content, slice(0, len(offsets) - 1))


def numbers(place: Structure, *, strings: bool = False) -> tuple[Tensor, slice | Int64]:
    """Return the numbers, or strings, below some levels, and where the elements lie in them.

    Raises
    ------
    InputError
        If there is something else.
    """
    node, at = place.node, place.at
    assert node is not None  # noqa: S101
    if node.is_unknown:
        return np.zeros(node.length, object if strings else np.float64), at
    if place.is_string and strings:
        return _strings(node, at), slice(None)
    if not node.is_numpy:
        raise not_numbers(node)
    if strings:
        raise InputError(
            f"holds {node.dtype} where strings are sent; expected strings, or a layout of numbers"
        )
    data = read(node)
    if data.dtype.kind not in "fiub":
        raise InputError(f"has dtype {data.dtype}; expected a number or a bool")
    return data, at


def not_numbers(node: Content) -> InputError:
    """Return the error for what is something else."""
    if node.is_record:
        names = ", ".join(node.fields)
        return InputError(f"is a record with fields {names}; expected one of these fields")
    if node.parameter("__array__") in STRINGS:
        return InputError("holds strings; expected numbers")
    if node.is_union:
        return InputError(f"mixes types ({node.form.type}); expected one numeric type")
    return InputError(f"has type {node.form.type}; expected numbers")


def _strings(node: Content, at: slice | Int64) -> Tensor:
    """Return some strings as bytes."""
    lists = node[at].to_ListOffsetArray64(start_at_zero=True)
    offsets = read(lists.offsets)
    text = np.ascontiguousarray(read(lists.content)).tobytes()
    strings = np.empty(len(offsets) - 1, object)
    strings[:] = [text[a:b] for a, b in pairwise(offsets)]
    return strings
