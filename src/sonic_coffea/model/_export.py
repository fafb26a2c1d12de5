"""Files of training data: the tensors of a model as they are sent, with labels and weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import awkward as ak
import numpy as np
from awkward.contents import NumpyArray

from sonic_coffea import provenance
from sonic_coffea.errors import ConfigError, ContractError, FieldError, InputError, expect
from sonic_coffea.layouts import (
    Feature,
    Inputs,
    Row,
    Structure,
    bind_inputs,
    check_index,
    content_of,
    declared,
    resolved,
)
from sonic_coffea.model._declaration import Declaration
from sonic_coffea.model._submission import as_array, values_of

# Bytes of the rows that are packed at a time, and that are a row group of the file.
_GROUP_BYTES = 1 << 24


def export(
    model: Declaration,
    objects: Any,
    path: str | os.PathLike[str],
    labels: Any,
    weights: Any,
    *records: Any,
) -> None:
    """Write a row for each row of the tensors; see `Model.export`.

    Fields and expressions of labels and weights are looked up in `records`, one after another, or
    by default in the objects.
    """
    if model.one_request_per == "event":
        raise ConfigError(
            f"model {model.name!r} takes all rows of an event at once, and a file has one row for "
            "each; export it with a declaration without one_request_per"
        )
    are_named = isinstance(labels, Mapping) and all(isinstance(name, str) for name in labels)
    expect(are_named, "labels as a dict of names and columns", labels)
    check_index(objects, {**labels, "the weights": weights})
    inputs = model.bind(objects)
    columns: dict[str, Any] = {}
    weight = [] if weights is None else [("weight", weights)]
    for name, label in (*labels.items(), *weight):
        if name in columns or name in declared(model.inputs):
            raise ConfigError(f"label {name!r} is the name of an input, or of another label")
        columns[name] = _label(inputs.rows, label, records or (objects,), f"label {name!r}")
    made_by = {
        "model": model.name,
        "config_hash": model.config_hash,
        "inputs": {name: repr(layout) for name, layout in resolved(model.inputs).items()},
    }
    provenance.write_parquet(_groups(inputs, columns), path, {"models": [made_by]})


def check_export(model: Declaration, path: str | os.PathLike[str]) -> None:
    """Compare a declaration with that of a file of training data; see `Model.check_export`."""
    records = provenance.read(path)["models"]
    if len(records) != 1 or "inputs" not in (made_by := records[0]):
        raise ConfigError(f"expected a file that export has written, got {path}")
    # What a mask counts depends on the order of the inputs.
    declared = {name: repr(layout) for name, layout in resolved(model.inputs).items()}
    if model.config_hash == made_by["config_hash"] or declared == made_by["inputs"]:
        return
    lines = []
    for name in dict.fromkeys([*made_by["inputs"], *declared]):
        then, now = made_by["inputs"].get(name, "left out"), declared.get(name, "left out")
        if then != now:
            lines += [f"  input {name!r}", f"    exported {then}", f"    declared {now}"]
    raise ContractError(
        f"{path} was exported with other inputs than are declared now, so that a network that was "
        "trained on it would be given other numbers:\n" + "\n".join(lines),
        model=model.name,
    )


def _groups(inputs: Inputs, columns: Mapping[str, Any]) -> Iterator[ak.Array]:
    """Yield the rows of each row group, as one array of tensors and further columns."""
    row_bytes = max((int(np.max(segment.row_bytes)) for segment in inputs.segments), default=0)
    step = max(1, _GROUP_BYTES // max(1, row_bytes))
    for start in range(0, max(1, len(inputs)), step):
        stop = min(start + step, len(inputs))
        group = dict(_tensors(inputs.only(np.arange(start, stop))))
        group |= {name: column[start:stop] for name, column in columns.items()}
        yield ak.zip(group, depth_limit=1)


def _tensors(inputs: Inputs) -> Iterator[tuple[str, ak.Array]]:
    """Yield the tensors by name, in the order of the rows: what is sent of each row."""
    merged = [name for name, bound in inputs.bound.items() if not bound.layout.stacks]
    ranges = [(segment.start, segment.stop) for segment in inputs.segments]
    if merged:  # offsets and numbers count within a request: each row is one of its own
        ranges = [(row, row + 1) for row in range(len(inputs))]
    parts = [inputs.pack(*places) for places in ranges] or [inputs.pack_all()]
    order = np.argsort(inputs.numbers(0, len(inputs)))
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        if (dtype := tensors[0].dtype).kind not in "biufO":
            raise ConfigError(f"input {name!r} is {dtype}, which Parquet files do not have")
        # Of `Bucketed` inputs, parts have other lengths.
        same = [np.concatenate(tensors)] if len({t.shape[1:] for t in tensors}) == 1 else tensors
        column = ak.concatenate([content_of(tensor) for tensor in same])
        if name in merged or name not in inputs.bound:
            yield name, ak.unflatten(column, [len(tensor) for tensor in tensors])[order]
            continue
        column = column[order]
        for axis, length in enumerate(inputs.bound[name].layout.row_shape(-1) or (), 1):
            if length < 0:  # in this file, all rows may be of one length
                column = ak.from_regular(column, axis=axis)
        yield name, column


def _label(rows: Structure, label: Any, records: Sequence[Any], what: str) -> Any:
    """Return a value for each row: a field or an expression of records, or an array."""
    if not isinstance(label, str):
        values, index = values_of(rows, as_array(label, what), what)
        for row in np.flatnonzero(index < 0)[:1].tolist():
            event = rows.event_of(row)
            raise InputError(f"{what}: event {event} has None; mask it in the objects, too")
        return values[index]
    layout = {what: Row(Feature(label, expression=label), "float64")}
    first, *others = records
    try:
        inputs = bind_inputs(layout, first)
    except FieldError:
        if not others:
            raise
        return _label(rows, label, others, what)
    values = inputs.pack_all()[what][:, 0]
    columns = inputs.bound[what].columns
    are_whole = all(data.dtype.kind in "iu" for data, *_ in columns.terms.values())
    if are_whole and np.any(np.abs(values) >= 2**53):
        raise InputError(
            f"{what}: float64 rounds whole numbers from 2^53 on; give the array itself"
        )
    return _label(rows, inputs.rows.unflatten(NumpyArray(values)), (), what)
