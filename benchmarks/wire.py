"""What formats cost on the wire: bytes for 1,000 jets, and how fast the jets are scored.

The same jets of the sample go to the same computation, a sum over constituents on a real Triton,
as padded, bucketed and flat tensors, in half precision, and compressed. All results must agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import onnx
from coffea.nanoevents import NanoAODSchema, NanoEventsFactory
from harness import Results, finish, interleaved, parser
from matplotlib.figure import Figure
from onnx import TensorProto, helper, numpy_helper

import sonic_coffea as sonic
from sonic_coffea.demo.features import CONSTITUENT_FEATURES, constituent_features
from sonic_coffea.demo.samples import sample_files
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.transport import Address

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


class Relay:
    """Passes bytes on to a port, and counts them."""

    def __init__(self, port: int) -> None:
        self.sent = 0
        self._to = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Relay:
        self._thread.start()
        listening = asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        self._server.close()
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        if passing:
            await asyncio.wait(passing, timeout=5)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, on = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(self._pass(reader, on, counts=True), self._pass(back, writer))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False
    ) -> None:
        while data := await reader.read(1 << 20):
            self.sent += len(data) if counts else 0
            writer.write(data)
            await writer.drain()
        writer.close()


def sample() -> ak.Array:
    """Return the features of the sample's jets, ``events * jets * var * {...}``, cut to 64."""
    NanoAODSchema.warn_missing_crossrefs = False
    parts = []
    for path in (path for paths in sample_files().values() for path in paths):
        events = NanoEventsFactory.from_root({str(path): "Events"}).events()
        features = constituent_features(events.FatJet, sonic.constituents(events))
        parts.append(ak.zip({name: features[name][:, :, :LENGTH] for name in FIELDS}))
    return ak.to_packed(ak.concatenate(parts))


def measure(results: Results, jets: ak.Array, folder: Path, repeats: int) -> None:
    """Score the jets in all formats."""
    expected = ak.sum(sum(jets[name] for name in FIELDS), axis=-1)
    megabytes = {}
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(sonic.LocalServer(repository(folder), port=0))
        ways = {}
        for way, (name, options) in WAYS.items():
            options |= {"shared_memory": False}
            settings = Settings.make(server.url, **options)
            pool = opened.enter_context(Pool(settings))
            ways[way] = partial(MODELS[name], jets, pool=pool)
            with (
                Relay(Address.parse(server.url).port) as relay,
                Pool(Settings.make(f"grpc://127.0.0.1:{relay.port}", **options)) as counted,
            ):
                scores = MODELS[name](jets, pool=counted).sum
            assert ak.all(abs(scores - expected) < (2.0 if name == "half" else 2e-2)), way
            megabytes[way] = 1e-3 * relay.sent / int(ak.count(expected))
        times = interleaved(ways, repeats, title="formats")
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


def main() -> None:
    """Run it."""
    options = parser(__doc__ or "").parse_args()
    jets = sample()
    results = Results("Wire: one sum over constituents in a real Triton, in several formats")
    with tempfile.TemporaryDirectory() as folder:
        measure(
            results, jets[:300] if options.quick else jets, Path(folder), 2 if options.quick else 25
        )
    finish(results, options, draw)


if __name__ == "__main__":
    main()
