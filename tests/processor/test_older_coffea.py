"""What works beside each coffea and awkward that may be installed, also without coffea's Runner."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import awkward as ak
import coffea.processor
import numpy as np
import pytest
from coffea.nanoevents import NanoEventsFactory
from tests.commands import run
from tests.nanoaod import Schema

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.errors import ConfigError
from sonic_coffea.testing import FakeModel, FakeServer

MODEL = sonic.Model(
    "m",
    {"x": sonic.Padded(["expected", sonic.Feature("pt", scale=0.01)], 8), "y": sonic.Row(["pt"])},
    {"z": ["a", "b"]},
)


class Analysis(sonic.SonicProcessor, coffea.processor.ProcessorABC):  # type: ignore[misc]
    def __init__(self) -> None:
        self.models = {"m": MODEL}

    def acquire(self, events: Any) -> Any:
        return {"m": events.FatJet}

    def produce(self, events: Any, scores: Any) -> Any:
        return {"n": len(events), "scores": scores["m"]}


@pytest.fixture(scope="module")
def events() -> Any:
    known = inspect.signature(NanoEventsFactory.from_root).parameters
    eager: dict[str, Any] = {"mode": "eager"} if "mode" in known else {"delayed": False}
    return NanoEventsFactory.from_root(
        {str(DATA / "TTbar_1.root"): "Events"}, schemaclass=Schema, entry_stop=100, **eager
    ).events()


def changed(events: Any) -> Any:
    """Events with jets in another order, which carry their constituents' pt."""
    jets = ak.with_field(events.FatJet, sonic.constituents(events).pt, "expected")
    jets = jets[ak.argsort(jets.pt, axis=1, ascending=True)]
    return ak.with_field(events, ak.with_field(jets, jets.pt > 400, "hard"), "FatJet")


def test_processors_score(events: Any) -> None:
    events = changed(events)
    assert sonic.constituents(events).pt.tolist() == events.FatJet.expected.tolist()
    with FakeServer({"m": FakeModel.of(MODEL)}) as server, sonic.connect(server.url):
        analysis = Analysis()
        out = analysis.postprocess(analysis.process(events))
    assert out["n"] == 100
    assert ak.num(out["scores"]).tolist() == ak.num(events.FatJet.pt).tolist()
    assert "requests" in str(sonic.report(out))


def test_dense_arrays_are_packed() -> None:
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    array = ak.Array({"image": images})
    np.testing.assert_array_equal(sonic.Dense("image", shape=(3, 4)).pack(array), images)


def test_files_are_scored_or_the_coffea_that_can_is_named(tmp_path: Path) -> None:
    model = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"z": ["a", "b"]})
    with FakeServer({"m": FakeModel.of(model)}) as server, sonic.connect(server.url):
        arguments = model, str(DATA / "TTbar_1.root"), tmp_path / "scores.parquet"
        if hasattr(coffea.processor, "Runner"):
            assert sonic.score_files(*arguments, collection="FatJet").rows > 1000
        else:
            with pytest.raises(ConfigError, match="install coffea 2025.7 or later"):
                sonic.score_files(*arguments, collection="FatJet")


def test_the_command_line_starts() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
