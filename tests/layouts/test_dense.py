"""Arrays of fixed shape: of the declared shape, and of no other with as many numbers."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import IndexedOptionArray, NumpyArray, RegularArray
from awkward.index import Index64

import sonic_coffea as sonic
from sonic_coffea.errors import InputError

SHAPE = (2, 3, 4)
NUMBERS = np.arange(5 * 24, dtype=np.float32).reshape(5, *SHAPE)


def jagged(images: np.ndarray[Any, Any]) -> ak.Array:
    return ak.from_regular(ak.Array(images), axis=None)


def of_lists(images: np.ndarray[Any, Any]) -> ak.Array:
    return ak.Array(images.tolist())


def optional(images: np.ndarray[Any, Any]) -> ak.Array:
    index = Index64(np.arange(len(images)))
    return ak.Array(IndexedOptionArray(index, ak.Array(images).layout.to_RegularArray()))


def in_events(images: np.ndarray[Any, Any]) -> ak.Array:
    return ak.unflatten(ak.Array(images), [2, 0, len(images) - 2])


FORMS = {
    "numpy": ak.Array,
    "jagged": jagged,
    "lists": of_lists,
    "optional": optional,
    "in events": in_events,
    "chosen": lambda images: ak.Array(images[::-1])[::-1],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_transposed_images_are_refused(order: tuple[int, ...], form: str) -> None:
    images = np.ascontiguousarray(np.transpose(NUMBERS, (0, *(n + 1 for n in order))))
    array = {"x": FORMS[form](images)}
    declared = sonic.Dense("x", SHAPE)
    if images.shape[1:] == SHAPE:
        np.testing.assert_array_equal(declared.pack(array), NUMBERS)
        return
    with pytest.raises(InputError, match=r"field 'x' .*expected \[2, 3, 4\]"):
        declared.pack(array)
    np.testing.assert_array_equal(sonic.Dense("x", images.shape[1:]).pack(array), images)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [(24,), (4, 6), (6, 4), (2, 12), (12, 2), (3, 8), (4, 3, 2), (2, 2, 6), (2, 2, 3, 2), (24, 1)],
)
def test_as_many_numbers_in_another_shape_are_refused(shape: tuple[int, ...], form: str) -> None:
    array = {"x": FORMS[form](NUMBERS)}
    for feature in ("x", sonic.Feature("x", scale=2.0)):
        with pytest.raises(InputError, match="field 'x'"):
            sonic.Dense(feature, shape).pack(array)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("given", "declared"),
    [
        ((3, 4), (1, 3, 4)),
        ((3, 4), (3, 4, 1)),
        ((3, 4), (3, 1, 4)),
        ((1, 3, 4), (1, 3, 4)),
        ((3, 4, 1), (3, 4, 1)),
        ((12,), (1, 12)),
        ((12,), (12, 1)),
        ((12,), (1, 12, 1)),
        ((3, 1, 4), (1, 3, 1, 4)),
    ],
)
def test_axes_of_one_are_added(
    given: tuple[int, ...], declared: tuple[int, ...], form: str
) -> None:
    """Of one channel, channels first and channels last are the same numbers in the same order."""
    images = np.arange(5 * 12, dtype=np.float32).reshape(5, *given)
    layout = sonic.Dense("x", declared)
    try:
        tensor = layout.pack({"x": FORMS[form](images)})
    except InputError:
        assert 1 in given  # a list of one may be an object's, or the image's
        assert given != declared or form in ("jagged", "lists")
        return
    np.testing.assert_array_equal(tensor, images.reshape(5, *declared))


def test_the_error_says_what_brings_the_axes_into_order() -> None:
    channels_last = np.ascontiguousarray(np.moveaxis(NUMBERS, 1, -1))
    with pytest.raises(InputError, match=r"\[3, 4, 2\].*expected \[2, 3, 4\].*moveaxis"):
        sonic.Dense("x", SHAPE).pack({"x": channels_last})
    moved = np.moveaxis(channels_last, -1, 1)
    np.testing.assert_array_equal(sonic.Dense("x", SHAPE).pack({"x": moved}), NUMBERS)


@pytest.mark.parametrize("shape", [(0,), (0, 2), (2, 0), (1, 0)])
@pytest.mark.parametrize("declared", [(1,), (1, 1), (2,), (1, 2)])
def test_images_without_numbers_are_no_rows(
    shape: tuple[int, ...], declared: tuple[int, ...]
) -> None:
    array = {"x": ak.Array(np.zeros((3, *shape), np.float32))}
    try:
        tensor = sonic.Dense("x", declared).pack(array)
    except InputError:
        return
    assert tensor.shape == (0, *declared)


def test_images_of_several_shapes_are_refused() -> None:
    images = [NUMBERS[0].tolist(), np.transpose(NUMBERS[1]).tolist()]
    for some in (images, images[::-1]):
        with pytest.raises(InputError, match="field 'x'"):
            sonic.Dense("x", SHAPE).pack({"x": ak.Array(some)})


def test_in_a_model_too() -> None:
    model = sonic.Model("m", {"image": sonic.Dense("x", SHAPE)}, {"y": ["a"]})
    with pytest.raises(InputError, match=r"input 'image': field 'x' .*expected \[2, 3, 4\]"):
        model.pack({"x": ak.Array(np.moveaxis(NUMBERS, 1, -1))})
    np.testing.assert_array_equal(model.pack({"x": ak.Array(NUMBERS)})["image"], NUMBERS)


def test_no_images_make_no_rows() -> None:
    for form in (ak.Array, jagged):
        tensor = sonic.Dense("x", SHAPE).pack({"x": form(NUMBERS[:0])})
        assert tensor.shape == (0, *SHAPE)


def test_missing_images_are_not_sent() -> None:
    regular = RegularArray(RegularArray(NumpyArray(np.arange(18.0)), 3), 2)
    some = IndexedOptionArray(Index64(np.asarray([2, -1, 0])), regular)
    expected = np.arange(18.0).reshape(3, 2, 3)[[2, 0]]
    np.testing.assert_array_equal(sonic.Dense("x", (2, 3)).pack({"x": ak.Array(some)}), expected)
    with pytest.raises(InputError, match="field 'x'"):
        sonic.Dense("x", (3, 2)).pack({"x": ak.Array(some)})


def test_an_axis_of_length_one_is_no_list_of_one_object() -> None:
    """Otherwise, rows would be events in chunks whose events all have one object."""
    for counts in ([1, 1], [2, 0]):
        images = ak.unflatten(ak.Array({"x": np.ones((2, 3, 4), np.float32)}), counts)
        layout = sonic.Dense("x", (1, 3, 4))
        tensor = layout.pack(images)
        assert tensor.shape == (2, 1, 3, 4)
        back = layout.unpack(tensor, images)
        assert str(back.type) == "2 * var * 1 * 3 * 4 * float32"
