"""Cases: which of several models, or versions, scores each event or each object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from awkward.contents import Content, IndexedOptionArray, NumpyArray
from awkward.index import Index64

from sonic_coffea.errors import ConfigError, ContractError, InputError
from sonic_coffea.layouts import (
    Feature,
    Output,
    Row,
    Source,
    bind_inputs,
    is_tracer,
    records_of,
    trace,
)

if TYPE_CHECKING:
    from awkward.forms import Form
    from numpy.typing import NDArray

    from sonic_coffea.layouts import Int64, Structure

# The name of the only input. Not a field's name, as a dict of columns would be taken for inputs.
_INPUT = "case="


def numbered(values: Any, keys: Sequence[Any], by: str | None, what: str) -> ak.Array:
    """Return the place among `keys` of each value: ``events * int``, ``events * var * int``, ...

    Parameters
    ----------
    values : array, or records
        The values, or the records from which they are computed. None stays None.
    keys : sequence of int, or of str
        The values that there may be.
    by : str or None
        A field or an expression of the records; None if `values` are values.
    what : str
        The name of the values in messages.

    Raises
    ------
    FieldError
        If the records have no such field.
    InputError
        If a value is none of the keys.
    """
    records = {what: as_array(values, what)} if by is None else records_of(values)
    is_text = isinstance(keys[0], str)
    # Not integers: a fraction would be cut off.
    dtype = "string" if is_text else "float64"
    field = (by or what) if is_text else Feature(what, expression=by)
    # Stands for None, and is no key.
    absent: Any = "".join(keys) + "?" if is_text else min(keys) - 0.5
    layouts = {_INPUT: Row(field, dtype, missing=absent)}
    optional = _may_be_none(records, by or what)
    if is_tracer(records):
        return trace(layouts, {_INPUT: Output(dtype="int64")}, records, optional=optional)
    try:
        inputs = bind_inputs(layouts, records)
        found = inputs.pack_all()[_INPUT][:, 0]
    except InputError as error:
        message = error.message.removeprefix(f"input {_INPUT!r}: ")
        raise type(error)(f"{what}: {message}") from None
    numbers = np.full(len(found), -1)
    for number, key in enumerate(keys):
        numbers[found == (key.encode() if is_text else key)] = number
    is_none = found == (absent.encode() if is_text else absent)
    unknown = np.flatnonzero((numbers < 0) & ~is_none)
    if len(unknown):
        value = found[unknown[0]].decode() if is_text else f"{found[unknown[0]]:g}"
        listed = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
        raise InputError(
            f"{what}: event {inputs.rows.event_of(int(unknown[0]))} has {value!s}, which has no "
            f"model; expected one of {listed}, or None for no model"
        )
    content: Content = NumpyArray(numbers)
    if optional:
        index = np.where(is_none, -1, np.arange(len(numbers)))
        content = IndexedOptionArray.simplified(Index64(index), content)
    return inputs.rows.unflatten(content)


def _may_be_none(records: Any, by: str) -> bool:
    """Return whether fields that an expression reads have an option type."""
    fields = (
        records if isinstance(records, Mapping) else {n: records[n] for n in ak.fields(records)}
    )
    read = set(re.findall(r"\w+", by)) & fields.keys()
    return any("?" in str(ak.type(fields[name])) for name in read)


def as_array(values: Any, what: str) -> ak.Array:
    """Return values of events or of objects as an array."""
    try:
        array = values if isinstance(values, ak.Array) else ak.Array(values)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{what}: expected an array, got {type(values).__name__}: {error}"
        ) from None
    if array.fields or "union" in str(array.type):
        raise InputError(f"{what}: expected one value for each event or object, got {array.type}")
    return array


def as_mask(values: Any) -> ak.Array:
    """Return which events, or objects, are scored, as an array of bools."""
    array = as_array(values, "mask")
    if not str(array.type).rstrip("]").endswith("bool"):
        raise InputError(f"mask: expected True or False for each event or object, got {array.type}")
    return array


def by_row(rows: Structure, numbers: ak.Array, what: str) -> Int64:
    """Return the number of each row, given the numbers of events or of objects; -1 for None."""
    of_rows: Int64 = np.full(len(rows), -1)
    row, number = values_of(rows, numbers, what)
    of_rows[row] = number
    return of_rows


def values_of(rows: Structure, values: ak.Array, what: str) -> tuple[Int64, NDArray[Any]]:
    """Return the rows that have a value, and their values, given those of events or of objects."""
    if len(values) != rows.events:
        raise InputError(f"expected a {what} for each of {rows.events} events, got {len(values)}")
    mine, theirs = rows.levels, (place := Source(values).place(())).levels
    alike = len(mine) == len(theirs) and all(a.equals(b) for a, b in zip(mine, theirs, strict=True))
    if place.node is not None and place.node.is_numpy and (alike or not theirs):
        each = np.asarray(place.node.data)[place.at]
        return np.arange(len(rows)), each if alike else each[rows.event_numbers()]
    here = rows.unflatten(NumpyArray(np.arange(len(rows))))
    misfit = InputError(
        f"expected a {what} for each event or object, {here.type}, got {values.type}; take it "
        "from the same collection as the objects, with the same cuts"
    )
    if values.ndim > here.ndim:
        raise misfit
    try:
        # Lists of fixed length are broadcast as numpy does, from the right, and of length 1 at all.
        each = ak.broadcast_arrays(*(ak.from_regular(a, axis=None) for a in (here, values)))
    except ValueError:
        raise misfit from None
    # What is None in one of them is None in both, and left out.
    row, value = (ak.to_numpy(ak.flatten(array, axis=None)) for array in each)
    return row, value


def chosen(
    numbers: Int64, each: Mapping[int, Content], *, optional: bool, default: float | None
) -> Content:
    """Return the scores of each row's model; None, or the default, where there is no model.

    Parameters
    ----------
    numbers : array of int64
        The number of the model of each row; -1 for none.
    each : mapping
        The scores of all rows by each model that is chosen, by its number.
    optional : bool
        Whether there may be None, by the type of the numbers.
    default : float or None
        The score of rows without a model.

    Raises
    ------
    ContractError
        If the models give scores of different types.
    ConfigError
        If the scores have no numbers that the default could be.
    """
    # Masked rows make an option of any type.
    types = {re.sub(r"option\[|[]?]", "", str(scores.form.type)) for scores in each.values()}
    if len(types) > 1:
        raise ContractError(f"the models give scores of different types: {' and '.join(types)}")
    places = np.full(max(each) + 2, -1)  # the last is of -1
    places[list(each)] = range(len(each))
    scores = (
        [*each.values()]
        if default is None
        else [*each.values(), _all(each[min(each)].form, default)]
    )
    whole = ak.concatenate([ak.Array(content) for content in scores]).layout
    left_out = -1 if default is None else len(whole) - 1
    index = places[numbers] * len(numbers) + np.arange(len(numbers))
    index[numbers < 0] = left_out
    return IndexedOptionArray.simplified(Index64(index), whole) if optional else whole[index]


def _all(form: Form, default: float) -> Content:
    """Return one score of a type in which all numbers are a default."""

    def fill(content: Content, **_: Any) -> Content | None:
        if content.is_list and not content.is_regular:
            raise ConfigError(
                "default= is for scores of numbers, and not for lists or strings; without it, "
                "objects that mask= leaves out are None"
            )
        if content.is_option:
            return _all(content.content.form, default)
        if not content.is_numpy:
            return None
        numbers = np.full_like(content.data, default)
        if numbers.dtype.kind != "f" and np.any(numbers != default):
            raise ConfigError(f"the scores are {numbers.dtype}, which cannot be default={default}")
        return NumpyArray(numbers)

    one = form.length_one_array(highlevel=False)
    filled: Content = ak.transform(fill, one, highlevel=False)
    return filled


def mean(each: Sequence[Content]) -> Content:
    """Return the mean of scores; None where one of them is None."""
    averaged: Content = ak.transform(_mean, *each, highlevel=False)
    return averaged


def _mean(contents: Sequence[Content], **_: Any) -> tuple[Content] | None:
    if not all(content.is_numpy for content in contents):
        return None
    numbers = [np.asarray(content.data) for content in contents]
    averaged = np.mean(numbers, axis=0, dtype=np.float64)
    return (NumpyArray(averaged.astype(numbers[0].dtype)),)


def is_optional(numbers: ak.Array) -> bool:
    """Return whether some of the numbers may be None, by their type."""
    node = numbers.layout
    while not node.is_option and not node.is_numpy:
        node = node.content
    return bool(node.is_option)
