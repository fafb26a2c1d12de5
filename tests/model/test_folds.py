"""Folds that are models of their own: each event by one of them, or the mean of all."""

from __future__ import annotations

import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

EVENTS = ak.Array(
    [
        [{"pt": 1.0, "pf": [1.0, 2.0]}, {"pt": 2.0, "pf": []}],
        [],
        [None, {"pt": 3.0, "pf": [3.0]}],
        [{"pt": 4.0, "pf": [4.0]}],
    ]
)


def fold(number: int, **outputs: Any) -> sonic.Model:
    inputs = {
        "x": sonic.Row(sonic.Feature("pt", scale=1.0 + number)),
        "pf": sonic.Padded("pf", 2),
    }
    declared = {"y": ["a", "b"], "w": sonic.Output(per="constituent")}
    return sonic.Model(f"fold_{number}", inputs, outputs or declared)


def served(number: int) -> FakeModel:
    def function(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"][:, 0]
        return {
            "y": np.stack([x, x + number], axis=1),
            "w": inputs["pf"][:, 0] + np.float32(10 * number),
        }

    return FakeModel.of(fold(number), function)


MODELS = [fold(number) for number in range(3)]


@pytest.fixture
def server() -> Any:
    models = {f"fold_{number}": served(number) for number in range(3)}
    with FakeServer(models) as running, sonic.connect(running.url):
        yield running


def test_each_event_is_scored_by_its_fold(server: FakeServer) -> None:
    folds = sonic.Folds(MODELS)
    folds.check()
    numbers = ak.Array([2, 0, 1, 0])
    pending = folds.submit(EVENTS, fold=numbers)
    scores = pending.result()
    assert scores.y.a.tolist() == [[3.0, 6.0], [], [None, 6.0], [4.0]]
    assert scores.y.b.tolist() == [[5.0, 8.0], [], [None, 7.0], [4.0]]
    assert scores.w.tolist() == [[[21.0, 22.0], []], [], [None, [13.0]], [[4.0]]]
    assert pending.statistics.total().rows == 4
    assert scores.attrs["sonic"]["model"] == "fold_0, fold_1, fold_2"
    assert str(scores.type) == str(MODELS[0](EVENTS).type)
    same = folds(EVENTS, fold=np.asarray([1, 1, 1, 1]))
    assert same.tolist() == MODELS[1](EVENTS).tolist()


def test_the_mean_of_all(server: FakeServer) -> None:
    folds = sonic.Folds(MODELS)
    scores = folds(EVENTS)
    assert scores.y.a.tolist() == [[2.0, 4.0], [], [None, 6.0], [8.0]]
    assert scores.y.b.tolist() == [[3.0, 5.0], [], [None, 7.0], [9.0]]
    assert scores.w.tolist() == [[[11.0, 12.0], []], [], [None, [13.0]], [[14.0]]]
    assert str(scores.type) == str(MODELS[0](EVENTS).type)
    empty = folds(EVENTS[:0])
    assert str(empty.type.content) == str(scores.type.content)
    again = pickle.loads(pickle.dumps(folds))
    assert again(EVENTS).tolist() == scores.tolist()
    varied = folds(sonic.Variations(nominal=EVENTS, other=EVENTS[::-1]))
    assert varied["nominal"].tolist() == scores.tolist()
    assert varied["other"].tolist() == scores.tolist()[::-1]


def test_no_events_and_no_data() -> None:
    folds = sonic.Folds(MODELS)
    tracer = ak.Array(EVENTS.layout.to_typetracer(forget_length=True))
    assert ak.backend(folds(tracer)) == "typetracer"
    for some in (EVENTS[:0], EVENTS[1:2]):
        assert folds(some, fold=np.zeros(len(some), int)).tolist() == some.tolist()
        assert folds(some).tolist() == some.tolist()


def test_a_processor_takes_the_mean(server: FakeServer) -> None:
    class Analysis(sonic.SonicProcessor):
        models = {"y": sonic.Folds(MODELS)}  # noqa: RUF012

        def acquire(self, events: Any) -> Any:
            return {"y": events}

        def produce(self, events: Any, scores: Any) -> Any:
            return {"sum": float(ak.sum(scores["y"].y.a))}

    assert Analysis().process(EVENTS)["sum"] == 20.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sonic.Folds([MODELS[0]]), "two models or more, got 1"),
        (lambda: sonic.Folds([MODELS[0], fold(1, y=["a"])]), "'fold_0' and 'fold_1' give other"),
        (lambda: sonic.Folds(["a", "b"]), "expected models, got str"),
        (
            lambda: sonic.Folds([fold(n, y=sonic.Output(["a"], "int64")) for n in (0, 1)])(EVENTS),
            "output 'y' has no mean over folds, as it has no fractions; .* % 2",
        ),
    ],
)
def test_folds_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0, 1, 2, 3], "event 3 has fold 3, and there are 3, counted from 0"),
        ([0, 1, 2], "a fold for each of 4 events, got 3"),
        ([0.5, 1, 2, 1], "as whole numbers, got float64"),
    ],
)
def test_folds_of_events_that_are_none(numbers: Any, message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        sonic.Folds(MODELS)(EVENTS, fold=numbers)
