"""Layouts on arrays without data: the fields that are read, and the type of the scores.

awkward's typetracers stand for the arrays when dask-awkward builds a graph, and when coffea looks
for the branches that a processor needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import awkward as ak

from sonic_coffea.layouts._assembly import Outputs
from sonic_coffea.layouts._fields import Source
from sonic_coffea.layouts._inputs import bind_inputs

if TYPE_CHECKING:
    from awkward.contents import Content

    from sonic_coffea.layouts._layout import Layout
    from sonic_coffea.layouts._outputs import Output


def is_tracer(arrays: Any) -> bool:
    """Whether arrays, or those of a dict, have a type and no data."""
    each = arrays.values() if isinstance(arrays, dict) else [arrays]
    return any(isinstance(a, ak.Array) and a.layout.backend.name == "typetracer" for a in each)


def trace(layouts: Mapping[str, Layout], outputs: Mapping[str, Output], arrays: Any) -> ak.Array:
    """Touch the fields that layouts read, and return what stands for the scores.

    Parameters
    ----------
    layouts : mapping
        Input names and their layouts.
    outputs : mapping
        Output names, and what they are.
    arrays : awkward array or dict
        As in `bind_inputs`, without data.

    Raises
    ------
    FieldError, InputError
        If a field is missing, or has no axis where one is needed.
    """
    inputs = bind_inputs(layouts, arrays, source_of=_Touched)
    scores = inputs.rows.unflatten(Outputs.of(outputs, inputs).typed())
    return ak.Array(scores.layout.to_typetracer(forget_length=True))


class _Touched(Source):
    """Arrays of length zero in the place of typetracers: whatever is read of them is touched."""

    def collection(self, path: str) -> tuple[None, str]:
        return None, path

    def names(self, path: str = "") -> list[str]:
        return Source(self._array).names(path)

    def column(self, path: str) -> Content:
        column = super().column(path)
        ak.typetracer.touch_data(ak.Array(column))
        return column.form.length_zero_array(highlevel=False)
