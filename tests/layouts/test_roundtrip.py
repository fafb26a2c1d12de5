"""Random arrays, packed by the layouts and by plain Python loops."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea.layouts import Output, bind_inputs

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
numbers = st.integers(-1000, 1000).map(lambda n: n / 8)


def nested(depth: int, leaf: Any) -> Any:
    """Lists in lists, `depth` deep, of leaves or None."""
    if depth == 0:
        return leaf
    return st.lists(nested(depth - 1, leaf), max_size=4)


@st.composite
def jets(draw: Any, *, optional: bool = True) -> tuple[list[Any], ak.Array]:
    """Events of jets, one to three levels deep, whose constituents have pt and id."""
    constituent = st.fixed_dictionaries({"pt": numbers, "id": st.integers(0, 200)})
    jet = st.fixed_dictionaries({"m": numbers, "pf": st.lists(constituent, max_size=6)})
    depth = draw(st.integers(1, 3))
    plain = draw(nested(depth, st.one_of(st.none(), jet) if optional else jet))
    array = _typed(plain, depth, optional=optional)
    kind = draw(st.sampled_from(["plain", "reversed", "selected", "masked"]))
    if kind == "reversed" and depth > 1:
        return [e[::-1] for e in plain], array[:, ::-1]
    if kind == "selected" and plain:
        chosen = draw(st.lists(st.integers(0, len(plain) - 1), max_size=6))
        return [plain[i] for i in chosen], array[np.asarray(chosen, np.int64)]
    if kind == "masked" and plain and optional and depth == 1:
        keep = draw(st.lists(st.booleans(), min_size=len(plain), max_size=len(plain)))
        return [p if k else None for p, k in zip(plain, keep, strict=True)], ak.mask(array, keep)
    return plain, array


def _typed(plain: list[Any], depth: int, *, optional: bool) -> ak.Array:
    """Build the array with its full type, also where there is nothing in it."""
    sample = {"m": 0.5, "pf": [{"pt": 0.5, "id": 1}]}
    whole: Any = [sample, None] if optional else [sample]
    for _ in range(depth - 1):
        whole = [whole]
    return ak.Array([*plain, *whole])[: len(plain)]


def rows_of(plain: Any) -> list[Any]:
    """The jets that are there, in order."""
    if isinstance(plain, dict):
        return [plain]
    return [] if plain is None else [r for p in plain for r in rows_of(p)]


def replaced(plain: Any, values: Any) -> Any:
    """The same structure with the next value in each jet's place."""
    if isinstance(plain, dict):
        return next(values)
    return None if plain is None else [replaced(p, values) for p in plain]


def padded(rows: list[Any], length: int, fill: float) -> np.ndarray:
    out = np.full((len(rows), 2, length), fill, np.float32)
    for i, row in enumerate(rows):
        for k, constituent in enumerate(row["pf"][:length]):
            out[i, 0, k] = constituent["pt"]
            out[i, 1, k] = constituent["id"]
    return out


@SETTINGS
@given(jets(), st.integers(1, 5))
def test_padded_is_what_loops_make(data: tuple[list[Any], ak.Array], length: int) -> None:
    plain, array = data
    rows = rows_of(plain)
    expected = padded(rows, length, -1.0)
    layout = sonic.Padded(["pf.pt", "pf.id"], length, fill=-1.0)
    np.testing.assert_array_equal(layout.pack(array), expected)
    swapped = sonic.Padded(["pf.pt", "pf.id"], length, fill=-1.0, axis_order="LF")
    np.testing.assert_array_equal(swapped.pack(array), expected.transpose(0, 2, 1))
    mask = sonic.Mask(length, of="pf.pt").pack(array)
    assert mask.sum(axis=(1, 2)).tolist() == [min(len(r["pf"]), length) for r in rows]


@SETTINGS
@given(jets())
def test_row_is_what_loops_make(data: tuple[list[Any], ak.Array]) -> None:
    plain, array = data
    expected = np.asarray([[r["m"]] for r in rows_of(plain)], np.float32).reshape(-1, 1)
    np.testing.assert_array_equal(sonic.Row("m").pack(array), expected)


@SETTINGS
@given(jets())
def test_flat_is_what_loops_make(data: tuple[list[Any], ak.Array]) -> None:
    plain, array = data
    rows = rows_of(plain)
    inputs = bind_inputs({"x": sonic.Flat(["pf.pt", "pf.id"], batch="row")}, array)
    tensors = inputs.pack(0, len(rows)) if rows else {"x": np.empty((0, 2)), "row": []}
    expected = [[c["pt"], c["id"]] for r in rows for c in r["pf"]]
    assert np.asarray(tensors["x"]).tolist() == expected
    assert list(tensors["row"]) == [i for i, r in enumerate(rows) for _ in r["pf"]]
    if rows:
        assert np.diff(tensors["row_splits"]).tolist() == [len(r["pf"]) for r in rows]


@SETTINGS
@given(jets(), st.integers(1, 3))
def test_pieces_make_the_whole(data: tuple[list[Any], ak.Array], size: int) -> None:
    plain, array = data
    layouts = {"x": sonic.Padded("pf.pt", 3), "m": sonic.Mask(3), "row": sonic.Row("m")}
    inputs = bind_inputs(layouts, array)
    n = len(rows_of(plain))
    assert len(inputs.rows) == n
    pieces = [inputs.pack(i, min(i + size, n)) for i in range(0, n, size)]
    for name in layouts if n else []:
        whole = inputs.pack(0, n)[name]
        np.testing.assert_array_equal(np.concatenate([p[name] for p in pieces]), whole)


@SETTINGS
@given(jets())
def test_scores_return_to_their_places(data: tuple[list[Any], ak.Array]) -> None:
    plain, array = data
    inputs = bind_inputs({"x": sonic.Row("m")}, array)
    n = len(rows_of(plain))
    output = Output(["a", "b"]).assemble("out", inputs)
    scores = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    for i in reversed(range(n)):
        output.place(inputs.wanted(i, i + 1), 1, {"out": scores[i : i + 1]})
    result = inputs.rows.unflatten(output.content())
    values = iter([{"a": 2.0 * i, "b": 2.0 * i + 1} for i in range(n)])
    assert result.tolist() == replaced(plain, values)
    assert len(result) == len(array)


@SETTINGS
@given(jets(), st.integers(1, 4), st.booleans())
def test_values_per_constituent_return_to_theirs(
    data: tuple[list[Any], ak.Array], length: int, bucketed: bool
) -> None:
    plain, array = data
    layout: Any = (
        sonic.Bucketed("pf.pt", lengths=(length, 2 * length), axis_order="LF")
        if bucketed
        else sonic.Padded("pf.pt", 2 * length, axis_order="LF")
    )
    inputs = bind_inputs({"x": layout, "m": sonic.Mask()}, array)
    output = Output(per="constituent").assemble("out", inputs)
    for segment in inputs.segments:
        if segment.start < segment.stop:
            tensors = inputs.pack(segment.start, segment.stop)
            wanted = inputs.wanted(segment.start, segment.stop)
            output.place(wanted, segment.stop - segment.start, {"out": tensors["x"]})
    result = inputs.rows.unflatten(output.content()).tolist()
    kept = [
        [c["pt"] if k < 2 * length else None for k, c in enumerate(r["pf"])] for r in rows_of(plain)
    ]
    assert result == replaced(plain, iter(kept))


@SETTINGS
@given(jets(optional=False), st.integers(1, 5))
def test_sorted_is_what_loops_make(data: tuple[list[Any], ak.Array], length: int) -> None:
    plain, array = data
    rows = [{"pf": sorted(r["pf"], key=lambda c: -c["pt"])} for r in rows_of(plain)]
    layout = sonic.Padded(["pf.pt", "pf.id"], length, sort_by="pf.pt")
    np.testing.assert_array_equal(layout.pack(array), padded(rows, length, 0.0))
    # Back in the places of the file, cut where the sorted list was cut.
    back = layout.unpack(layout.pack(array), array)
    expected = []
    for row in rows_of(plain):
        order = sorted(range(len(row["pf"])), key=lambda k, row=row: -row["pf"][k]["pt"])
        kept = set(order[:length])
        expected.append([c["pt"] if k in kept else None for k, c in enumerate(row["pf"])])
    assert back["pf.pt"].tolist() == replaced(plain, iter(expected))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint8"])
def test_targets(dtype: str) -> None:
    array = ak.Array([[1, 2], [], [3]])
    for source in ("int64", "float32", "uint8", "float64"):
        tensor = sonic.Row("x", dtype=dtype).pack({"x": ak.values_astype(array, source)})
        assert tensor.dtype == dtype
        assert tensor.tolist() == [[1], [2], [3]]


def test_bfloat16_rounds_to_nearest() -> None:
    import ml_dtypes

    values = np.asarray([1.0, 1.00390625, 3.14159, -7.7], np.float32)
    tensor = sonic.Row("x", dtype="bfloat16").pack({"x": ak.Array(values)})
    np.testing.assert_array_equal(tensor[:, 0], values.astype(ml_dtypes.bfloat16))


def test_sorting_through_an_index_with_gaps() -> None:
    """Elements of rows that were cut away lie between those that are sorted."""
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 6, 200)
    values = rng.permutation(counts.sum()).astype(np.float32)
    shuffled = ak.contents.IndexedArray(
        ak.index.Index64(rng.permutation(len(values))), ak.contents.NumpyArray(values)
    )
    whole = ak.unflatten(ak.Array(ak.contents.RecordArray([shuffled], ["pt"])), counts)
    some = whole[rng.permutation(200)[:50]]
    tensor = sonic.Padded("pt", 4, fill=-1.0, sort_by="pt").pack(some)
    for row, jet in zip(tensor[:, 0], some.pt.tolist(), strict=True):
        expected = sorted(jet, reverse=True)[:4]
        assert row.tolist() == expected + [-1.0] * (4 - len(expected))
