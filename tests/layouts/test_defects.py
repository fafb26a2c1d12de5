"""What layouts got wrong once: each of these failed before it was mended."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import (
    ByteMaskedArray,
    IndexedOptionArray,
    ListOffsetArray,
    NumpyArray,
    RegularArray,
    UnionArray,
)
from awkward.index import Index8, Index64

import sonic_coffea as sonic
from sonic_coffea.errors import InputError


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool"])
@pytest.mark.parametrize(
    "lists",
    [
        [[300.5, 1e30], [np.nan], []],
        [[1, None], [None], []],
        [[{"a": 1}, {"a": 2}], [{"a": 3}], []],
        [["one", "two"], ["three"], []],
    ],
)
def test_a_mask_counts_whatever_it_is(lists: Any, dtype: str) -> None:
    tensor = sonic.Mask(3, of="x", dtype=dtype).pack({"x": ak.Array(lists)})
    assert tensor.dtype == dtype
    assert tensor.tolist() == [[[1, 1, 0]], [[1, 0, 0]], [[0, 0, 0]]]


def test_the_number_that_is_named_is_one_that_is_sent() -> None:
    array = {"x": ak.Array([[1, 300], [5, 6], [400, 7]])}
    with pytest.raises(InputError, match="is 400 in event 2, which int8 cannot hold"):
        sonic.Padded("x", 1, dtype="int8").pack(array)


IMAGES = np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2)


def test_images_some_of_which_are_missing() -> None:
    """The axes above an option are the objects'; with a shape that has them, they are the row's."""
    images = RegularArray(RegularArray(NumpyArray(IMAGES.reshape(-1)), 2), 2)
    both = IndexedOptionArray(Index64(np.asarray([0, 1])), images)
    some = IndexedOptionArray(Index64(np.asarray([0, -1])), images)
    pairs, pair = ({"x": ak.Array(RegularArray(x, 2))} for x in (both, some))
    assert sonic.Dense("x").pack(pairs).shape == (2, 2, 2)
    assert sonic.Dense("x").pack(pair).shape == (1, 2, 2)
    assert sonic.Dense("x", (2, 2, 2)).pack(pairs).shape == (1, 2, 2, 2)
    with pytest.raises(InputError, match="field 'x' has None"):
        sonic.Dense("x", (2, 2, 2)).pack(pair)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("layout", "array"),
    [
        (sonic.Row, [[1.0], [2.0, 3.0]]),
        (sonic.Flat, [[1.0], [2.0, 3.0]]),
        (sonic.Dense, np.ones((2, 3))),
        (lambda field, **options: sonic.Padded(field, 2, **options), [[1.0], [2.0, 3.0]]),
        (lambda field, **options: sonic.Bucketed(field, (2, 4), **options), [[1.0], [2.0, 3.0]]),
    ],
)
def test_half_precision_is_unpacked(layout: Any, array: Any, dtype: str) -> None:
    declared = layout("x", dtype=dtype)
    array = {"x": ak.Array(array)}
    back = declared.unpack(declared.pack(array), array)
    assert (back.x if back.fields else back).tolist() == array["x"].tolist()


def union(*arrays: ak.Array) -> ak.Array:
    """One element of each, as a union."""
    ones = np.arange(len(arrays), dtype=np.int8)
    index = Index64(np.zeros(len(arrays), np.int64))
    return ak.Array(UnionArray(Index8(ones), index, [a.layout for a in arrays]))


def test_a_union_of_lists_of_records() -> None:
    first = ak.Array([[{"pt": 1.0, "q": 3}, {"pt": 2.0, "q": 4}]])
    second = ak.Array([[{"pt": 7, "extra": True}]])
    both = union(first, second)
    assert sonic.Padded("pt", 2).pack(both).tolist() == [[[1.0, 2.0]], [[7.0, 0.0]]]
    assert sonic.Row("pt").pack(both).tolist() == [[1.0], [2.0], [7.0]]
    assert sonic.Flat("pt").pack(ak.Array({"x": both}).x).tolist() == [[1.0], [2.0], [7.0]]
    assert sonic.Mask(2, of="x").pack({"x": both}).tolist() == [[[1, 1]], [[1, 0]]]
    layout = sonic.Padded("pt", 2)
    assert layout.unpack(layout.pack(both), both).pt.tolist() == [[1.0, 2.0], [7.0]]
    deeper = ak.Array(RegularArray(both.layout, 2))
    assert sonic.Padded("pt", 2).pack(deeper).tolist() == [[[1.0, 2.0]], [[7.0, 0.0]]]


def test_a_union_of_lists_may_have_options() -> None:
    optional = {"x": ak.mask(union(ak.Array([[3]]), ak.Array([[0.5, 1.0]])), [False, True])}
    assert sonic.Row("x").pack(optional).tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize("wrap", [list, lambda numbers: [numbers]])
def test_integers_that_no_type_holds_together_are_refused(wrap: Any) -> None:
    """numpy's type for both is a float, which rounds them."""
    number = 2**62 + 1
    kinds = [np.asarray(wrap([n]), t) for n, t in ((number, np.uint64), (-number, np.int64))]
    mixed = {"x": union(*(ak.Array(NumpyArray(kind)) for kind in kinds))}
    with pytest.raises(InputError, match="field 'x' mixes types .*uint64.*int64"):
        sonic.Row("x", dtype="int64").pack(mixed)


@pytest.mark.parametrize(
    "array", [union(ak.Array([[1.0]]), ak.Array([1.0])), union(ak.Array([[1.0]]), ak.Array(["a"]))]
)
def test_a_union_of_other_things_than_lists_is_refused(array: ak.Array) -> None:
    for layout in (sonic.Padded("x", 2), sonic.Row("x"), sonic.Mask(2, of="x"), sonic.Flat("x")):
        for nested in (array, ak.Array(RegularArray(array.layout, 2))):
            with pytest.raises(InputError, match="field 'x' .*(mixes types|holds strings)"):
                layout.pack({"x": nested})


@pytest.mark.parametrize("missing", [0.0, -2.0, 0.1, float("nan")])
@pytest.mark.parametrize("how", ["bytes", "index", "no numbers"])
def test_what_stands_for_none_may_be_any_number(how: str, missing: float) -> None:
    """Also one that the field's type cannot hold, and one that would be wrong in the file."""
    numbers = NumpyArray(np.arange(0 if how == "no numbers" else 4, dtype=np.float32))
    index = [-1] * 4 if how == "no numbers" else [3, -1, 0, -1]
    options = IndexedOptionArray(Index64(np.asarray(index)), numbers)
    if how == "bytes":
        is_present = Index8(np.asarray([1, 0, 1, 0], np.int8))
        options = ByteMaskedArray(is_present, numbers, valid_when=True)
    lists = ListOffsetArray(Index64(np.asarray([0, 3, 4])), options)
    array = {"x": ak.Array(lists)}
    wanted = np.full((2, 1, 3), 9.0, np.float32)
    for row, numbers_of_row in zip(wanted, ak.to_list(array["x"]), strict=True):
        sent = [missing if x is None else x for x in numbers_of_row]
        row[0, : len(sent)] = sent
    layout = sonic.Padded("x", 3, fill=9.0, missing=missing)
    np.testing.assert_array_equal(layout.pack(array), wanted)
    with pytest.raises(InputError, match="has None among"):
        sonic.Padded("x", 3).pack(array)
    wrong = ak.where(array["x"] == 0.0, np.float32(np.inf), array["x"])
    if how != "no numbers":
        with pytest.raises(InputError, match="is NaN or infinite in event 0"):
            layout.pack({"x": wrong})


FLOATS = NumpyArray(np.asarray([0.5]))


@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize("options", [{}, {"sort_by": "key"}])
def test_what_is_truncated_may_be_out_of_range(dtype: str, options: dict[str, Any]) -> None:
    array = ak.Array({"x": [[1, 2, 1e9], [5]], "key": [[3, 2, 1], [1]]})
    for layout in (
        sonic.Padded("x", 2, dtype=dtype, **options),
        sonic.Bucketed("x", (1, 2), dtype=dtype, **options),
    ):
        assert layout.pack(array).tolist() == [[[1, 2]], [[5, 0]]]


@pytest.mark.parametrize("feature", [sonic.Feature("x"), sonic.Feature("x", scale=2.0)])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "float32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_no_bool_and_no_integer(feature: Any, dtype: str, bad: float) -> None:
    message = "field 'x' is NaN or infinite in event 1; correct the input"
    with pytest.raises(InputError, match=message):
        sonic.Row(feature, dtype=dtype).pack({"x": ak.Array([0.0, bad, 2.0])})
    for layout in (sonic.Padded(feature, 2, dtype=dtype), sonic.Flat(feature, dtype=dtype)):
        with pytest.raises(InputError, match=message):
            layout.pack({"x": ak.Array([[0.0], [2.0, bad]])})
