"""Random arrays, packed by the layouts and by plain Python loops."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
import vector
from hypothesis import given
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea.errors import ResponseError
from sonic_coffea.layouts import Output, assemble, bind_inputs

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


FORMS = {
    "as it is": lambda a: a,
    "packed": ak.to_packed,
    "computed": lambda a: a * 1.0,
    "cut from more": lambda a: ak.concatenate([a[:1], a, a[-1:]])[1 : 1 + len(a)] if len(a) else a,
    "chosen": lambda a: a[::-1][np.arange(len(a))[::-1]],
    "marked": lambda a: ak.mask(a, np.ones(len(a), np.bool_)),
}
forms = st.sampled_from(sorted(FORMS))


@given(jets(), forms, forms, forms, st.booleans())
def test_columns_may_lie_in_memory_differently(
    data: tuple[list[Any], ak.Array], one: str, other: str, third: str, sort: bool
) -> None:
    """As those do that are computed after a cut, beside those that are cut."""
    plain, array = data
    rows = rows_of(plain)
    columns = {
        "pt": FORMS[one](array.pf.pt),
        "id": FORMS[other](array.pf.id),
        "m": FORMS[third](array.m),
        "minus": FORMS[third](-array.m),
    }
    expected = np.asarray([[r["m"], -r["m"]] for r in rows], np.float32).reshape(-1, 2)
    np.testing.assert_array_equal(sonic.Row(["m", "minus"]).pack(columns), expected)
    by_row = {"minus": FORMS[one](-array.m), "m": columns["m"]}
    np.testing.assert_array_equal(sonic.Row(["m", "minus"]).pack(by_row), expected)
    if sort:
        rows = [{"pf": sorted(r["pf"], key=lambda c: -c["pt"])} for r in rows]
    layout = sonic.Padded(["pt", "id"], 3, fill=-1.0, sort_by="pt" if sort else None)
    np.testing.assert_array_equal(layout.pack(columns), padded(rows, 3, -1.0))
    flat = sonic.Flat(["pt", "id"], sort_by="pt" if sort else None).pack(columns)
    assert flat.tolist() == [[c["pt"], c["id"]] for r in rows for c in r["pf"]]


def test_a_property_of_what_was_cut() -> None:
    """It is computed of what is left, while fields are still read from the file's buffers."""
    vector.register_awkward()
    momenta = ak.zip(
        {"x": np.arange(6.0), "y": np.zeros(6), "z": np.zeros(6), "t": np.arange(6.0)},
        with_name="Momentum4D",
    )
    some = ak.unflatten(momenta, [1, 2, 3])[ak.Array([False, True, True])]
    assert sonic.Row(["x", "pt"]).pack(some).tolist() == [[n, n] for n in range(1, 6)]
    together = sonic.Variations(nominal=some, again=some).together()[0]
    assert sonic.Row("pt").pack(together).tolist() == [[n] for n in (*range(1, 6), *range(1, 6))]


def test_what_is_cut_away_may_be_missing_or_of_another_shape() -> None:
    array = ak.Array([[[1.0, None], [2.0, 3.0]], [[4.0]]])
    whole = array[~ak.any(ak.is_none(array, axis=2), axis=2)]
    assert sonic.Padded("x", 2).pack({"x": whole}).tolist() == [[[2.0, 3.0]], [[4.0, 0.0]]]
    assert sonic.Padded("x", 2).pack({"x": array[[1]]}).tolist() == [[[4.0, 0.0]]]
    images = ak.Array([[[[1.0, 2.0]]], [[[3.0, 4.0], [5.0, 6.0]]]])
    second = sonic.Dense("x", shape=(2, 2)).pack({"x": images[1:]})
    assert second.tolist() == [[[3.0, 4.0], [5.0, 6.0]]]


def test_rows_that_overlap_are_sorted_each_by_itself() -> None:
    lists = ak.contents.ListArray(
        ak.index.Index64(np.asarray([0, 1])),
        ak.index.Index64(np.asarray([3, 4])),
        ak.contents.NumpyArray(np.asarray([1.0, 2.0, 3.0, 4.0])),
    )
    tensor = sonic.Padded("x", 3, sort_by="x").pack({"x": ak.Array(lists)})
    assert tensor.tolist() == [[[3.0, 2.0, 1.0]], [[4.0, 3.0, 2.0]]]


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


@given(jets())
def test_scores_return_to_their_places(data: tuple[list[Any], ak.Array]) -> None:
    plain, array = data
    inputs = bind_inputs({"x": sonic.Row("m")}, array)
    n = len(rows_of(plain))
    output = assemble("out", Output(["a", "b"]), inputs)
    scores = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    for i in reversed(range(n)):
        output.place(inputs.selection(i, i + 1), 1, {"out": scores[i : i + 1]})
    result = inputs.rows.unflatten(output.content())
    values = iter([{"a": 2.0 * i, "b": 2.0 * i + 1} for i in range(n)])
    assert result.tolist() == replaced(plain, values)
    assert len(result) == len(array)


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
    output = assemble("out", Output(per="constituent"), inputs)
    for segment in inputs.segments:
        if segment.start < segment.stop:
            tensors = inputs.pack(segment.start, segment.stop)
            wanted = inputs.selection(segment.start, segment.stop)
            output.place(wanted, segment.stop - segment.start, {"out": tensors["x"]})
    result = inputs.rows.unflatten(output.content()).tolist()
    kept = [
        [c["pt"] if k < 2 * length else None for k, c in enumerate(r["pf"])] for r in rows_of(plain)
    ]
    assert result == replaced(plain, iter(kept))


@pytest.mark.parametrize("fill", [np.nan, -np.inf])
def test_what_pads_need_not_be_finite(fill: float) -> None:
    tensor = sonic.Padded("x", 2, fill=fill).pack({"x": ak.Array([[1.0], [2.0, 3.0], [4.0]])})
    np.testing.assert_array_equal(tensor, [[[1.0, fill]], [[2.0, 3.0]], [[4.0, fill]]])


def test_large_integers_are_exact() -> None:
    number = 2**60 + 1
    array = ak.unflatten(np.full(6, number, np.uint64), [1, 1, 4])
    tensor = sonic.Padded("x", 2, dtype="int64").pack({"x": array})
    assert tensor.tolist() == [[[number, 0]], [[number, 0]], [[number, number]]]


@pytest.mark.parametrize(("length", "lengths"), [(4, ()), (2, ()), (4, (2, 4)), (8, (2, 4))])
def test_answers_of_another_length_are_refused(length: int, lengths: tuple[int, ...]) -> None:
    """What was not sent has no score, and what was sent has one."""
    array = ak.Array([{"x": [1.0, 2.0, 3.0]}, {"x": [4.0]}])
    x: Any = sonic.Bucketed("x", lengths) if lengths else sonic.Padded("x", 3)
    inputs = bind_inputs({"in": x}, array)
    output = assemble("out", Output(per="constituent"), inputs)
    short = inputs.selection(0, 1) if lengths else slice(0, 1)
    with pytest.raises(ResponseError, match=r"came back with shape .* for 1 rows of"):
        output.place(short, 1, {"out": np.zeros((1, length), np.float32)})


def test_a_mask_of_its_own_length_beside_buckets() -> None:
    array = {"a": ak.Array([[1.0, 2.0, 3.0], [4.0]]), "b": ak.Array([[1.0], [2.0, 3.0]])}
    layouts = {
        "x": sonic.Bucketed("a", (2, 4)),
        "v": sonic.Padded("b", 3),
        "of b": sonic.Mask(3, of="b"),
        "beside v": sonic.Mask(beside="v"),
        "beside x": sonic.Mask(beside="x"),
    }
    inputs = bind_inputs(layouts, array)
    sent = [inputs.pack(s.start, s.stop) for s in inputs.segments]
    for name in ("of b", "beside v"):
        assert [t[name].tolist() for t in sent] == [[[[1.0, 1.0, 0.0]]], [[[1.0, 0.0, 0.0]]]]
    assert [t["beside x"].tolist() for t in sent] == [[[[1.0, 0.0]]], [[[1.0, 1.0, 1.0, 0.0]]]]
