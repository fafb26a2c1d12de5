"""How much faster a whole analysis is with a shared accelerator than with inference on its core.

A chunk of the sample has CPU work and a jet tagger. The tagger runs in onnxruntime on the worker's
one core, or on a stand-in accelerator in a real Triton, by a blocking call or with suspended
chunks; tensors travel in messages. The limit is the same chunk without inference. The CPU work is
chosen so that the tagger takes 10, 25 and 50 % of a chunk on the worker's core.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import accelerator
import awkward as ak
import numpy as np
import onnxruntime
from accelerator import compute
from coffea.nanoevents import NanoAODSchema, NanoEventsFactory
from harness import Results, run

import sonic_coffea as sonic
from sonic_coffea.demo.features import constituent_features
from sonic_coffea.demo.samples import DATA
from sonic_coffea.layouts import bind_inputs

MODEL = sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")
BATCH, JETS = 256, 256
NONE, HERE, BLOCKING, SUSPENDED = (
    "no inference",
    "onnxruntime on the worker",
    "service, blocking",
    "service, suspended chunks",
)


@functools.cache
def jets() -> ak.Array:
    """Return the features of some jets of the sample, once a process."""
    NanoAODSchema.warn_missing_crossrefs = False
    events = NanoEventsFactory.from_root({str(DATA / "TTbar_1.root"): "Events"}).events()
    events = events[: int(np.searchsorted(np.cumsum(ak.num(events.FatJet)), JETS))]
    return ak.to_packed(constituent_features(events.FatJet, sonic.constituents(events)))


@functools.cache
def session() -> onnxruntime.InferenceSession:
    """Return the network, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        str(DATA / "toptagger.onnx"), options, providers=["CPUExecutionProvider"]
    )


def here() -> np.ndarray:
    """Score the jets on this core, from the same tensors."""
    inputs = bind_inputs(MODEL.inputs, jets())
    parts = [
        session().run(None, inputs.pack(start, min(start + BATCH, len(inputs))))[0]
        for start in range(0, len(inputs), BATCH)
    ]
    return np.concatenate(parts)


def chunk(number: int, *, cpu_s: float, way: str) -> int:
    """Do half of the work, take the scores, do the rest."""
    del number
    compute(cpu_s / 2)
    if way == HERE:
        rows = len(here())
    elif way == NONE:
        rows = 0
    else:
        rows = int(ak.count(MODEL(jets()).Top))
    compute(cpu_s / 2)
    return rows


def inference_s(turns: int) -> float:
    """Return how long the jets of a chunk take on this core, in CPU time."""
    here()
    times = []
    for _ in range(turns):
        begun = time.thread_time()
        here()
        times.append(time.thread_time() - begun)
    return float(np.median(times))


def measure(results: Results, *, quick: bool) -> None:
    """Compare the walls of all ways."""
    parts, chunks, turns = ([0.5], 4, 1) if quick else ([0.1, 0.25, 0.5], 16, 3)
    infer_s = inference_s(5)
    results.note(f"the tagger on a core: seconds for {JETS} jets", infer_s)
    table = results.numbers["throughput over the ideal, by the tagger's part"] = {}
    with contextlib.ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "repository"
        sonic.build_repository(repository, {"toptagger": DATA / "toptagger.onnx"})
        stand_in = accelerator.stand_in(repository, "toptagger")
        server = stack.enter_context(sonic.LocalServer(stand_in))
        client = stack.enter_context(accelerator.workers(1, server))
        for part in parts:
            cpu_s = infer_s * (1 - part) / part
            walls: dict[str, list[float]] = {way: [] for way in (NONE, HERE, BLOCKING, SUSPENDED)}
            for _, (way, taken) in itertools.product(range(turns), walls.items()):
                most = 4 if way == SUSPENDED else 0
                options: Any = {"max_suspended_chunks": most, "shared_memory": False}
                with sonic.connect(server, client=client, **options):
                    client.gather(client.map(chunk, range(2), cpu_s=0.0, way=way, pure=False))
                    begun = time.perf_counter()
                    futures = client.map(chunk, range(chunks), cpu_s=cpu_s, way=way, pure=False)
                    client.gather(futures)
                    taken.append(time.perf_counter() - begun)
            medians = {way: float(np.median(taken)) for way, taken in walls.items()}
            name = f"tagger {part:.0%} of a chunk"
            table[f"{part:g}"] = {way: medians[NONE] / medians[way] for way in medians}
            for way in (HERE, BLOCKING, SUSPENDED):
                ideal = table[f"{part:g}"][way]
                results.note(f"{name}: {way}, throughput over the ideal", ideal)
            gain = medians[HERE] / medians[SUSPENDED] - 1
            results.note(f"{name}: gain of the whole workflow", gain)


if __name__ == "__main__":
    title = "Workflow: a chunk with a jet tagger, on the worker or as a service"
    run(__doc__, title, measure)
