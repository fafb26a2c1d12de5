"""What becomes of a model's answer for a row, by plain loops: slow, and written independently.

Values are arrays whose last axis is that of the labels, wherever the model has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import awkward as ak
import numpy as np
from tests.layouts.reference import sorting

import sonic_coffea as sonic

Slots = dict[str, list[int | None]]
"""Where the elements of a row stand in its tensor: of `Tokens`, of each collection."""


def axes_of(output: sonic.Output) -> list[Any]:
    """Return what each axis between the row and the values has."""
    if output.per == "row" or output.choose == "slot":
        return []
    axes = output.axes if isinstance(output.axes, tuple) else [output.of or "x"] * output.axes
    return [axis for axis in axes if axis != "labels"]


def slots_of(layout: Any, row: ak.Array) -> Slots:
    if not isinstance(layout, sonic.Tokens):
        (order,) = sorting(layout, row)
        sent = order if isinstance(layout, sonic.Flat) else order[: layout.lengths[-1]]
        slots = {at: slot for slot, at in enumerate(sent)}
        return {"": [slots.get(at) for at in range(len(order))]}
    ((_, pf),) = (part for part in layout.parts if part[0] == "pf")
    after = [None if slot is None else 1 + slot for slot in slots_of(pf, row)[""]]
    return {"row": [0], "pf": after}


def elements_of(slots: Slots) -> Iterator[tuple[Any, int]]:
    """Yield the collection and index of each element that is sent, and where it stands."""
    for of, each in slots.items():
        yield from (((of, at), slot) for at, slot in enumerate(each) if slot is not None)


def finish(output: sonic.Output, values: Any) -> Any:
    """Return the score that some values become."""
    with np.errstate(all="ignore"):
        if output.dtype == object:
            values = np.asarray([string.decode() for string in values], object)
        else:
            values = np.array(values, np.float64)
            over = [*output.over] if isinstance(output.over, tuple) else output.over or ...
            x = values[over]
            if output.function == "softmax":
                x = np.exp(x) / np.exp(x).sum()
            elif output.function is not None:
                x = 1 / (1 + np.exp(-x)) if output.function == "sigmoid" else x / (1 - x)
            values[over] = x * output.scale + output.shift
        if output.labels is None:
            return values.tolist() if output.shape is not None else values.tolist()[0]
        scores = dict(zip(output.labels, values, strict=True))
        if output.groups is not None:
            each = {name: m if isinstance(m, slice) else [*m] for name, m in output.groups}
            scores = {name: values[members].sum() for name, members in each.items()}
        computed = dict(output.discriminants or ())
        return scores | {n: eval(text, dict(scores)) for n, text in computed.items()}  # noqa: S307


def nested(output: sonic.Output, values: Any, axes: list[list[int | None]]) -> Any:
    """Return the values of elements in lists, along the axes in which they came."""
    if not axes:
        return None if values is None else finish(output, values)
    some = [None if values is None or at is None else values[at] for at in axes[0]]
    return [nested(output, each, axes[1:]) for each in some]


def chosen(output: sonic.Output, values: Any, slots: Slots) -> Any:
    """Return the index, among what was sent, of a slot or of the greatest value."""
    element_at = {slot: element for element, slot in elements_of(slots)}
    rank, best = len(axes_of(output)), []
    if rank == 0:
        best = values.tolist()
    for column in np.moveaxis(values, -1, 0) if rank else ():
        places = itertools.product(sorted(element_at), repeat=rank)
        known = [at for at in places if column[at] > -np.inf]
        best += max(known, key=lambda at, column=column: column[at], default=(None,) * rank)
    choices: list[Any] = []
    for slot in best:
        of, at = element_at.get(slot, (None, None))
        choices.append(at if "" in slots else dict.fromkeys(slots) | ({of: at} if of else {}))
    if output.labels is not None:
        return dict(zip(output.labels, choices, strict=True))
    return choices if rank > 1 else choices[0]


def score(output: sonic.Output, values: Any, slots: Mapping[str, Slots]) -> Any:
    """Return what the answer for a row becomes."""
    if output.choose is not None:
        return chosen(output, values, slots[output.of or "x"])
    if output.splits is not None:
        return [finish(output, one) for one in values]
    if output.per == "row":
        return finish(output, values)
    if "" not in slots["x"]:
        return {
            "row": finish(output, values[0]),
            "pf": nested(output, values, [slots["x"]["pf"]]),
        }
    axes: list[Any] = []
    for size, of in zip(values.shape, axes_of(output), strict=False):
        here = [0, 1] if of == 2 else slots.get(of, slots["x"])[""]
        if of == "1+x":
            here = [0, *(None if slot is None else 1 + slot for slot in here)]
        axes.append([*here, size - 2, size - 1] if of == "x+2" else here)
    return nested(output, values, axes)
