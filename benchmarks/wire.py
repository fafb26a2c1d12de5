"""What formats cost on the wire: bytes for 1,000 jets, and how fast the jets are scored.

The same jets of the sample go to the same computation, a sum over constituents on a real Triton,
as padded, bucketed and flat tensors, in half precision, and compressed. All results must agree.

Notes
-----
Half precision halves the bytes, and flat tensors save the padding. Over loopback, bytes cost
almost nothing, so these times are CPU times at both ends, and the plainest format is the fastest.
Half precision is cast and cast back, and buckets make more requests. All flat rows travel in a
single request, so nothing is packed meanwhile. Compression takes longer than everything else
together. Sending less pays where the network is slow.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import onnx
from coffea.nanoevents import NanoAODSchema, NanoEventsFactory
from harness import Results, interleaved, run
from matplotlib.figure import Figure
from onnx import TensorProto, helper, numpy_helper

import sonic_coffea as sonic
from sonic_coffea.demo.features import CONSTITUENT_FEATURES, constituent_features
from sonic_coffea.demo.samples import sample_files
from sonic_coffea.pool import Pool, Settings

LENGTH = 64
BASE = "padded to 64, float32"
BUCKETS = (16, 32, 48, 64)
SUM = {"y": ["sum"]}
FIELDS = list(CONSTITUENT_FEATURES)
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


def write(path: Path, inputs: dict[str, tuple[int, list[Any]]], nodes: list[Any]) -> Path:
    """Save a network that ends in `y`."""
    numbers = {"one": [1], "both": [1, 2], "zero": 0, "first": [0], "last": [-1], "all": [2**31]}
    constants = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in numbers.items()]
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(n, kind, dims) for n, (kind, dims) in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1])],
        [*constants, numpy_helper.from_array(np.zeros((1, 1)), "nothing")],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


def repository(folder: Path) -> Path:
    """Write the same sum for each of the formats."""
    path, node, wide = folder / "repository", helper.make_node, len(FIELDS)
    summed = [
        node("Cast", ["x"], ["single"], to=TensorProto.FLOAT),
        node("ReduceSum", ["single", "both"], ["s"], keepdims=0),
        node("Unsqueeze", ["s", "one"], ["y"]),
    ]
    for name, kind, length in (
        ("padded", TensorProto.FLOAT, LENGTH),
        ("half", TensorProto.FLOAT16, LENGTH),
        ("bucketed", TensorProto.FLOAT, "L"),
    ):
        file = write(folder / f"{name}.onnx", {"x": (kind, ["N", wide, length])}, summed)
        sonic.build_repository(path, {name: file}, max_batch_size=1024)
    flat = write(
        folder / "flat.onnx",
        {"x": (TensorProto.FLOAT, ["C", wide]), "splits": (TensorProto.INT64, ["S"])},
        [
            node("Cast", ["x"], ["double"], to=TensorProto.DOUBLE),
            node("ReduceSum", ["double", "one"], ["each"], keepdims=1),
            node("CumSum", ["each", "zero"], ["running"]),
            node("Concat", ["nothing", "running"], ["until"], axis=0),
            node("Gather", ["until", "splits"], ["at"], axis=0),
            node("Slice", ["at", "one", "all"], ["ends"]),
            node("Slice", ["at", "first", "last"], ["begins"]),
            node("Sub", ["ends", "begins"], ["s"]),
            node("Cast", ["s"], ["y"], to=TensorProto.FLOAT),
        ],
    )
    sonic.build_repository(path, {"flat": flat}, max_batch_size=0)
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


def draw(content: dict[str, Any]) -> Figure:
    """Draw bytes and times."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    wire = content["MB for 1,000 jets"]
    left.barh(list(wire), list(wire.values()))
    left.set_xlabel("MB for 1,000 jets")
    right.barh(list(wire), [m["median_s"] * 1e3 for m in content["measurements"]], color="C1")
    right.set_xlabel("ms for all jets")
    left.invert_yaxis()
    return figure


if __name__ == "__main__":
    title = "Wire: one sum over constituents in a real Triton, in several formats"
    run(__doc__, title, measure, draw)
