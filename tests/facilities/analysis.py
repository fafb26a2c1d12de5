"""An analysis as it is run at a facility."""

from __future__ import annotations

from typing import Any, ClassVar

import awkward as ak
from coffea import processor

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

MODEL = sonic.Model("tagger", {"x": sonic.Row(["eta"])}, {"y": ["top"]})


class Tagging(sonic.SonicProcessor, processor.ProcessorABC):
    """Returns the scores of each event's jets."""

    models: ClassVar = {"top": MODEL}

    def acquire(self, events: Any) -> dict[str, Any]:
        return {"top": ak.zip({"eta": events.FatJet_eta})}

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        tops = map(tuple, scores["top"].top.tolist())
        return {"tops": dict(zip(events.event.tolist(), tops, strict=True))}


def serve_example() -> FakeServer:
    """Return a server of the example's analysis."""
    model = sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")
    return FakeServer({model.name: FakeModel.of(model)})
