"""Every layout against the slow reference, on every kind of awkward node.

The suite tries a few cases; ``make oracle`` tries 20,000, ``make oracle CASES=100000`` more.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import NumpyArray
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.layouts.nodes import CASES, objects
from tests.layouts.reference import (
    FORMULAE,
    REFERENCES,
    Refused,
    expected,
    placed,
    rows_of,
    unpacked,
)

import sonic_coffea as sonic
from sonic_coffea.errors import InputError
from sonic_coffea.layouts import bind_inputs

# Of most code, each kind of layout tries the same, so that it needs fewer cases than other tests.
FEWER = settings.default.max_examples * 5 // 8
cases = settings(max_examples=CASES // 8 or FEWER, print_blob=True)
TARGETS = ("float32", "float16", "int8")
if CASES:
    TARGETS = (
        *("float32", "float64", "float16", "bfloat16", "bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
targets = st.sampled_from(TARGETS) | st.just("float32")
lengths = st.integers(1, 5)


# What is done before the shift.
FIRST: list[dict[str, Any]] = [
    {},
    {"function": "abs"},
    {"power": 2.0},
    {"within": (1.0, 30.0)},
    {"within": (None, 50.0), "function": "sqrt"},
    {"replace": {1: 30, 0: 2}},
    *({"categories": known} for known in ({1: 1, None: 0}, {0: 5, None: 7}, {0: 5, 1: 7})),
]


@st.composite
def features(draw: Any, name: str) -> Any:
    """Draw a field as it is, or a transformation that any type of number may have."""
    if draw(st.booleans()):
        return name
    nonfinite = draw(st.sampled_from([None, 7.0]))
    lower, upper = draw(st.sampled_from([(None, None), (0.0, None), (None, 20.0), (0.0, 20.0)]))
    return sonic.Feature(
        name,
        shift=draw(st.sampled_from([0.0, 0.5])),
        scale=draw(st.sampled_from([1.0, 0.25, 2.0])),
        lower=lower,
        upper=upper,
        nonfinite=nonfinite,
        nonfinite_last=nonfinite is not None and draw(st.booleans()),
        **draw(st.sampled_from(FIRST)),
    )


def fields(*names: str) -> Any:
    chosen = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
    return chosen.flatmap(lambda some: st.tuples(*map(features, some)).map(list))


def beside(*names: str) -> Any:
    """Draw no field, or one that is not of the same list as the others."""
    return st.lists(st.sampled_from(names), max_size=1)


def joined(*parts: Any) -> Any:
    return st.tuples(*parts).map(lambda each: [field for part in each for field in part])


constituents = joined(fields("pf.pt", "pf.id"), beside("m", "q"))
objects_fields = joined(fields("m", "q"), beside("pf[0].pt", "pf[1].id", "pf[-1].pt", "pf[-2].id"))
missing = st.sampled_from([None, 1, 1, 1])
options = st.fixed_dictionaries(
    {
        "dtype": targets,
        "missing": missing,
        "sort_by": st.sampled_from([*4 * [None], "pf.pt", "pf.id"]),
    }
)
orders = st.sampled_from(["FL", "LF"])
padding = st.fixed_dictionaries(
    {
        "pad": st.sampled_from(["after", "after", "before"]),
        "pad_mode": st.sampled_from(["constant", "constant", "wrap"]),
    }
)


def fills(dtype: str) -> Any:
    """Draw what stands in padding, as far as the type holds it."""
    return st.sampled_from([0, 1] if dtype.startswith(("b", "u")) else [0, 1, -1])


@st.composite
def jagged(draw: Any, kind: Any, length: Any = None) -> sonic.Layout:
    """Draw a layout of constituents' numbers, or texts; with a length, it is padded."""
    is_text = draw(st.integers(0, 4)) == 0
    named = draw(st.sampled_from([["pf.s"], ["pf.s", "pf.s"]]) if is_text else constituents)
    chosen = draw(options)
    if length is not None:
        order = draw(orders if len(named) > 1 else orders | st.just("L"))
        chosen |= {"length": draw(length), "axis_order": order, **draw(padding)}
        chosen["fill"] = draw(fills(chosen["dtype"]))
    if is_text:
        chosen |= {"dtype": "string", "missing": draw(st.sampled_from([None, "?"]))}
    if is_text and length is not None:
        chosen |= {"fill": draw(st.sampled_from(["", "-"])), "pad": "after"}
    if kind is sonic.Bucketed:
        chosen["lengths"] = chosen.pop("length")
    layout: sonic.Layout = kind(named, **chosen)
    return layout


@st.composite
def tokens(draw: Any) -> sonic.Tokens:
    dtype = draw(targets)
    parts: dict[str, Any] = {"row": sonic.Row(draw(objects_fields), dtype, missing=draw(missing))}
    padded = {**draw(options), **draw(padding), "fill": draw(fills(dtype)), "dtype": dtype}
    parts["pf"] = sonic.Padded(draw(constituents), draw(lengths), **padded)
    if draw(st.booleans()):
        parts = dict(reversed(parts.items()))
    # A bool holds no other numbers.
    numbers = ["number"] if dtype != "bool" else []
    return sonic.Tokens(
        parts,
        flags=draw(st.sampled_from([None, "onehot", *numbers])),
        fill=draw(st.sampled_from([0.0, 3.0])) if dtype != "bool" else 1.0,
        axis_order=draw(orders),
    )


computed_pairs = st.builds(
    sonic.Pairwise,
    st.sampled_from(["pf.pt", sonic.Feature("pf.pt", shift=0.5, scale=2.0)]).map(
        lambda pt: [pt, "pf.id"]
    ),
    lengths | st.just((1, 3)),
    st.lists(st.sampled_from(sorted(FORMULAE)), min_size=1, max_size=3, unique=True),
    st.sampled_from([0.0, -1.0]),
    axis_order=st.sampled_from(["CLL", "LLC"]),
    dtype=st.sampled_from([name for name in TARGETS if "float" in name]),
    sort_by=st.sampled_from([None, "pf.pt"]),
)
LAYOUTS: dict[type, Any] = {
    sonic.Row: st.builds(
        sonic.Row,
        objects_fields,
        dtype=targets,
        axis_order=st.sampled_from(["F", "F", "FL", "LF"]),
        missing=missing,
        pad=st.sampled_from(["after", "before"]),
    ),
    sonic.Padded: jagged(sonic.Padded, lengths),
    sonic.Bucketed: jagged(sonic.Bucketed, st.just((1, 3))),
    sonic.Flat: jagged(sonic.Flat),
    sonic.Mask: st.builds(
        sonic.Mask,
        lengths,
        of=st.sampled_from(["pf.pt", "pf", "pf.s"]),
        axis_order=orders | st.just("L"),
        dtype=targets,
    ),
    sonic.Dense: st.builds(
        sonic.Dense, features("image"), shape=st.sampled_from([(2, 3), (1, 2, 3)]), dtype=targets
    ),
    sonic.Tokens: tokens(),
    sonic.Pairwise: computed_pairs,
}
"""What a layout's declarations are drawn from; the fields are those of `nodes.objects`."""


def test_every_layout_is_tried() -> None:
    public = [getattr(sonic, name) for name in sonic.__all__]
    ours = {x for x in public if isinstance(x, type) and issubclass(x, sonic.Layout)}
    assert ours - {sonic.Layout} == set(LAYOUTS) == set(REFERENCES)


ELSEWHERE: dict[type, set[str]] = {
    sonic.Padded: {"outer"},
    sonic.Bucketed: {"outer", "length"},
    sonic.Flat: {"splits", "batch", "axis_order", "refers_to"},
    sonic.Mask: {"beside"},
}
"""Options that other tests try."""


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.__name__)
def test_every_option_is_tried(kind: Any) -> None:
    drawn: set[tuple[str, str]] = set()
    names = [option.name for option in dataclasses.fields(kind) if option.init]

    @settings(max_examples=60, phases=[Phase.generate], derandomize=True, database=None)
    @given(LAYOUTS[kind])
    def draw(layout: Any) -> None:
        drawn.update((name, repr(getattr(layout, name))) for name in names)

    draw()
    values = Counter(name for name, _ in drawn)
    assert {name for name in names if values[name] < 2} == ELSEWHERE.get(kind, set())


def features_of(layout: Any) -> list[sonic.Feature]:
    if isinstance(layout, sonic.Tokens):
        return [feature for _, part in layout.parts for feature in part.features]
    return list(getattr(layout, "features", ()))


def check(layout: Any, array: ak.Array) -> None:
    try:
        tensor = expected(layout, array)
    except Refused:
        with pytest.raises(InputError):
            layout.pack(array)
        return
    packed = layout.pack(array)
    assert packed.dtype == layout.dtype
    assert packed.shape == tensor.shape
    # float32 numbers are transformed as such.
    exact = not isinstance(layout, sonic.Pairwise) and all(f.plain for f in features_of(layout))
    rtol = 0.0 if exact else {"float16": 2e-3, "bfloat16": 2e-2}.get(layout.dtype.name, 1e-6)
    real = [t if t.dtype.kind in "iubO" else t.astype(np.float64) for t in (packed, tensor)]
    if packed.dtype == object:
        assert packed.tolist() == tensor.tolist()
    else:
        np.testing.assert_allclose(*real, rtol=rtol, atol=rtol)
    if not isinstance(layout, (sonic.Mask, sonic.Pairwise)):  # which have no inverse
        back = layout.unpack(packed, array)
        if exact:
            assert ak.to_list(back) == placed(array, unpacked(layout, array))
        assert len(back) == len(array)
        assert "float16" not in str(back.type)  # which awkward does not reduce
        for shape in ((len(packed) + 1, *packed.shape[1:]), (*packed.shape, 1)):
            # Compiled code would read, and write, beyond its memory.
            message = f"expected a tensor of shape {[*packed.shape]}, .* got {[*shape]}"
            with pytest.raises(InputError, match=message.replace("[", r"\[")):
                layout.unpack(np.zeros(shape, packed.dtype), array)
    pieces(layout, array, packed)
    structure(layout, array)
    if not has_none(ak.to_list(array[["q"]])):
        columns = {name: array[name] for name in array.fields}
        np.testing.assert_array_equal(layout.pack(columns), packed)


def has_none(plain: Any) -> bool:
    """Whether an object, or a list of them, is None, and not only a number of an object."""
    return plain is None or (isinstance(plain, list) and any(map(has_none, plain)))


def pieces(layout: Any, array: ak.Array, packed: np.ndarray) -> None:
    """A row's tensor depends on the row only."""
    inputs = bind_inputs({"x": layout}, array)
    for segment in inputs.segments:
        for place in range(segment.start, segment.stop):
            alone = inputs.pack(place, place + 1)["x"]
            row = int(inputs.numbers(place, place + 1)[0])
            if isinstance(layout, sonic.Flat):
                counts = inputs.bound["x"].columns.counts(slice(0, len(inputs.rows)))
                start = int(counts[:row].sum())
                whole = packed[start : start + counts[row]]
            else:
                whole = packed[row : row + 1]
                cut = tuple(slice(0, n) for n in alone.shape)
                whole = whole[cut]
            np.testing.assert_array_equal(alone, whole)


def structure(layout: Any, array: ak.Array) -> None:
    """A number of each row goes to the row's place; no data, no rows and all have one type."""
    inputs = bind_inputs({"x": layout}, array)
    numbers = np.arange(len(inputs.rows))
    scores = inputs.rows.unflatten(NumpyArray(numbers))
    plain, depth = ak.to_list(array[["q"]]), array["q"].ndim - 1
    events = [n for n, event in enumerate(plain) for _ in rows_of(event, depth)]
    assert scores.tolist() == placed(array, numbers.tolist())
    assert inputs.rows.event_numbers().tolist() == events
    # Requests of buckets have the rows in another order.
    ranges = {int(inputs.numbers(k, k + 1)[0]): inputs.events_of(k, k + 1) for k in numbers}
    assert ranges == {row: (event, event + 1) for row, event in enumerate(events)}
    whole = inputs.events_of(0, len(numbers))
    assert whole == ((min(events), max(events) + 1) if events else (0, 0))
    tracer = ak.Array(array.layout.to_typetracer(forget_length=True))
    traced = sonic.Model("m", {"x": layout}, {"y": None})(tracer)
    blank = inputs.rows.unflatten(NumpyArray(numbers.astype(np.float32)))
    assert traced.layout.form.type == blank.layout.form.type


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.__name__)
@cases
@given(st.data())
def test_layouts_make_what_the_reference_makes(kind: type, data: Any) -> None:
    # Of arrays with any number of events, most have no rows, and of wild ones, most are refused.
    wild, least = data.draw(st.sampled_from([(False, 0), *3 * [(False, 3)], (True, 0), (True, 3)]))
    array = data.draw(objects(wild=wild, pairs=kind is sonic.Pairwise, least=least), label="array")
    check(data.draw(LAYOUTS[kind], label="layout"), array)
