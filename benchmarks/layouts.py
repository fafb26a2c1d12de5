"""How fast jagged arrays become tensors, and scores become jagged arrays.

The peer is code that one writes for one model: numpy for the numbers, and one loop that numba
compiles for the padding. It checks nothing; layouts refuse numbers that a tensor cannot hold. The
other peers are weaver-core's fused kernel, where weaver-core is installed, awkward by hand, with
`ak.pad_none`, `ak.fill_none` and `ak.concatenate`, and a copy of the finished tensor into memory
that was used before.

Notes
-----
With 100 rows, `Padded` spends most of its time in Python code that looks up the arrays: two rows
take nearly as long.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

import awkward as ak
import numba
import numpy as np
from accelerator import FIELDS, LENGTH, MAX_ROWS, collection, in_awkward
from harness import Results, interleaved, peak_bytes, run

import sonic_coffea as sonic
from sonic_coffea.layouts import ByRow, bind_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

MEAN = 45
HAND = "numpy and one loop"
USED = "copy into used memory"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shift, scale, clip": {"shift": 0.1, "scale": 1.2, "lower": -5, "upper": 5},
    "log": {"function": "log"},
    "tanh": {"function": "tanh"},
    "weaver": {"shift": 0.1, "scale": 1.2, "lower": -5, "upper": 5, "nonfinite": 0.0},
}


def half(jets: ak.Array) -> ak.Array:
    """Return as many jets as there are events, as they lie after a cut."""
    return ak.flatten(jets)[::2][: len(jets)]


@numba.njit(nogil=True)
def loop(out: Any, values: Any, offsets: Any) -> None:
    """Pad ``values[F, n]`` to ``out[N, F, L]``."""
    rows, fields, length = out.shape
    for i in range(rows):
        start, count = offsets[i], min(offsets[i + 1] - offsets[i], length)
        for f in range(fields):
            for k in range(count):
                out[i, f, k] = values[f, start + k]
            for k in range(count, length):
                out[i, f, k] = 0


def transformed(x: np.ndarray, how: str) -> np.ndarray:
    """Return numbers as one writes it in numpy."""
    if how == "plain":
        return x
    if how in ("log", "tanh"):
        return getattr(np, how)(x)
    if how == "weaver":
        x = np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
    return np.clip((x - np.float32(0.1)) * np.float32(1.2), -5, 5)


def by_hand(jets: ak.Array, how: str, order: str, *, sort: bool = False) -> np.ndarray:
    """Pack lists of records for one model."""
    if sort:
        jets = jets[ak.argsort(jets.f0, axis=1, ascending=False)]
    counts = ak.to_numpy(ak.num(jets))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    flat = ak.flatten(jets)
    values = np.empty((len(FIELDS), len(flat)), np.float32)
    for row, name in zip(values, FIELDS, strict=True):
        row[:] = transformed(ak.to_numpy(flat[name]), how)
    shape = (len(jets), len(FIELDS), LENGTH)
    out = np.empty(shape if order == "FL" else (shape[0], LENGTH, len(FIELDS)), np.float32)
    loop(out if order == "FL" else out.transpose(0, 2, 1), values, offsets)
    return out


def weaver_core() -> Callable[[ak.Array], np.ndarray] | None:
    """Return what packs by weaver-core's own kernel; None if it is not installed."""
    try:
        tools = importlib.import_module("weaver.utils.data.tools")
    except ImportError:
        return None
    how = {"length": LENGTH, "pad_mode": "constant", "center": 0.1, "scale": 1.2, "min": -5}
    parameters = {name: {**how, "max": 5, "pad_value": 0.0} for name in FIELDS}
    return lambda jets: tools._fused_pad_and_stack(  # noqa: SLF001
        {name: jets[name] for name in FIELDS}, FIELDS, parameters
    )


def layout(how: str, order: str, **options: Any) -> sonic.Padded:
    """Return what packs the fields."""
    features = [sonic.Feature(name, **OPTIONS[how]) for name in FIELDS]
    return sonic.Padded(features, LENGTH, axis_order=order, **options)


def against_hand(
    results: Results, name: str, hand: Callable[[], Any], ours: Callable[[], Any], repeats: int
) -> None:
    """Compare a layout with numpy and one loop."""
    results.compare({f"{HAND}: {name}": hand, name: ours}, repeats, at_most=1.0)


def packing(results: Results, rows: int, repeats: int) -> None:
    """Measure each path against numpy and one loop."""
    whole = collection(rows, mean=MEAN)
    arrays = {
        "from a file": ak.flatten(whole),
        "after a cut": half(collection(2 * rows, mean=MEAN)),
    }
    for where, jets in arrays.items():
        for order in ("FL", "LF"):
            for how in OPTIONS:
                ours = layout(how, order)
                np.testing.assert_allclose(ours.pack(jets), by_hand(jets, how, order), rtol=1e-6)
                name, hand = f"{how}, {where}, {order}", partial(by_hand, jets, how, order)
                pack = partial(ours.pack, jets)
                against_hand(results, f"{name}, {rows:,} rows", hand, pack, repeats)
        pack = partial(layout("plain", "FL", sort_by="f0").pack, jets)
        name, hand = f"sorted, {where}", partial(by_hand, jets, "plain", "FL", sort=True)
        against_hand(results, f"{name}, {rows:,} rows", hand, pack, max(3, repeats // 3))


def requests(results: Results, rows: int, repeats: int) -> None:
    """Measure a chunk that is packed request by request, as all calls of a model pack it."""
    jets, size = ak.flatten(collection(rows, mean=MEAN)), 512
    starts = range(0, rows, size)

    def each(ours: sonic.Padded) -> None:
        inputs = bind_inputs({"x": ours}, jets)
        for start in starts:
            inputs.pack(start, min(start + size, rows))

    def each_by(hand: Callable[[ak.Array], Any]) -> None:
        for start in starts:
            hand(jets[start : start + size])

    name = f"weaver, {rows:,} rows in requests of {size}"
    hand = partial(each_by, partial(by_hand, how="weaver", order="FL"))
    against_hand(results, name, hand, partial(each, layout("weaver", "FL")), repeats)
    called = "Padded by requests, over awkward by hand"
    ways = {
        f"awkward by hand, in requests of {size}": partial(
            each_by, lambda some: ak.to_numpy(in_awkward(some))
        ),
        f"Padded, in requests of {size}": partial(each, layout("plain", "FL")),
    }
    results.compare(ways, max(3, repeats // 5), called=called, at_least=30)


def peers(results: Results, rows: int, repeats: int) -> None:
    """Measure against awkward by hand, weaver-core and a copy."""
    jets = ak.flatten(collection(rows, mean=MEAN))
    plain, moved = layout("plain", "FL"), layout("shift, scale, clip", "FL")
    tensor = plain.pack(jets)
    peak = peak_bytes(lambda: plain.pack(jets))
    results.numbers["peak memory of Padded, over its result"] = peak / tensor.nbytes
    used = np.empty_like(tensor)
    ways = {USED: lambda: np.copyto(used, tensor), "Padded": lambda: plain.pack(jets)}
    results.compare(ways, repeats, called="Padded, over a copy", peer=True)
    hand, called = "awkward by hand", "Padded, over awkward by hand"
    ways = {hand: lambda: ak.to_numpy(in_awkward(jets)), "Padded": lambda: plain.pack(jets)}
    results.compare(ways, max(3, repeats // 5), called=called, at_least=30)
    fused = weaver_core()
    if fused is not None:
        np.testing.assert_allclose(moved.pack(jets), fused(jets), rtol=1e-6, atol=1e-6)
        ways = {"weaver-core": lambda: fused(jets), "Padded": lambda: moved.pack(jets)}
        results.compare(ways, repeats, called="Padded, over weaver-core", at_most=1.0)


def sorting(results: Results, repeats: int) -> None:
    """Measure the sorting of many elements of few rows."""
    hits = ak.unflatten(np.random.default_rng(1).random(32_000, np.float32), [32_000])
    ours = sonic.Flat("x", sort_by="x")
    ways = {
        "ak.argsort of 32,000 hits": lambda: ak.argsort(hits, axis=1, ascending=False),
        "Flat, 32,000 hits sorted": lambda: ours.pack({"x": hits}),
    }
    results.compare(ways, repeats, at_most=1.2)


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
    """Measure pairs, against numpy in blocks on arrays that are padded already."""
    names = ["px", "py", "pz", "energy"]
    jets = collection(rows // 10, fields=names, mean=MEAN)
    jets["energy"] = np.sqrt(jets.px**2 + jets.py**2 + jets.pz**2 + np.float32(0.02))
    ready = sonic.Padded(names, LENGTH, dtype="float64").pack(jets)
    ours, hand = sonic.Pairwise(names, LENGTH), "pairs in numpy, in blocks of padded arrays"

    def in_blocks() -> list[np.ndarray]:
        return [pairs_in_numpy(ready[start : start + 8]) for start in range(0, len(ready), 8)]

    ways = {hand: in_blocks, "Pairwise": lambda: ours.pack(jets)}
    results.compare(ways, max(3, repeats // 5), peer=True, at_most=1.2)


def small(results: Results, repeats: int) -> None:
    """Measure what a call costs by itself."""
    jets = collection(100, fields=FIELDS[:8], mean=MEAN)
    plain = sonic.Padded(FIELDS[:8], LENGTH)
    features = [sonic.Feature(name, **OPTIONS["weaver"]) for name in FIELDS[:8]]
    weaver = sonic.Padded(features, LENGTH)
    for name, ours in {"Padded, 100 rows": plain, "weaver, 100 rows": weaver}.items():
        times = interleaved({name: lambda: ours.pack(jets)}, repeats)  # noqa: B023
        results.add(times, name, within_s=150e-6)
    model = sonic.Model("m", {"x": plain}, {"y": ["qcd", "top"]})
    nothing = ak.to_packed(jets[:0])
    times = interleaved({"a call without rows": lambda: model(nothing)}, repeats)
    results.add(times, "a call without rows", within_s=300e-6)


def returning(results: Results, rows: int, repeats: int) -> None:
    """Measure the way back, from the answers of a server to requests of 1,024 rows."""
    jets = collection(rows, mean=MEAN)
    inputs = bind_inputs({"x": sonic.Padded(FIELDS, LENGTH)}, jets)
    rng = np.random.default_rng(2)
    scores = rng.random((rows, 2), np.float32)
    weights = rng.random((rows, LENGTH, 4), np.float32)

    def back(output: sonic.Output, answer: np.ndarray) -> ak.Array:
        assembly = ByRow("y", output, inputs)
        for start in range(0, rows, MAX_ROWS):
            here = slice(start, min(start + MAX_ROWS, rows))
            assembly.place(here, here.stop - start, {"y": answer[here]})
        return inputs.rows.unflatten(assembly.content())

    each = sonic.Output(["qcd", "top"])
    every = sonic.Output(list("abcd"), per="constituent")
    # Beside copies of many megabytes, what is measured is the pages that they gave back.
    times = interleaved({"scores to jets": lambda: back(each, scores)}, 10 * repeats)
    results.add(times, "scores to jets", within_s=1e-3)
    ways = {
        "copy of values for constituents": weights.copy,
        "values to constituents": lambda: back(every, weights),
    }
    results.compare(ways, repeats, peer=True, at_most=2)


def measure(results: Results, *, quick: bool) -> None:
    """Measure all of it."""
    sizes, repeats = ([100, 1_000], 3) if quick else ([100, 1_000, 20_000], 25)
    for rows in sizes:
        packing(results, rows, repeats)
    requests(results, sizes[-1], repeats)
    peers(results, sizes[-1], repeats)
    sorting(results, repeats)
    composed(results, sizes[-1], repeats)
    small(results, 30 if quick else 1_000)
    returning(results, sizes[-1], repeats)
    name = "peak memory of Padded, over its result"
    print(f"{name}: {results.numbers[name]:.2f}")


if __name__ == "__main__":
    title = "Layouts: 10 float32 fields, 64 long, Poisson counts of mean 45"
    run(__doc__, title, measure)
