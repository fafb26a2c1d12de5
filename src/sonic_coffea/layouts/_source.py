"""The arrays of a call, data frames among them, and their columns, taken apart where paths lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import awkward as ak
import numpy as np
from awkward.contents import Content, NumpyArray

from sonic_coffea.errors import ConfigError, FieldError, InputError, nearest, shortened
from sonic_coffea.layouts._expressions import Path, text_of
from sonic_coffea.layouts._file_positions import FilePositions, file_of, referred_positions
from sonic_coffea.layouts._structure import (
    STRINGS,
    Int64,
    Place,
    Structure,
    Tensor,
    down,
    read,
    through,
    whole,
    widened,
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


@contextmanager
def within(what: str) -> Iterator[None]:
    """Name what an error of a declaration, or of arrays, is in."""
    try:
        yield
    except (ConfigError, InputError) as error:
        raise error.within(what) from None


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
        self._array, self._part = records_of(array), part
        self._is_traced = is_tracer(self._array)
        self._places: dict[Path, Place] = {}
        self._read: dict[tuple[Path, str, bool], tuple[Place, Tensor, slice | Int64]] = {}

    def has(self, path: Path) -> bool:
        """Whether there is a field; it is not read."""
        *above, name = (step for step in self._full(path) if isinstance(step, str))
        with suppress(FieldError):
            return name in _fields(self._column(tuple(above)))
        return False

    def within(self, part: str) -> Source:
        """Return the same, in which a part's collection need not be named."""
        return Source(self._array, part)

    def place(self, path: Path, reduction: str = "", *, lists: bool = False) -> Place:
        """Return where the numbers, strings or records of a path are; only what is above is read.

        Of a typetracer, the column is touched, or for `lists` what is above it, and it is empty.

        Raises
        ------
        FieldError
            Naming the nearest fields that there are.
        InputError
            If types are mixed in a way that no tensor has.
        """
        with of_field(path):
            return self._find(path, reduction, lists=lists)

    def numbers(
        self, path: Path, reduction: str = "", *, strings: bool = False
    ) -> tuple[Place, Tensor, slice | Int64]:
        """Return the place of a path, its numbers or strings, and where the elements lie in them.

        They are read once, and inputs share them: an array with a cache of its own may forget them.
        """
        key = path, reduction, strings
        known = self._read.get(key)
        if known is None:
            try:
                place = self._find(path, reduction)
                known = self._read[key] = place, *numbers(place, strings=strings)
            except InputError:
                with of_field(path):  # whose entry would take as long as all of this
                    raise
        return known

    def _find(self, path: Path, reduction: str, *, lists: bool = False) -> Place:
        if reduction == "metadata":
            return self._constant(text_of(path))
        full = self._full(path)
        if self._is_traced:
            column = self._column(tuple(step for step in full if isinstance(step, str)))
            if (lists or reduction == "num") and (depth := _layout(column).purelist_depth) > 1:
                column = ak.num(column, axis=depth - 1)
            ak.typetracer.touch_data(column)
        place = self._place(full)
        return _reduced(place, reduction) if reduction else place

    def _constant(self, name: str) -> Place:
        """Return a number of the events' metadata for each event."""
        arrays = list(self._array.values()) if isinstance(self._array, dict) else [self._array]
        known: Any = next(filter(None, map(metadata_of, arrays)), {})
        if name not in known:
            hint = "give coffea's events of one file, or ak.with_parameter(array, 'metadata', {…})"
            hint = nearest(name, known) if known else hint
            raise FieldError(f"the events' metadata have no {name!r}; {hint}")
        entry = known[name]
        try:
            # Python reads "2016_1" as 20161.
            value = float(entry if "_" not in str(entry) else "no number")
        except (TypeError, ValueError):
            raise InputError(
                f"of the events' metadata is {entry!r}; expected a number; add one to the "
                "fileset's metadata, such as 'era': 1"
            ) from None
        return whole(NumpyArray(np.full(0 if self._is_traced else len(arrays[0]), value)))

    def _column(self, path: Path) -> Any:
        """Return the array at a path of names, in its lists: a behaviour may compute over them."""
        array = self._array
        for name in path:
            known = name in _fields(array)
            array = array[name] if known else _property(array, str(name), path)
        return array

    def _whole(self, array: Any, gap: str = "") -> Place:
        """Return all elements of an array; none of a typetracer."""
        layout = _layout(array)
        if self._is_traced:
            layout = layout.form.length_zero_array(highlevel=False)
        return whole(layout, gap)

    def file_positions(self, path: Path, index: Path) -> FilePositions | None:
        """Return where the objects that have a field lie in the file that an index counts in."""
        return referred_positions(self._array, self._on(path), self._on(index))

    def _on(self, path: Path) -> list[tuple[str, Any, Path]]:
        """Return the name, the records, and the rest of the path, of each step from outside in."""
        names = tuple(step for step in self._full(path) if isinstance(step, str))
        steps = range(int(isinstance(self._array, dict)), len(names))
        return [(".".join(names[:n]), self._column(names[:n]), names[n:]) for n in steps]

    def _full(self, path: Path) -> Path:
        """Return a path that begins with the collection of the part, if there is one."""
        part = self._part
        if part is None or part not in (names := _fields(self._array)):
            return path
        first = path[0]
        is_in_part = first in _fields(self._array[part])
        if first in names and is_in_part:
            text = text_of(path)
            raise FieldError(
                f"field {text!r} is one of the record and one of {part!r}; write "
                f"{f'{part}.{text}'!r}, or give the part another name"
            )
        return (part, *path) if is_in_part or first not in names else path

    def _place(self, path: Path) -> Place:
        """Return the place of a path; what is above it is looked up once."""
        place = self._places.get(path)
        if place is None:
            place = self._places[path] = self._reached(path)
        return place

    def _reached(self, path: Path) -> Place:
        if not path:
            return self._whole(self._array)
        if isinstance(self._array, dict):
            if path[0] not in self._array:
                raise _missing(path[0], path, list(self._array))
            if len(path) == 1:
                return self._whole(self._array[path[0]], "plain")
        above, step = self._place(path[:-1]), path[-1]
        if isinstance(step, int):
            return _picked(above, step, text_of(path))
        node, at = above.node, above.at
        if step in (names := node.fields):
            node = node.contents[names.index(step)] if node.is_record else node[step]
        elif any(isinstance(name, int) for name in path):
            objects, pick = path[:-2], path[-2]
            with suppress(FieldError):  # a property, computed in the lists of the objects
                of_all = self._place((*objects, step))
                if isinstance(pick, int) and of_all.rows.depth == self._place(objects).rows.depth:
                    return _picked(of_all, pick, text_of(path[:-1]))
            raise _missing(step, path, names)
        else:
            return _of_objects(self._whole(self._column(path), "plain"), above.rows)
        return down(above.rows, node, at, "None")


def _of_objects(place: Place, objects: Structure) -> Place:
    """Return numbers that a behaviour has of objects: one that is None is missing."""
    rows = objects.all_places
    if rows.difference(place.rows.all_places) is not None:
        return place
    if place.rows.gaps:  # a property may have numbers of objects that are None, but not of others
        nothing = objects.only(np.zeros(len(objects), np.bool_), "None")
        codes = np.where(place.rows.absent, nothing.codes, place.rows.codes)
        rows = replace(nothing, codes=codes)
    return place._replace(rows=rows)


def metadata_of(array: Any) -> Any:
    """Return the metadata of coffea's events, also of objects in them; None if there are none."""
    if not isinstance(array, ak.Array):
        return None
    known, record = map(array.layout.purelist_parameter, ("metadata", "__record__"))
    file = file_of(array) if known is None else None
    # Events without metadata are of several files, and know the first of them.
    if file is None or record == file.layout.purelist_parameter("__record__"):
        return known
    return file.layout.purelist_parameter("metadata")


def is_tracer(arrays: Any) -> bool:
    """Whether arrays, or any of a dict, or of an input's dict in it, have a type and no data."""
    if isinstance(arrays, dict):
        return any(map(is_tracer, arrays.values()))
    return isinstance(arrays, ak.Array) and arrays.layout.backend.name == "typetracer"


def is_lazy(arrays: Any) -> bool:
    """Whether arrays, or any of a dict, are dask-awkward's."""
    each = arrays.values() if isinstance(arrays, dict) else [arrays]
    # No need to import it for those who do not use it.
    return any(type(a).__module__.partition(".")[0] == "dask_awkward" for a in each)


def has_no_data(arrays: Any) -> bool:
    """Whether arrays, or any of a dict, are of a graph or of a trace, and have no length."""
    return is_lazy(arrays) or is_tracer(arrays)


def over_partitions(function: Callable[[Any], Any], arrays: Any, *, label: str, token: str) -> Any:
    """Apply a function of arrays, or to every partition of lazy ones.

    Parameters
    ----------
    function : callable
        Of an array, or of a dict of arrays; also of typetracers.
    arrays : array or dict
        One array, or a dict of arrays; if any is lazy, all are, with the same partitions.
    label : str
        What dask calls the task.
    token : str
        What tells this function from others with this label.

    Raises
    ------
    InputError
        If only some of the arrays are lazy, or they have different numbers of partitions.
    """
    if not is_lazy(arrays):
        return function(arrays)
    import dask_awkward
    from dask.base import tokenize

    named = {**arrays} if isinstance(arrays, dict) else {"": arrays}
    for name, array in named.items():
        if not is_lazy(array):
            raise InputError(f"array {name!r} is not lazy, as others are; compute all or none")
    counts = {name: array.npartitions for name, array in named.items()}
    if len(set(counts.values())) > 1:  # dask would repeat a single one for all others
        listed = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise InputError(
            f"lazy arrays have different numbers of partitions ({listed}); call this with all "
            "partitions, and choose some of the result, such as result.partitions[0]"
        )
    each = named if isinstance(arrays, dict) else arrays
    key = tokenize(token, tuple(named), *(array.name for array in named.values()))
    return dask_awkward.map_partitions(function, each, label=label, token=key)


def lazy_file(array: Any) -> Any:
    """Return lazy events as their file has them, or None for arrays that know no file.

    Those that coffea keeps change with the events when a collection is set in place.
    """
    from dask.highlevelgraph import HighLevelGraph
    from dask_awkward.layers import AwkwardInputLayer
    from dask_awkward.lib.core import new_array_object

    kept = getattr(array, "attrs", {}).get("@original_array")
    if kept is None:
        return None
    layers = kept.dask.layers
    read = [name for name, layer in layers.items() if isinstance(layer, AwkwardInputLayer)]
    if len(read) != 1:
        raise InputError(
            "the events were changed in place, and have columns of other files; set them by "
            "dask_awkward.with_field, which makes other events"
        )
    (name,) = read
    graph, source = HighLevelGraph({name: layers[name]}, {name: set()}), layers[name].io_func
    meta = source.mock()
    file = new_array_object(graph, name, meta=meta, divisions=kept.divisions)
    if getattr(source, "return_report", False):  # beside the events, of files that cannot be read
        return file.map_partitions(itemgetter(0), meta=meta)
    return file


def _layout(array: Any) -> Content:
    # What awkward does for everything else costs more than the rest of a small input.
    if isinstance(array, ak.Array):
        return array.layout
    layout, values = None, records_of(array)
    if not isinstance(array, AbstractSet):  # which is in any order
        with suppress(TypeError, ValueError, RuntimeError):  # of integers that are too large
            if _is_frame(values, "Series"):
                values = _values_of(array)
            if isinstance(values, np.ndarray):  # awkward takes the byte order of this machine alone
                values = values.astype(values.dtype.newbyteorder("="), copy=False)
            layout = ak.to_layout(values, primitive_policy="error", string_policy="error")
    if not isinstance(layout, Content):
        kind = type(array).__name__
        hint = "; array[i : i + 1] is an array of one record" * isinstance(array, ak.Record)
        if isinstance(array, (np.ndarray, np.generic)):
            kind += f" of {array.dtype} {list(array.shape)}"
            # Such as uproot's lists, where NumPy arrays are asked for.
            hint = "; ak.from_iter makes an array of objects" * (array.dtype == object)
        raise InputError(f"expected an array, or a dict of arrays, got {kind}{hint}")
    return layout


def array_of(objects: Any) -> ak.Array:
    """Return an array, a data frame, a column of one, or a dict of columns as an awkward array."""
    if isinstance(objects, ak.Array):
        return objects
    if isinstance(objects, dict):
        return ak.Array({name: array_of(column) for name, column in objects.items()})
    return ak.Array(_layout(objects))


def _fields(array: Any) -> list[str]:
    return list(array) if isinstance(array, dict) else list(_layout(array).fields)


def _property(array: Any, name: str, path: Path) -> ak.Array:
    """Read a property that a behaviour defines, such as a vector's ``pt`` or a cross-reference."""
    is_known = hasattr(type(array), name) and not name.startswith("_")
    try:
        value = getattr(array, name) if is_known else None
    except (AttributeError, RuntimeError) as error:  # such as a match with generated jets, in data
        raise InputError(f"cannot be computed: {error}") from None
    if not isinstance(value, ak.Array):
        raise _missing(name, path, _fields(array))
    return value


def _missing(name: Any, path: Path, known: list[str]) -> FieldError:
    inside = f" (in {text_of(path)!r})" if path != (name,) else ""
    if known:
        dotted = next((k for k in known if str(k).startswith((f"{name}.", f"{name}["))), None)
        hint = nearest(name, known)
        if dotted is not None:
            names = *path[: path.index(name)], dotted
            hint = f"a name that holds dots or brackets is written in a tuple, as in [{names}]"
        return FieldError(f"no field {name!r}{inside}; {hint}")
    return FieldError(
        f"no field {name!r}{inside}, as the array has none; give records, or a dict of columns "
        f"such as {{{name!r}: array}}"
    )


def innermost(place: Place) -> tuple[Structure, Structure]:
    """Return the rows that have the innermost lists, and those in them."""
    rows = place.rows
    if rows.outer is None:
        kind = "record" if place.node.is_record else "number"
        raise InputError(
            f"has one {kind} where a list is needed; a jagged axis is expected, such as the "
            "constituents of a jet, and an index picks one object of it; for one number per object "
            "use Row"
        )
    return rows.outer, rows


def _picked(place: Place, pick: int, text: str) -> Place:
    """Return one object of each list; -1 is the last."""
    rows, lists = innermost(place)
    starts, stops = lists.offsets[:-1], lists.offsets[1:]
    at = starts + pick if pick >= 0 else stops + pick
    at = np.where((at >= starts) & (at < stops), at, -1)
    if lists.gaps:
        at = through(lists.codes, at)
    chosen = at[at >= 0]
    chosen = chosen + place.at.start if isinstance(place.at, slice) else place.at[chosen]
    return down(rows.only(at >= 0, text), place.node, chosen)


def _reduced(place: Place, reduction: str) -> Place:
    """Return one number of each list: of a record, how many elements it has."""
    rows, inner = innermost(place)
    content: Content = NumpyArray(inner.counts)
    if reduction != "num":
        data, at = numbers(place)
        values = widened(data[at])
        outer = Structure(np.array([0, len(inner.counts)]))
        lists = replace(inner, outer=outer).unflatten(NumpyArray(values))
        reduced = getattr(ak, reduction)(lists, axis=1)
        if reduction in ("max", "min") and np.isnan(values).any():  # which awkward leaves out
            nan = values.dtype.type(np.nan)
            reduced = ak.where(ak.any(np.isnan(lists), axis=1), nan, reduced)
        content = reduced.layout
        if reduction == "sum" and content.dtype.kind in "iu":
            real = ak.to_numpy(ak.sum(ak.values_astype(lists, np.float64), axis=1))
            if np.any(abs(read(content) - real) > 2.0**62):  # off by 2**64
                raise InputError(f"has a sum that {content.dtype} cannot hold")
    return down(rows, content, slice(0, len(inner.counts)), "None")


def numbers(place: Place, *, strings: bool = False) -> tuple[Tensor, slice | Int64]:
    """Return the numbers, or strings, of a place, and where the elements lie in them.

    Raises
    ------
    InputError
        If there is something else.
    """
    node, at = place.node, place.at
    if node.is_unknown:
        return np.zeros(node.length), at
    if strings and node.parameter("__array__") in STRINGS:
        lists = node[at].to_ListOffsetArray64(start_at_zero=True)
        text = np.ascontiguousarray(read(lists.content)).tobytes()
        texts = np.empty(lists.length, object)
        texts[:] = [text[start:stop] for start, stop in pairwise(read(lists.offsets))]
        return texts, slice(None)
    if node.is_record:
        raise InputError(f"is a record; expected one of its fields; {nearest('', node.fields)}")
    data = read(node) if node.is_numpy and not strings else None
    if data is None or data.dtype.kind not in "fiub":
        expected = "strings, or a layout of numbers" if strings else "numbers"
        raise InputError(f"has type {shortened(place.node.form.type)}; expected {expected}")
    return data, at


def records_of(objects: Any) -> Any:
    """Return a data frame as records, one for each row; anything else as it is."""
    if not _is_frame(objects):
        return objects
    names = list(objects.columns)
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"expected a data frame whose columns have strings as names, got {names}")
    if len(set(names)) < len(names):
        raise InputError(f"expected a data frame whose columns have different names, got {names}")
    columns = {}
    for name, series in objects.items():
        # No layout could read it, such as times with zones, or integers that are too large.
        with suppress(InputError):
            columns[name] = _layout(series)
    return ak.zip(columns, depth_limit=1) if columns else ak.Array([{}] * len(objects))


def _values_of(series: Any) -> Any:
    """Return the values of a column; None where pandas has NA, or an object that stands for it."""
    if isinstance(series.dtype, np.dtype) and series.dtype != object:
        return series.to_numpy()
    return ak.from_iter(series.astype(object).where(series.notna(), None))


def only_columns(array: ak.Array, columns: Sequence[str]) -> ak.Array:
    """Return an array without the fields of records that are in none of the columns."""
    pruned = _pruned(array.layout, columns)
    return ak.Array(pruned, behavior=array.behavior, attrs=array.attrs)


def _pruned(node: Content, columns: Sequence[str]) -> Content:
    if node.is_list or node.is_option or node.is_indexed:
        return node.copy(content=_pruned(node.content, columns))
    if not node.is_record or node.is_tuple:
        return node
    kept = {}
    for name, content in zip(node.fields, node.contents, strict=True):
        inner = [column[len(name) + 1 :] for column in columns if is_under(column, name)]
        if inner:
            kept[name] = content if "" in inner else _pruned(content, inner)
    if not all(any(is_under(column, name) for name in kept) for column in columns):
        return node  # a behaviour may compute one of them, of any fields
    # Without its name: behaviours may refuse a record that lacks fields.
    others = {key: value for key, value in node.parameters.items() if key != "__record__"}
    return node.copy(contents=[*kept.values()], fields=[*kept], parameters=others)


def is_under(column: str, name: str) -> bool:
    """Whether a column is a field, or in that; names may hold dots."""
    return f"{column}.".startswith(f"{name}.")


def _is_frame(objects: Any, *names: str) -> bool:
    # No need to import pandas for those who do not use it.
    kind = type(objects)
    known = kind.__name__ in ("DataFrame", *names)
    return known and kind.__module__.partition(".")[0] == "pandas"


def check_index(objects: Any, beside: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Refuse data frames and Series with different labels of their rows, which count by position.

    They are the objects, or those of a dict, in which an input may have a dict of columns; and what
    is given beside them.

    Raises
    ------
    InputError
        Naming two of them.
    """
    named = objects if isinstance(objects, dict) else {"the objects": objects}
    each = (a if isinstance(a, dict) else {name: a} for name, a in named.items())
    pairs = [pair for columns in (*each, beside) for pair in columns.items()]
    labelled = [(name, array.index) for name, array in pairs if _is_frame(array, "Series")]
    for name, index in labelled[1:]:
        first, expected = labelled[0]
        if not index.equals(expected):
            raise InputError(
                f"{first} and {name} have other indices, as after sort_values of one of "
                "them; bring their rows into one order, or give to_numpy() of those that are in it"
            )


def without_fields(array: Any) -> bool:
    """Whether it is an array of numbers or strings, and not of records."""
    return isinstance(array, (ak.Array, np.ndarray)) and not _fields(array)


def giving_back(objects: Any) -> Callable[[ak.Array], Any]:
    """Return what makes of scores a data frame, or a dict of NumPy arrays, as the objects are."""
    if _is_frame(objects):
        return partial(_framed, objects[[]])  # its index
    is_dict = isinstance(objects, dict) and bool(objects)
    if is_dict and all(isinstance(values, np.ndarray) for values in objects.values()):
        return _plain
    return lambda scores: scores


def _framed(empty: Any, scores: ak.Array) -> Any:
    each = columns_of(scores)
    columns = {name: _column(values) for name, values in each}
    if len(columns) < len(each):
        names = ", ".join(name for name, _ in each)
        raise ConfigError(
            f"two columns of scores have one name: {names}; rename a label in the declaration"
        )
    frame = type(empty)(columns, index=empty.index)
    frame.attrs.update(scores.attrs)
    return frame


def _column(scores: ak.Array) -> Any:
    """Return a column of a data frame; of scores that are arrays, one or None in each row."""
    plain = _plain(scores)
    if np.ma.isMaskedArray(plain) and plain.dtype.kind in "iu":  # pandas makes them real numbers
        numbers = plain.compressed()
        # Python compares them exactly; a cast back of 2**63 depends on the processor.
        if numbers.astype(np.float64).tolist() != numbers.tolist():
            raise InputError(
                f"scores of type {numbers.dtype} beside None are float64 in a data frame, which "
                "rounds them; give awkward arrays"
            )
    if plain.ndim < 2:
        return plain
    absent = ak.to_numpy(ak.is_none(scores)).tolist()
    return [None if is_none else row for row, is_none in zip(plain, absent, strict=True)]


def _plain(scores: ak.Array) -> Any:
    """Return an array of NumPy, or a dict of them for records; None makes a masked array."""
    if scores.fields:
        return {name: _plain(scores[name]) for name in scores.fields}
    try:
        return ak.to_numpy(scores)
    except ValueError:  # lists of several lengths
        lists = np.empty(len(scores), object)
        lists[:] = [None if each is None else ak.to_numpy(each) for each in scores]
        return lists


def columns_of(scores: ak.Array, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the columns of scores: labels, after the output's name where there are several."""
    if not scores.fields:
        return [(prefix or "score", scores)]
    named = {f"{prefix}_{name}" if prefix else name: scores[name] for name in scores.fields}
    return [column for name, each in named.items() for column in columns_of(each, name)]
