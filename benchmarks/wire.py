"""What formats cost on the wire: bytes for 1,000 jets, and the time to score all jets.

The jets of the whole sample go to the same computation, a sum over constituents on a real Triton,
as padded, bucketed and flat tensors, in half precision, and compressed. All results must agree.

Notes
-----
Half precision halves the bytes, and flat tensors save the padding. Over loopback, bytes cost
almost nothing, so these times are mostly CPU time at both ends. Half precision is cast and cast
back, and buckets make more requests. All flat rows travel in a single request, so nothing is packed
meanwhile. Compression takes longer than everything else together. Sending less pays where the
network is slow.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path

import awkward as ak
import onnx
import onnx.parser
from coffea.nanoevents import NanoAODSchema, NanoEventsFactory
from harness import Results, interleaved, run

import sonic_coffea as sonic
from sonic_coffea.demo.features import CONSTITUENT_FEATURES, constituent_features
from sonic_coffea.demo.samples import sample_files
from sonic_coffea.pool import Pool, Settings

LENGTH = 64
BASE = "padded to 64, float32"
BUCKETS = (16, 32, 48, 64)
SUM = {"y": ["sum"]}
FIELDS = list(CONSTITUENT_FEATURES)
SUM_OF_TWO = """<int64[1] one = {1}, int64[2] both = {1, 2}> {
    single = Cast<to = 1>(x)
    s = ReduceSum<keepdims = 0>(single, both)
    y = Unsqueeze(s, one)
}"""
# Running sums, of which the parts are differences, in double precision.
SUM_OF_PARTS = """<
    int64 zero = {0}, int64[1] first = {0}, int64[1] one = {1}, int64[1] last = {-1},
    int64[1] all = {2147483648}, double[1, 1] nothing = {0.0}
> {
    wide = Cast<to = 11>(x)
    each = ReduceSum<keepdims = 1>(wide, one)
    running = CumSum(each, zero)
    until = Concat<axis = 0>(nothing, running)
    at = Gather<axis = 0>(until, splits)
    ends = Slice(at, one, all)
    begins = Slice(at, first, last)
    s = Sub(ends, begins)
    y = Cast<to = 1>(s)
}"""
WAYS = {
    BASE: ("padded", {}),
    "padded to 64, float16": ("half", {}),
    "bucketed 16, 32, 48, 64": ("bucketed", {}),
    "flat": ("flat", {}),
    "padded to 64, gzip": ("padded", {"compression": "gzip"}),
}
MODELS = {
    "padded": sonic.Model("padded", {"x": sonic.Padded(FIELDS, LENGTH)}, SUM),
    "half": sonic.Model("half", {"x": sonic.Padded(FIELDS, LENGTH, dtype="float16")}, SUM),
    "bucketed": sonic.Model("bucketed", {"x": sonic.Bucketed(FIELDS, BUCKETS)}, SUM),
    "flat": sonic.Model("flat", {"x": sonic.Flat(FIELDS, splits="splits")}, SUM),
}


def repository(folder: Path) -> Path:
    """Write the same sum for each of the formats."""
    path, wide = folder / "repository", len(FIELDS)
    for name, (inputs, nodes) in {
        "padded": (f"float[N, {wide}, {LENGTH}] x", SUM_OF_TWO),
        "half": (f"float16[N, {wide}, {LENGTH}] x", SUM_OF_TWO),
        "bucketed": (f"float[N, {wide}, L] x", SUM_OF_TWO),
        "flat": (f"float[C, {wide}] x, int64[S] splits", SUM_OF_PARTS),
    }.items():
        text = f"{name} ({inputs}) => (float[N, 1] y) {nodes}"
        network = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> {text}')
        onnx.save(network, folder / f"{name}.onnx")
        rows = 0 if name == "flat" else 1024
        sonic.build_repository(path, {name: folder / f"{name}.onnx"}, max_batch_size=rows)
    return path


def sample() -> ak.Array:
    """Return the features of the sample's jets, ``events * jets * var * {...}``, cut to 64."""
    NanoAODSchema.warn_missing_crossrefs = False
    parts = []
    for path in (path for paths in sample_files().values() for path in paths):
        events = NanoEventsFactory.from_root({str(path): "Events"}).events()
        features = constituent_features(events.FatJet, sonic.constituents(events))
        parts.append(ak.zip({name: features[name][:, :, :LENGTH] for name in FIELDS}))
    return ak.to_packed(ak.concatenate(parts))


def measure(results: Results, *, quick: bool) -> None:
    """Score the jets in all formats."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.network.toxics import ToxicProxy

    jets = sample()[: 300 if quick else None]
    expected = ak.sum(sum(jets[name] for name in FIELDS), axis=-1)
    megabytes = {}
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        server = opened.enter_context(sonic.LocalServer(repository(folder), port=0))
        ways = {}
        for way, (name, options) in WAYS.items():
            options |= {"shared_memory": False}
            pool = opened.enter_context(Pool(Settings.make(server.url, **options)))
            ways[way] = partial(MODELS[name], jets, pool=pool)
            with (
                ToxicProxy(server.url) as counting,
                Pool(Settings.make(counting.url, **options)) as counted,
            ):
                scores = MODELS[name](jets, pool=counted).sum
                sent = counting.sent_bytes
            assert ak.all(abs(scores - expected) < (2.0 if name == "half" else 2e-2)), way
            megabytes[way] = 1e-3 * sent / int(ak.count(expected))
        times = interleaved(ways, 2 if quick else 25, title="formats")
    for way in ways:
        results.add(times, way, against="" if way == BASE else BASE)
        results.note(f"{way}: MB for 1,000 jets", megabytes[way])
    results.numbers["MB for 1,000 jets"] = megabytes


if __name__ == "__main__":
    title = "Wire: one sum over constituents in a real Triton, in several formats"
    run(__doc__, title, measure)
