"""Arrays of fixed shape are sent in the declared shape, and in no other with as many numbers."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import InputError

SAME = [
    *((given, given) for given in ((2, 3, 4), (3, 4), (12,))),
    *(((3, 4), declared) for declared in ((1, 3, 4), (3, 4, 1), (3, 1, 4))),
    *(((12,), declared) for declared in ((1, 12), (12, 1), (1, 12, 1))),
]
OTHER = [
    *(((2, 3, 4), s) for s in ((2, 4, 3), (3, 2, 4), (3, 4, 2), (4, 2, 3), (4, 3, 2))),
    *(((2, 3, 4), s) for s in ((24,), (4, 6), (2, 12), (3, 8), (2, 2, 6), (2, 2, 3, 2), (24, 1))),
]


@pytest.mark.parametrize(("given", "declared"), SAME)
def test_axes_of_one_are_added(given: Any, declared: tuple[int, ...]) -> None:
    """Of one channel, channels first and channels last are the same numbers in the same order."""
    images = np.arange(5 * np.prod(given), dtype=np.float32).reshape(5, *given)
    tensor = sonic.Dense("x", declared).pack({"x": images})
    np.testing.assert_array_equal(tensor, images.reshape(5, *declared))


@pytest.mark.parametrize(("given", "declared"), OTHER)
def test_other_shapes_are_refused(given: Any, declared: tuple[int, ...]) -> None:
    images = np.zeros((5, *given), np.float32)
    for column in (images, ak.from_regular(ak.Array(images), axis=None)):
        with pytest.raises(InputError, match=rf"field 'x' .*expected \[{declared[0]}.*"):
            sonic.Dense("x", declared).pack({"x": column})


def test_the_error_says_what_brings_the_axes_into_order() -> None:
    images = {"x": np.zeros((5, 3, 4, 2), np.float32)}
    message = r"\[\[3\], \[4\], \[2\]\].*expected \[2, 3, 4\].*moveaxis"
    with pytest.raises(InputError, match=message):
        sonic.Dense("x", (2, 3, 4)).pack(images)


def test_images_of_several_shapes_are_refused() -> None:
    image = np.ones((2, 3, 4))
    for some in ([image, image.T], [image.T, image]):
        with pytest.raises(InputError, match="field 'x'"):
            sonic.Dense("x", (2, 3, 4)).pack({"x": ak.Array([i.tolist() for i in some])})


@pytest.mark.parametrize("counts", [[1, 1], [2, 0]])
def test_axes_of_length_one_are_no_lists_of_one_object(counts: list[int]) -> None:
    """Otherwise, rows would be events in chunks whose events all have one object."""
    images = ak.unflatten(ak.Array({"x": np.ones((2, 3, 4), np.float32)}), counts)
    layout = sonic.Dense("x", (1, 3, 4))
    tensor = layout.pack(images)
    assert tensor.shape == (2, 1, 3, 4)
    assert str(layout.unpack(tensor, images).type) == "2 * var * 1 * 3 * 4 * float32"
