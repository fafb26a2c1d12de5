"""Filters and stages, which go on with what scores say.

Events whose scores do not pass a filter never reach `produce`, nor are their columns read. Scores
of one model go into the next if `produce` is a generator.
"""

from __future__ import annotations

import weakref
from types import MappingProxyType
from typing import Any, ClassVar

import awkward as ak
import numpy as np
import pandas as pd
import pytest
from coffea import processor
from coffea.nanoevents.trace import trace_with_typetracer
from tests.nanoaod import sample
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.reporting import STATISTICS_KEY

MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["gev"]})
CORRECT = sonic.Model("correct", {"x": sonic.Row("pt")}, {"y": ["factor"]})
IDENTIFY = sonic.Model("identify", {"x": sonic.Row("corrected")}, {"y": ["mva"]})


class Hard(sonic.SonicFilter, processor.ProcessorABC):
    """Events with a hard jet."""

    models = MappingProxyType({"m": MODEL})

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def acquire(self, events: Any) -> Any:
        return {"m": events.FatJet}

    def overlap(self, events: Any) -> Any:
        return ak.num(events.FatJet["pt"])

    def decide(self, events: Any, scores: Any) -> Any:
        decided = ak.any(scores["m"].gev > self.threshold, axis=1)
        return ak.with_parameter(decided, "__doc__", "HLT_Jet/O")  # as a file's columns have

    def produce(self, events: Any, scores: Any) -> Any:
        assert len(events) == len(scores["m"]) < len(scores.passed) == 1000
        assert ak.all(scores.overlap == ak.num(events.FatJet))
        return {
            "events": len(events),
            "jets": int(ak.sum(ak.num(events.FatJet))),
            "mass": float(ak.sum(events.FatJet.msoftdrop)),
            "scores": float(ak.sum(scores["m"].gev)),
        }


@pytest.fixture(autouse=True)
def server(sonic_server: Any) -> None:
    functions = {
        "m": lambda inputs: {"y": inputs["x"]},
        "correct": lambda inputs: {"y": inputs["x"] + 1},
        "identify": lambda inputs: {"y": 10 * inputs["x"]},
    }
    sonic_server(MODEL, CORRECT, IDENTIFY, functions=functions)


def test_columns_of_no_events_are_not_read() -> None:
    log: list[Any] = []
    out = Hard(1e9).process(sample(access_log=log))
    assert sonic.report(out).statistics.events == 1000
    del out[STATISTICS_KEY]
    assert out == {"events": 0, "jets": 0, "mass": 0.0, "scores": 0.0}
    read = {access.branch for access in log}
    assert "FatJet_pt" in read
    Hard(500).process(sample(access_log=log))
    assert {access.branch for access in log} - read == {"FatJet_msoftdrop"}


@pytest.mark.parametrize(
    "decision",
    [
        np.array([True]),
        np.ones(1000, int),  # would be the numbers of events
        [None] + [True] * 999,
        np.bool_(True),  # of ak.any without axis=1
    ],
    ids=["few", "numbers", "with None", "one for all"],
)
def test_bad_decisions_are_refused(decision: Any) -> None:
    class Wrong(Hard):
        def decide(self, events: Any, scores: Any) -> Any:
            return decision

    events = sample()
    with pytest.raises(errors.InputError, match="Wrong.decide must return one bool for each of"):
        Wrong(1).process(events)


def traced(analysis: sonic.SonicProcessor) -> set[str]:
    """Return the branches that coffea finds without data; no server may be asked."""
    events = sample()
    with sonic.connect("grpc://127.0.0.1:9", retry_timeout_s=0.1):
        found: set[str] = trace_with_typetracer(analysis.process, events, throw=True)
    return found


class Framed(sonic.SonicFilter, processor.ProcessorABC):
    """Objects that are data frames."""

    models = MappingProxyType(dict.fromkeys(("m", "varied", "columns"), MODEL))

    def acquire(self, events: Any) -> Any:
        frame = pd.DataFrame({"pt": ak.to_numpy(events.pt)})
        columns = sonic.Variations(plain={"pt": ak.to_numpy(events.pt)})
        return {"m": frame, "varied": sonic.Variations(up=frame * 2), "columns": columns}

    def overlap(self, events: Any) -> Any:
        return np.asarray(7)

    def decide(self, events: Any, scores: Any) -> Any:
        return events.pt > 1.5

    def produce(self, events: Any, scores: Any) -> Any:
        assert scores.overlap == 7
        assert scores["varied"]["up"].gev.tolist() == [4.0, 6.0]
        assert scores["columns"]["plain"]["gev"].tolist() == [2.0, 3.0]
        assert scores["m"].gev.to_dict() == {1: 2.0, 2: 3.0}  # with the rows' own labels
        return {"events": len(events)}


def test_scores_of_data_frames_are_filtered() -> None:
    assert Framed().process(ak.Array({"pt": [1.0, 2.0, 3.0]}))["events"] == 2


class Plain(sonic.SonicProcessor, processor.ProcessorABC):
    """Scores jets as they are, and shifted by another column."""

    models = MappingProxyType({"m": MODEL})
    block_size = 10

    def acquire(self, events: Any) -> Any:
        jets = ak.zip({"pt": events.FatJet["pt"]})
        up = ak.zip({"pt": events.FatJet["pt"] + events.FatJet["msoftdrop"]})
        return {"m": sonic.Variations(nominal=jets, up=up)}

    def produce(self, events: Any, scores: Any) -> Any:
        return {name: ak.sum(one.gev) for name, one in scores["m"].items()}


class Flagged(Hard):
    """Decides by a column that nothing else reads."""

    def acquire(self, events: Any) -> Any:
        return {"m": ak.zip({"pt": events.FatJet["pt"]})}

    def decide(self, events: Any, scores: Any) -> Any:
        return events.run == 1

    def produce(self, events: Any, scores: Any) -> Any:
        assert scores.passed is not None
        return {"tau1": ak.sum(events.FatJet["tau1"]), "scores": ak.sum(scores["m"].gev)}


@pytest.mark.parametrize(
    ("analysis", "branches"),
    [
        (Plain(), {"nFatJet", "FatJet_pt", "FatJet_msoftdrop"}),
        (Flagged(1), {"run", "nFatJet", "FatJet_pt", "FatJet_tau1"}),
    ],
)
def test_traces_find_the_columns_that_are_read(
    analysis: sonic.SonicProcessor, branches: set[str]
) -> None:
    assert traced(analysis) == branches


EVENTS = ak.Array(
    [
        {"photon": [{"pt": 1.0}, {"pt": 2.0}], "event": 0},
        {"photon": [], "event": 1},
        {"photon": [{"pt": 4.0}], "event": 2},
    ]
)


class Photons(sonic.SonicProcessor):
    models: ClassVar[Any] = {"correct": CORRECT, "identify": IDENTIFY}

    def acquire(self, events: Any) -> Any:
        return {"correct": events.photon}

    def produce(self, events: Any, scores: Any) -> Any:
        photons = ak.with_field(events.photon, scores["correct"].factor, "corrected")
        more = yield {"identify": photons}
        again = ak.with_field(photons, more["identify"].mva, "corrected")
        return {"mva": more["identify"].mva.tolist(), "again": IDENTIFY(again).mva.tolist()}


class Filtered(Photons, sonic.SonicFilter):
    def decide(self, events: Any, scores: Any) -> Any:
        return events.event != 0


@pytest.mark.parametrize("block_size", [None, 1])
def test_scores_of_one_model_go_into_the_next(block_size: int | None) -> None:
    photons = Photons()
    photons.block_size = block_size
    output = photons.process(EVENTS)
    assert output["mva"] == [[20.0, 30.0], [], [50.0]]
    assert output["again"] == [[200.0, 300.0], [], [500.0]]
    # What produce scores by itself counts, too.
    statistics = sonic.report(output).statistics
    assert {model: tally.rows for (_, model, _), tally in statistics} == {
        "correct": 3,
        "identify": 6,
    }
    assert statistics.objects == 9


class Outer(Photons):
    """Has another processor work on its events, also while the servers infer."""

    def overlap(self, events: Any) -> Any:
        return Photons().process(events)

    def produce(self, events: Any, scores: Any) -> Any:
        return {"first": scores.overlap, "second": Photons().process(events)}


def test_statistics_include_those_of_a_processor_inside() -> None:
    output = Outer().process(EVENTS)
    assert output["first"]["mva"] == output["second"]["mva"] == [[20.0, 30.0], [], [50.0]]
    rows = {model: t.rows for (_, model, _), t in sonic.report(output).statistics}
    assert rows == {"correct": 9, "identify": 12}
    assert sonic.report(output["first"]).statistics.objects == 9


def test_stages_of_a_filter_get_the_events_that_pass() -> None:
    assert Filtered().process(EVENTS)["mva"] == [[], [50.0]]


def test_objects_are_freed_before_the_stage_that_follows() -> None:
    class Fresh(sonic.SonicProcessor):
        models: ClassVar[Any] = {"correct": CORRECT}
        numbers: ClassVar[list[Any]] = []

        def acquire(self, events: Any) -> Any:
            pt = np.ones(len(events), np.float32)
            self.numbers.append(weakref.ref(pt))
            content = ak.contents.RecordArray([ak.contents.NumpyArray(pt)], ["pt"])
            return {"correct": ak.Array(content)}

        def produce(self, events: Any, scores: Any) -> Any:
            until(lambda: self.numbers[0]() is None)  # by the pool's thread, too
            yield self.acquire(events)
            until(lambda: self.numbers[1]() is None)
            return {}

    assert Fresh().process(EVENTS)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"identfy": None}, r"Wrong.produce names model 'identfy'; did you mean 'identify'"),
        ([1], r"what Wrong.produce sends: expected a dict of model name and objects, got \[1\]"),
        ({"identify": ak.Array({"corrected": [np.nan]})}, "'corrected' is NaN"),
    ],
)
def test_bad_stages_are_refused(sent: Any, message: str) -> None:
    class Wrong(Photons):
        def produce(self, events: Any, scores: Any) -> Any:
            yield sent

    with pytest.raises((errors.ConfigError, errors.InputError), match=message):
        Wrong().process(EVENTS)
