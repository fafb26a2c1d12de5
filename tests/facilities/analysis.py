"""An analysis as it is run at a facility, and what it must give, whatever happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import awkward as ak
import numpy as np
import uproot
from coffea import processor
from coffea.nanoevents import BaseSchema
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

MODEL = sonic.Model("tagger", {"x": sonic.Row(["eta"])}, {"y": ["top"]})
FILE = DATA / "TTbar_1.root"
CHUNKS = 8


class Tagging(sonic.SonicProcessor, processor.ProcessorABC):
    """Returns the scores of each event's jets."""

    models: ClassVar = {"top": MODEL}

    def acquire(self, events: Any) -> dict[str, Any]:
        return {"top": ak.zip({"eta": events.FatJet_eta})}

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        tops = map(tuple, scores["top"].top.tolist())
        return {"tops": dict(zip(events.event.tolist(), tops, strict=True))}


def analyse(executor: Any) -> dict[str, Any]:
    """Run the analysis in eight chunks."""
    run = processor.Runner(executor, schema=BaseSchema, chunksize=125)
    out: dict[str, Any] = run({"TTbar": {"treename": "Events", "files": [str(FILE)]}}, Tagging())
    return out


def check(out: dict[str, Any]) -> None:
    """Compare with what the server's formula gives, element by element."""
    columns = uproot.open(FILE)["Events"].arrays(["event", "FatJet_eta"])
    tops = (1 + np.sin(columns.FatJet_eta)) / 2
    assert len(out["tops"]) == len(columns) == 125 * CHUNKS
    for event, jets in zip(columns.event.tolist(), tops.tolist(), strict=True):
        np.testing.assert_allclose(out["tops"][event], jets, rtol=0, atol=1e-6)
    # Nothing is counted twice, however often it was sent.
    assert sonic.report(out).to_dict()["total"]["rows"] == ak.count(tops)


def interrupted(
    run: Callable[[], dict[str, Any]], server: FakeServer, interrupt: Callable[[], None]
) -> dict[str, Any]:
    """Run what scores a chunk at a time on each of two workers; interrupt it when both wait."""
    before, over = len(server.requests), threading.Event()

    def disturb() -> None:
        try:
            until(lambda: over.is_set() or len(server.requests) >= before + 2)
            assert not over.is_set(), "the run was over before both workers had sent rows"
            interrupt()
        finally:
            server.release()

    server.hold()
    with ThreadPoolExecutor(1) as thread:
        disturbed = thread.submit(disturb)
        try:
            return run()  # in this thread, as Parsl's runs want the main one
        finally:
            over.set()
            disturbed.result()


def serve_example() -> FakeServer:
    """Return a server of the example's analysis."""
    model = sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")
    return FakeServer({model.name: FakeModel.of(model)})


def serve() -> FakeServer:
    """Return a server that takes a chunk in one request."""
    return FakeServer({MODEL.name: FakeModel.of(MODEL, max_rows=1000)})
