"""Plain arrays: data frames of pandas, and dicts of NumPy arrays, in and out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import awkward as ak
import numpy as np

from sonic_coffea.errors import InputError


def is_frame(objects: Any) -> bool:
    """Return whether objects are a data frame of pandas, which need not be imported for that."""
    kind = type(objects)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def records_of(objects: Any) -> Any:
    """Return a data frame as records, one for each row; anything else as it is."""
    if not is_frame(objects):
        return objects
    names = list(objects.columns)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InputError(f"expected a data frame whose columns have different names, got {names}")
    columns = {}
    for name in names:
        with suppress(TypeError, ValueError):  # no layout could read it, such as times with zones
            columns[name] = _column(objects[name])
    return ak.zip(columns, depth_limit=1) if columns else ak.Array([{}] * len(objects))


def _column(series: Any) -> Any:
    if isinstance(series.dtype, np.dtype) and series.dtype != object:
        return series.to_numpy()
    return ak.from_iter([None if na else v for v, na in zip(series, series.isna(), strict=True)])


def giving_back(objects: Any) -> Callable[[ak.Array], Any]:
    """Return what makes of scores a data frame, or a dict of NumPy arrays, as the objects are."""
    if is_frame(objects):
        return partial(_framed, objects[[]])  # its index
    is_dict = isinstance(objects, dict) and bool(objects)
    if is_dict and all(isinstance(values, np.ndarray) for values in objects.values()):
        return _plain
    return lambda scores: scores


def _framed(empty: Any, scores: ak.Array) -> Any:
    columns = {name: _filled(_plain(values)) for name, values in columns_of(scores)}
    frame = type(empty)(columns, index=empty.index)
    frame.attrs.update(scores.attrs)
    return frame


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
    columns = []
    for name in scores.fields:
        columns += columns_of(scores[name], f"{prefix}_{name}" if prefix else name)
    return columns


def _filled(values: Any) -> Any:
    """Return the values of a column, with NaN for None, as pandas has it."""
    if values.ndim > 1:
        return list(values)
    if isinstance(values, np.ma.MaskedArray):
        filled: Any = values.astype(object if values.dtype.kind == "U" else float)
        return filled.filled(np.nan)
    return values
