"""Scores of one model go into the next: `produce` may be a generator."""

from __future__ import annotations

from typing import Any, ClassVar

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors

EVENTS = ak.Array(
    [
        {"photon": [{"pt": 1.0}, {"pt": 2.0}], "event": 0},
        {"photon": [], "event": 1},
        {"photon": [{"pt": 4.0}], "event": 2},
    ]
)
CORRECT = sonic.Model("correct", {"x": sonic.Row("pt")}, {"y": ["factor"]})
IDENTIFY = sonic.Model("identify", {"x": sonic.Row("corrected")}, {"y": ["mva"]})


@pytest.fixture(autouse=True)
def server(sonic_server: Any) -> None:
    functions = {
        "correct": lambda inputs: {"y": inputs["x"] + 1},
        "identify": lambda inputs: {"y": 10 * inputs["x"]},
    }
    sonic_server(CORRECT, IDENTIFY, functions=functions)


class Photons(sonic.SonicProcessor):
    models: ClassVar[Any] = {"correct": CORRECT, "identify": IDENTIFY}

    def acquire(self, events: Any) -> Any:
        return {"correct": events.photon}

    def produce(self, events: Any, scores: Any) -> Any:
        photons = ak.with_field(events.photon, scores["correct"].factor, "corrected")
        more = yield {"identify": photons}
        again = yield {"identify": ak.with_field(photons, more["identify"].mva, "corrected")}
        return {"mva": more["identify"].mva.tolist(), "again": again["identify"].mva.tolist()}


class ByHand(Photons):
    def produce(self, events: Any, scores: Any) -> Any:
        photons = ak.with_field(events.photon, scores["correct"].factor, "corrected")
        return {"mva": IDENTIFY(photons).mva.tolist()}


class Filtered(Photons, sonic.SonicFilter):
    def decide(self, events: Any, scores: Any) -> Any:
        return events.event != 0


@pytest.mark.parametrize("block_size", [None, 1])
def test_scores_of_one_model_go_into_the_next(block_size: int | None) -> None:
    processor = Photons()
    processor.block_size = block_size
    output = processor.process(EVENTS)
    assert output["mva"] == [[20.0, 30.0], [], [50.0]]
    assert output["again"] == [[200.0, 300.0], [], [500.0]]
    assert sonic.report(output).statistics.objects == 9


@pytest.mark.parametrize(("kind", "rows"), [(Photons, [3, 6]), (ByHand, [3, 3])])
def test_calls_in_produce_are_in_the_statistics(kind: Any, rows: list[int]) -> None:
    report = sonic.report(kind().process(EVENTS))
    scored = {model: tally.rows for (_, model, _), tally in report.statistics}
    assert [scored["correct"], scored["identify"]] == rows
    assert report.statistics.objects == sum(rows)


def test_stages_of_a_filter_get_the_events_that_pass() -> None:
    assert Filtered().process(EVENTS)["mva"] == [[], [50.0]]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"identfy": None}, r"Wrong.produce names model 'identfy'; did you mean 'identify'"),
        ([1], "Wrong.produce must yield a dict of model name and objects, got list"),
    ],
)
def test_bad_stages_are_refused(sent: Any, message: str) -> None:
    class Wrong(Photons):
        def produce(self, events: Any, scores: Any) -> Any:
            yield sent

    with pytest.raises(errors.ConfigError, match=message):
        Wrong().process(EVENTS)


def test_errors_in_a_stage_fail_the_chunk() -> None:
    class Careful(Photons):
        def produce(self, events: Any, scores: Any) -> Any:
            broken = ak.with_field(events.photon, np.nan, "corrected")
            yield {"identify": broken}

    with pytest.raises(errors.InputError, match="'corrected' is NaN"):
        Careful().process(EVENTS)
