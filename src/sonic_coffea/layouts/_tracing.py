"""Layouts on arrays without data: which fields are read, and what type the scores will have.

awkward's typetracers stand for the arrays when dask-awkward builds a graph, and when coffea looks
for the branches that a processor needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
from awkward.forms import (
    Form,
    IndexedOptionForm,
    ListOffsetForm,
    NumpyForm,
    RecordForm,
    RegularForm,
)

from sonic_coffea.errors import ConfigError
from sonic_coffea.layouts._inputs import arrays_by_input, counted_inputs, within
from sonic_coffea.layouts._rows import too_shallow

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    sources = arrays_by_input(layouts, arrays)
    above: Form | None = None
    content = _content(outputs)
    for name, layout in layouts.items():
        if name in counted_inputs(layouts):
            continue
        with within(name):
            for field in layout.columns:
                column = sources[name].column(field)
                ak.typetracer.touch_data(ak.Array(column))
                if above is None:
                    depth = layout.depth(column.form)
                    above = _with_leaf(column.form, depth, content, f"field {field!r}")
    if above is None:
        raise ConfigError("the model has no input that reads a field")
    nothing = above.length_zero_array(highlevel=False)
    return ak.Array(nothing.to_typetracer(forget_length=True))


def _with_leaf(form: Form, leaf_depth: int, leaf: Form, what: str) -> Form:
    """Return the structure above the rows, as it returns with the scores."""
    if isinstance(form, NumpyForm) and form.inner_shape:
        form = form.to_RegularForm()
    if form.is_option:
        return IndexedOptionForm.simplified("i64", _with_leaf(form.content, leaf_depth, leaf, what))
    if form.is_unknown or form.purelist_depth == leaf_depth:
        return leaf
    if form.purelist_depth < leaf_depth:
        raise too_shallow(what, form)
    inner = _with_leaf(form.content, leaf_depth, leaf, what)
    if form.is_regular:
        return RegularForm(inner, form.size)
    return ListOffsetForm("i64", inner) if form.is_list else inner


def _content(outputs: Mapping[str, Output]) -> Form:
    """Return what stands in the place of each row."""
    contents = [_output(output) for output in outputs.values()]
    return contents[0] if len(contents) == 1 else RecordForm(contents, list(outputs))


def _output(output: Output) -> Form:
    number = NumpyForm(output.score_dtype.name)
    labels = output.labels
    values = number if labels is None else RecordForm([number] * len(labels), list(labels))
    if output.per == "constituent":
        return ListOffsetForm("i64", IndexedOptionForm.simplified("i64", values))
    return ListOffsetForm("i64", values) if output.splits is not None else values
