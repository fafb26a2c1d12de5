"""Of a large array, what rows do not use is not looked at, whatever they are cut from."""

from __future__ import annotations

import tracemalloc
from typing import Any

import awkward as ak
import numpy as np
import pytest
from awkward.contents import ByteMaskedArray, NumpyArray, UnionArray
from awkward.index import Index8, Index64

import sonic_coffea as sonic
from sonic_coffea.layouts import ByRow, bind_inputs

ROWS, EACH = 100_000, 10
MOST_BYTES = 60_000
"""What ten rows may take: a column of all rows has 800,000 bytes for their counts alone."""

NUMBERS = np.arange(ROWS * EACH, dtype=np.float32) % 101


HALF = Index8((np.arange(len(NUMBERS)) % 2).astype(np.int8))
EACH_ONE = Index64(np.arange(len(NUMBERS)))
NONE_MISSING = Index8(np.zeros(len(NUMBERS), np.int8))
COLUMNS = {
    "float32": NumpyArray(NUMBERS),
    "optional": ByteMaskedArray(NONE_MISSING, NumpyArray(NUMBERS), valid_when=False),
    "mixed": UnionArray(HALF, EACH_ONE, [NumpyArray(NUMBERS.astype(t)) for t in ("f4", "i8")]),
}
SELECTIONS = [slice(50_000, 50_010), np.arange(90_000, 0, -9_000)]
X = sonic.Feature("x", scale=2.0)
LAYOUTS = [sonic.Padded("x", 8, sort_by="x"), sonic.Padded(X, 8, dtype="float16"), sonic.Flat(X)]


@pytest.fixture(scope="module")
def large() -> dict[str, ak.Array]:
    columns = {name: ak.unflatten(ak.Array(c), EACH) for name, c in COLUMNS.items()}
    return {name: ak.from_regular(c) for name, c in columns.items()}


def peak(work: Any) -> int:
    work()  # what is compiled or loaded at the first time is not of the rows
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("selection", SELECTIONS, ids=["slice", "numbers"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("column", COLUMNS)
def test_binding_takes_memory_for_the_rows_alone(
    large: dict[str, ak.Array], column: str, layout: Any, selection: Any
) -> None:
    some = large[column][selection]
    expected = layout.pack({"x": ak.Array(some.tolist())})
    np.testing.assert_array_equal(layout.pack({"x": some}), expected)
    assert peak(lambda: layout.pack({"x": some})) < MOST_BYTES


@pytest.mark.parametrize("layout", [sonic.Bucketed("x", (4, 8, 16)), sonic.Padded("x", 16)])
def test_blocks_and_answers_take_memory_for_their_rows(
    large: dict[str, ak.Array], layout: Any
) -> None:
    layouts = {"in": layout, "mask": sonic.Mask(), "any": sonic.Mask(of="x")}
    inputs = bind_inputs(layouts, {"x": large["float32"]})
    output = ByRow("y", sonic.Output(per="constituent"), inputs)
    answer = {"y": np.ones((10, 16), np.float32)}
    output.place(inputs.selection(0, 10), 10, answer)
    some = inputs.only(np.arange(10))

    def block() -> None:
        inputs.pack(20, 30)
        output.place(inputs.selection(20, 30), 10, answer)

    for work in (block, some.count_elements):
        assert peak(work) < MOST_BYTES
