"""How fast jagged arrays become tensors, and scores become jagged arrays.

The limit is numpy's copy of the finished tensors. The peer is code written by hand, with
`ak.pad_none`, `ak.fill_none`, `np.concatenate` and `ak.to_numpy`. A copy gets new memory from the
system, while layouts use the memory of earlier tensors again if it is free. So `Padded` is also
compared with a copy into used memory, and, with all results kept, with a copy that is kept, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from harness import Results, finish, interleaved, parser, peak_bytes
from matplotlib.figure import Figure

import sonic_coffea as sonic
from sonic_coffea.layouts import assemble, bind_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = [f"f{i}" for i in range(10)]
LENGTH = 64
COPY = "copy of the tensor"
USED, NEW = "copy into used memory", "copy into new memory"
MEAN = 45


def collection(rows: int, *, fields: list[str], mean: float, seed: int = 1) -> ak.Array:
    """Return ``events * 2 * var * {f0: float32, ...}`` with Poisson counts."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(mean, rows)
    total = int(counts.sum())
    numbers = {name: rng.normal(size=total).astype(np.float32) for name in fields}
    return ak.unflatten(ak.unflatten(ak.zip(numbers), counts), np.full(rows // 2, 2))


def by_hand(jets: ak.Array, length: int) -> np.ndarray:
    """Pad as coffea's documentation of its Triton client does."""
    flat = ak.flatten(jets)
    padded = [ak.fill_none(ak.pad_none(flat[f], length, axis=1, clip=True), 0) for f in FIELDS]
    tensor = ak.concatenate([p[:, np.newaxis, :] for p in padded], axis=1)
    return ak.to_numpy(ak.values_astype(tensor, "float32"))


def by_hand_in_numpy(jets: ak.Array, length: int) -> np.ndarray:
    """Pad by hand, leaving awkward as early as one can."""
    flat = ak.flatten(jets)
    out = np.empty((len(flat), len(FIELDS), length), np.float32)
    for i, name in enumerate(FIELDS):
        padded = ak.fill_none(ak.pad_none(flat[name], length, axis=1, clip=True), 0)
        out[:, i] = ak.to_numpy(padded)
    return out


def transformed_by_hand(jets: ak.Array, length: int) -> np.ndarray:
    """Pad, after a shift, a scale and a clip in numpy's terms."""
    moved = {f: np.minimum(np.maximum((jets[f] - 0.1) * 1.2, -5), 5) for f in FIELDS}
    return by_hand_in_numpy(ak.zip(moved), length)


def packing(results: Results, rows: int, repeats: int) -> None:
    """Measure one large chunk."""
    jets = collection(rows, fields=FIELDS, mean=MEAN)
    plain = sonic.Padded(FIELDS, LENGTH)
    moving = sonic.Padded(
        [sonic.Feature(f, shift=0.1, scale=1.2, lower=-5, upper=5) for f in FIELDS], LENGTH
    )
    plain.pack(jets[:10])
    peak = peak_bytes(lambda: plain.pack(jets))
    tensor = plain.pack(jets)
    results.numbers["peak memory of Padded, over its result"] = peak / tensor.nbytes
    np.testing.assert_array_equal(tensor, by_hand(jets, LENGTH), strict=True)
    np.testing.assert_allclose(
        moving.pack(jets), transformed_by_hand(jets, LENGTH), rtol=1e-6, atol=1e-6
    )
    ways: dict[str, Callable[[], Any]] = {
        "Padded": lambda: plain.pack(jets),
        "Padded, shift scale clip": lambda: moving.pack(jets),
        "Padded, LF": lambda: sonic.Padded(FIELDS, LENGTH, axis_order="LF").pack(jets),
        "Padded, sorted": lambda: sonic.Padded(FIELDS, LENGTH, sort_by="f0").pack(jets),
        "Bucketed": lambda: sonic.Bucketed(FIELDS, (32, 64)).pack(jets),
        "Flat": lambda: sonic.Flat(FIELDS).pack(jets),
        "Mask": lambda: sonic.Mask(LENGTH, of="f0").pack(jets),
        "awkward and numpy by hand": lambda: by_hand_in_numpy(jets, LENGTH),
        "awkward by hand": lambda: by_hand(jets, LENGTH),
    }
    targets = {"Padded": 1.5, "Padded, shift scale clip": 2.5}
    few = max(3, repeats // 5)
    for name, way in ways.items():
        here = {COPY: way().copy, name: way}
        times = interleaved(here, few if "by hand" in name else repeats, title=name)
        if name == "Padded":
            results.add(times, COPY)
        results.add(times, name, against=COPY, at_most=targets.get(name))
    pack, used = ways["Padded"], np.empty_like(tensor)
    times = interleaved({USED: lambda: np.copyto(used, tensor), "Padded": pack}, repeats)
    results.add(times, USED)
    results.add(times, "Padded", called="Padded, into used memory", against=USED)
    # The first time that a virtual machine uses a page is dearer than all that is done with it.
    held = [tensor.copy() for _ in range(2 * few + 2)]
    held.clear()
    times = interleaved(
        {
            NEW: lambda: held.append(tensor.copy()),
            "Padded, into new memory": lambda: held.append(pack()),
        },
        few,
    )
    held.clear()
    results.add(times, NEW)
    results.add(times, "Padded, into new memory", against=NEW)
    times = interleaved({"Padded": pack, "awkward by hand": ways["awkward by hand"]}, few)
    called = "Padded, over awkward by hand"
    results.add(times, "Padded", called=called, against="awkward by hand", at_least=40)


def gathering(results: Results, rows: int, repeats: int) -> None:
    """Measure fields that are not read where they lie, or not as they are."""
    parts = collection(rows, fields=FIELDS, mean=MEAN)
    jets = ak.zip({"pf": parts, **{f: ak.sum(parts[f], axis=2) for f in FIELDS}}, depth_limit=2)
    charge = ak.values_astype(parts.f0 > 0, np.int32)
    some = ak.mask(parts.f1, parts.f0 > -1)
    own = ak.zip(
        {"pf": ak.with_field(ak.with_field(parts, charge, "q"), some, "some")}, depth_limit=2
    )
    pf = [f"pf.{f}" for f in FIELDS]
    ratios = [sonic.Feature(f, expression=f"pf.{f} / (1 + abs({f}))") for f in FIELDS]
    ways = {
        "Padded, 5 of 10 fields broadcast": (sonic.Padded([*pf[:5], *FIELDS[5:]], LENGTH), jets),
        "Padded, 1 of 10 fields with None": (
            sonic.Padded([*pf[:9], "pf.some"], LENGTH, missing=0.0),
            own,
        ),
        "Padded, one-hot of 10": (
            sonic.Padded(sonic.OneHot("pf.q", list(range(10))), LENGTH),
            own,
        ),
        "Padded, 10 expressions": (sonic.Padded(ratios, LENGTH), jets),
        "Row, 8 leading objects, missing": (
            sonic.Row([f"pf[:8].{f}" for f in FIELDS], missing=0.0),
            jets,
        ),
    }
    # An expression is computed, and not gathered only.
    targets = dict.fromkeys([name for name in ways if "expressions" not in name], 1.5)
    for name, (layout, arrays) in ways.items():
        here = {COPY: layout.pack(arrays).copy, name: lambda: layout.pack(arrays)}  # noqa: B023
        times = interleaved(here, repeats, title=name)
        results.add(times, name, against=COPY, at_most=targets.get(name))
    # Of eight numbers, memory sends two lines, or three, of which a copy reads all.
    leading, equal = "Row, 8 leading objects, missing", "numpy, first 8 of lists of one length"
    columns = np.ones((len(FIELDS), rows * MEAN), np.float32)
    strides = MEAN * columns.itemsize, *columns.strides
    first = np.lib.stride_tricks.as_strided(columns, (rows, len(FIELDS), 8), strides)
    row, arrays = ways[leading]
    times = interleaved({equal: first.copy, leading: lambda: row.pack(arrays)}, repeats)
    results.add(times, equal)
    results.add(times, leading, called=f"{leading}, over numpy", against=equal)


def pairs_in_numpy(vectors: np.ndarray) -> np.ndarray:
    """Return ``[N, 4, L, L]`` of ``[N, 4, L]``: px, py, pz and energy."""
    eps = np.float32(1e-8)
    px, py, pz, energy = vectors.transpose(1, 0, 2)
    pt, phi = np.sqrt(px**2 + py**2), np.arctan2(py, px)
    rapidity = 0.5 * np.log(np.maximum(energy + pz, eps) / np.maximum(energy - pz, eps))
    out = np.empty((len(pt), 4, pt.shape[1], pt.shape[1]), np.float32)

    def each(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x[:, :, np.newaxis], x[:, np.newaxis, :]

    dphi = np.subtract(*each(phi))
    dphi -= np.float32(2 * np.pi) * np.rint(dphi / np.float32(2 * np.pi))
    delta = np.sqrt(np.subtract(*each(rapidity)) ** 2 + dphi**2)
    least = np.minimum(*each(pt))
    out[:, 0] = np.log(np.maximum(least * delta, eps))
    out[:, 1] = np.log(np.maximum(least / np.maximum(np.add(*each(pt)), eps), eps))
    out[:, 2] = np.log(np.maximum(delta, eps))
    m2 = np.add(*each(energy)) ** 2
    for p in (px, py, pz):
        m2 -= np.add(*each(p)) ** 2
    out[:, 3] = np.log(np.maximum(m2, eps))
    return out


def composed(results: Results, rows: int, repeats: int) -> None:
    """Measure pairs, against numpy on arrays that are padded already, and tokens."""
    names = ["px", "py", "pz", "energy"]
    jets = collection(rows // 10, fields=names, mean=MEAN)
    jets["energy"] = np.sqrt(jets.px**2 + jets.py**2 + jets.pz**2 + np.float32(0.02))
    ready = sonic.Padded(names, LENGTH).pack(jets)
    layout, hand = sonic.Pairwise(names, LENGTH), "pairs in numpy, of padded arrays"
    present = sonic.Mask(LENGTH, of="px").pack(jets) > 0
    both = (present[:, :, :, np.newaxis] & present[:, :, np.newaxis]).repeat(4, axis=1)
    packed, expected = layout.pack(jets)[both], pairs_in_numpy(ready)[both]
    close = np.abs(packed - expected) < 1e-3 * np.maximum(np.abs(expected), 1)
    assert close.mean() > 0.999  # float32 cancels in the masses of some
    times = interleaved(
        {hand: lambda: pairs_in_numpy(ready), "Pairwise": lambda: layout.pack(jets)},
        max(3, repeats // 5),
    )
    results.add(times, hand)
    results.add(times, "Pairwise", against=hand, at_most=2.0)
    a, b = ak.unzip(ak.cartesian([jets[:20].px, jets[:20].px], axis=2, nested=True))
    some = {"d": ak.concatenate([a - b] * max(1, rows // 400))}
    given = sonic.Pairwise("d", LENGTH)
    tokens = sonic.Tokens(
        {"a": sonic.Padded(FIELDS[:8], LENGTH), "b": sonic.Padded(FIELDS[2:], LENGTH)},
        flags="onehot",
    )
    plain = collection(rows // 2, fields=FIELDS, mean=MEAN)
    for name, way in {
        "Pairwise, given": lambda: given.pack(some),
        "Tokens": lambda: tokens.pack(plain),
    }.items():
        times = interleaved({COPY: way().copy, name: way}, repeats, title=name)
        results.add(times, name, against=COPY, at_most=1.5)


def small(results: Results, repeats: int) -> None:
    """Measure what a call costs by itself."""
    jets = collection(100, fields=FIELDS, mean=MEAN)
    plain = sonic.Padded(FIELDS, LENGTH)
    times = interleaved({"Padded, 100 rows": lambda: plain.pack(jets)}, repeats)
    results.add(times, "Padded, 100 rows", within_s=100e-6)
    model = sonic.Model("m", {"x": plain}, {"y": ["qcd", "top"]})
    nothing = ak.to_packed(jets[:0])
    times = interleaved({"a call without rows": lambda: model(nothing)}, repeats)
    results.add(times, "a call without rows", within_s=300e-6)


def returning(results: Results, rows: int, repeats: int) -> None:
    """Measure the way back, from the answers of a server."""
    jets = collection(rows, fields=FIELDS, mean=MEAN)
    inputs = bind_inputs({"x": sonic.Padded(FIELDS, LENGTH)}, jets)
    rng = np.random.default_rng(2)
    scores = rng.random((rows, 2), np.float32)
    weights = rng.random((rows, LENGTH, 4), np.float32)

    def back(output: sonic.Output, answer: np.ndarray) -> ak.Array:
        assembly = assemble("y", output, inputs)
        assembly.place(slice(0, rows), rows, {"y": answer})
        return inputs.rows.unflatten(assembly.content())

    each = sonic.Output(["qcd", "top"])
    every = sonic.Output(list("abcd"), per="constituent")
    # Beside copies of many megabytes, what is measured is the pages that they gave back.
    times = interleaved({"scores to jets": lambda: back(each, scores)}, 10 * repeats)
    results.add(times, "scores to jets", within_s=1e-3)
    times = interleaved(
        {
            "copy of values for constituents": weights.copy,
            "values to constituents": lambda: back(every, weights),
        },
        repeats,
        title="and back",
    )
    results.add(times, "copy of values for constituents")
    results.add(
        times, "values to constituents", against="copy of values for constituents", at_most=2
    )


def growth(results: Results, sizes: list[int], repeats: int) -> None:
    """Measure a row's cost from few rows to very many."""
    fields, length = FIELDS[:2], 4
    layout = sonic.Padded(fields, length)
    medians = {}
    for rows in sizes:
        jets = collection(rows, fields=fields, mean=3)
        name = f"{rows:,} rows of 2 x 4"
        times = interleaved({name: lambda jets=jets: layout.pack(jets)}, repeats, title=name)
        medians[rows] = results.add(times, name).median_s
    # Below some ten thousand rows, a call costs more than its rows.
    large = [n for n in sizes if n >= 10_000]
    slope = None
    if len(large) > 1:
        slope = float(np.polyfit(np.log(large), np.log([medians[n] for n in large]), 1)[0])
    results.numbers["seconds by rows"] = medians
    results.numbers["exponent of the growth"] = slope


def draw(content: dict[str, Any]) -> Figure:
    """Draw the cost of a row against their number, and the ratios to a copy."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    (left, right) = figure.subplots(1, 2)
    medians = {int(n): t for n, t in content["seconds by rows"].items()}
    left.loglog(list(medians), [1e9 * t / n for n, t in medians.items()], "o-")
    left.set_xlabel("rows")
    left.set_ylabel("ns a row (2 fields, 4 long)")
    slope = content["exponent of the growth"]
    if slope is not None:
        left.set_title(f"time grows as rows to the power of {slope:.2f}", fontsize=10)
    bars = [m for m in content["measurements"] if m["against"] == COPY]
    right.barh([m["name"] for m in bars], [m["ratio"] for m in bars])
    right.axvline(1, color="k", lw=0.8)
    right.set_xscale("log")
    right.set_xlabel("time, over that of copying the tensor")
    right.invert_yaxis()
    return figure


def main() -> None:
    """Run it."""
    options = parser(__doc__ or "").parse_args()
    results = Results("Layouts: 10 float32 fields, 64 long, Poisson counts of mean 45")
    rows, repeats = (2_000, 3) if options.quick else (20_000, 25)
    packing(results, rows, repeats)
    gathering(results, rows, repeats)
    composed(results, rows, repeats)
    small(results, 30 if options.quick else 1_000)
    returning(results, rows, repeats)
    sizes = [10**n for n in range(3, 6 if options.quick else 8)]
    growth(results, sizes, 3 if options.quick else 5)
    finish(results, options, draw)
    for name in ("peak memory of Padded, over its result", "exponent of the growth"):
        if results.numbers[name] is not None:
            print(f"{name}: {results.numbers[name]:.2f}")


if __name__ == "__main__":
    main()
