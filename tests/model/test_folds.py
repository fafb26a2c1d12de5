"""Folds that are models of their own: each event by one of them, or the mean of all."""

from __future__ import annotations

import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors, provenance
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


def test_without_a_fold_scores_are_the_mean(server: FakeServer) -> None:
    folds = sonic.Folds(MODELS)
    scores = folds(EVENTS, fold=None)
    assert scores.y.a.tolist() == [[2.0, 4.0], [], [None, 6.0], [8.0]]
    assert scores.y.b.tolist() == [[3.0, 5.0], [], [None, 7.0], [9.0]]
    assert scores.w.tolist() == [[[11.0, 12.0], []], [], [None, [13.0]], [[14.0]]]
    assert str(scores.type) == str(MODELS[0](EVENTS).type)
    empty = folds(EVENTS[:0], fold=None)
    assert str(empty.type.content) == str(scores.type.content)
    again = pickle.loads(pickle.dumps(folds))
    assert again(EVENTS, fold=None).tolist() == scores.tolist()
    varied = folds(sonic.Variations(nominal=EVENTS, other=EVENTS[::-1]), fold=None)
    assert varied["nominal"].tolist() == scores.tolist()
    assert varied["other"].tolist() == scores.tolist()[::-1]


def test_nothing_is_sent_without_events_or_data() -> None:
    folds = sonic.Folds(MODELS)
    tracer = ak.Array(EVENTS.layout.to_typetracer(forget_length=True))
    assert ak.backend(folds(tracer, fold=None)) == "typetracer"
    for some in (EVENTS[:0], EVENTS[1:2]):
        assert folds(some, fold=np.zeros(len(some), int)).tolist() == some.tolist()
        assert folds(some, fold=None).tolist() == some.tolist()


class Analysis(sonic.SonicProcessor):
    """Returns all scores ``a``."""

    def __init__(self, model: Any, **request: Any) -> None:
        self.models = {"y": model}
        self.request = request

    def acquire(self, events: Any) -> Any:
        objects = events.jets if "jets" in events.fields else events
        options = {name: value(events) for name, value in self.request.items()}
        return {"y": sonic.Request(objects, **options) if options else objects}

    def produce(self, events: Any, scores: Any) -> Any:
        return {"a": scores["y"].y.a.tolist()}


NUMBERED = ak.zip({"jets": EVENTS, "event": [5, 3, 4, 6]}, depth_limit=1)
BY_EVENT = [[3.0, 6.0], [], [None, 6.0], [4.0]]
MEANS = [[2.0, 4.0], [], [None, 6.0], [8.0]]


def test_processors_never_take_the_mean_unasked(server: FakeServer) -> None:
    with pytest.raises(errors.ConfigError, match=r"which fold .* fold=\"event % 3\".*fold=None"):
        Analysis(sonic.Folds(MODELS)).process(EVENTS)
    assert not server.requests
    with pytest.raises(errors.ConfigError, match="which fold"):
        sonic.Folds(MODELS)(EVENTS)
    asked = Analysis(sonic.Folds(MODELS, fold=None))
    assert asked.process(EVENTS)["a"] == MEANS


def test_processors_score_each_event_by_its_fold(server: FakeServer) -> None:
    declared = sonic.Folds(MODELS, fold="event % 3")
    for analysis in (
        Analysis(declared),
        Analysis(pickle.loads(pickle.dumps(declared))),
        Analysis(sonic.Folds(MODELS), fold=lambda events: events.event % 3),
        Analysis(sonic.Folds(MODELS), fold=lambda events: "event % 3"),
        Analysis(sonic.Folds(MODELS, fold=None), fold=lambda events: np.array([2, 0, 1, 0])),
    ):
        out = analysis.process(NUMBERED)
        assert out["a"] == BY_EVENT
        assert sonic.report(out).statistics.total().rows == 4
    # Of data, the mean.
    assert Analysis(declared, fold=lambda events: None).process(NUMBERED)["a"] == MEANS
    # In blocks, each with its own events.
    blocks = Analysis(declared)
    blocks.block_size = 3
    assert blocks.process(NUMBERED)["a"] == BY_EVENT


def test_requests_have_the_options_of_submit(server: FakeServer) -> None:
    pinned = Analysis(MODELS[1], version=lambda events: 1, deduplicate=lambda events: True)
    doubled = ak.concatenate([NUMBERED, NUMBERED])
    out = pinned.process(doubled)
    assert out["a"] == 2 * [[2.0, 4.0], [], [None, 6.0], [8.0]]
    assert sonic.report(out).statistics.deduplicated == 4
    by_event = Analysis(MODELS[1], version=lambda events: events.event // events.event)
    assert by_event.process(NUMBERED)["a"] == [[2.0, 4.0], [], [None, 6.0], [8.0]]
    folds = Analysis(sonic.Folds(MODELS, fold=None), version=lambda events: 1)
    assert folds.process(NUMBERED)["a"] == MEANS
    with pytest.raises(errors.ConfigError, match="expected Folds, as fold= is sent .* 'y', got Mo"):
        Analysis(MODELS[0], fold=lambda events: events.event).process(NUMBERED)


@pytest.mark.parametrize("as_array", [ak.Array, lambda numbers: numbers])
def test_each_object_may_have_its_fold(server: FakeServer, as_array: Any) -> None:
    numbers = as_array([[0, 2], [], [1, 1], [None]])
    pending = sonic.Folds(MODELS).submit(EVENTS, fold=numbers)
    scores = pending.result()
    assert scores.y.a.tolist() == [[1.0, 6.0], [], [None, 6.0], [None]]
    assert scores.w.tolist() == [[[1.0, 2.0], []], [], [None, [13.0]], [None]]
    assert pending.statistics.total().rows == pending.statistics.objects == 3


def test_events_of_no_fold_get_none(server: FakeServer) -> None:
    folds = sonic.Folds(MODELS)
    for numbers in (ak.Array([2, None, 1, None]), np.ma.masked_array([2, 0, 1, 0], [0, 1, 0, 1])):
        scores = folds(EVENTS, fold=numbers)
        assert scores.y.a.tolist() == [[3.0, 6.0], [], [None, 6.0], [None]]
    nobody = ak.mask(ak.Array([0, 0, 0, 0]), np.zeros(4, bool))
    assert folds(EVENTS, fold=nobody).tolist() == [[None, None], [], [None, None], [None]]
    tracer = ak.Array(EVENTS.layout.to_typetracer(forget_length=True))
    no_data = ak.Array(nobody.layout.to_typetracer(forget_length=True))
    traced = folds(tracer, fold=no_data)
    assert str(traced.y.type.content) == str(folds(EVENTS, fold=nobody).y.type.content)


def test_variations_of_folds_are_sent_at_once_and_counted(server: FakeServer) -> None:
    up = ak.with_field(EVENTS, EVENTS.pt + 10, "pt")
    server.hold()
    varied = sonic.Variations(nominal=EVENTS, up=up, same=EVENTS)
    pending = sonic.Folds(MODELS).submit(varied, fold=ak.Array([2, 0, 1, 0]))
    assert not pending.done()
    server.release()
    scores = pending.result()
    assert scores["nominal"].y.a.tolist() == scores["same"].y.a.tolist() == BY_EVENT
    assert scores["up"].y.a.tolist() == [[33.0, 36.0], [], [None, 26.0], [14.0]]
    statistics = sonic.report(pending).statistics
    assert (statistics.objects, statistics.deduplicated, statistics.total().rows) == (12, 4, 8)
    # The mean: each row to each model.
    pending = sonic.Folds(MODELS, fold=None).submit(varied)
    assert pending.result()["same"].y.a.tolist() == MEANS
    assert sonic.report(pending).statistics.total().rows == 24


def test_variations_have_folds_of_their_own_objects(server: FakeServer) -> None:
    folded = ak.with_field(EVENTS, ak.Array([[0, 2], [], [1, 1], [0]]), "number")
    varied = sonic.Variations(nominal=folded, cut=folded[:, 1:])
    folds = sonic.Folds(MODELS, fold="number")
    scores = folds(varied)
    assert scores["nominal"].y.a.tolist() == [[1.0, 6.0], [], [None, 6.0], [4.0]]
    assert scores["cut"].y.a.tolist() == [[6.0], [], [6.0], []]
    # Of the events, if the objects do not have it: the same in each variation.
    varied = sonic.Variations(nominal=NUMBERED.jets, cut=NUMBERED.jets[:, 1:])
    scores = sonic.Folds(MODELS, fold="event % 3")(varied, events=NUMBERED)
    assert scores["cut"].y.a.tolist() == [[6.0], [], [6.0], []]
    with pytest.raises(errors.InputError, match="'cut' has 3 events, and there are 4 folds"):
        folds(sonic.Variations(nominal=EVENTS, cut=EVENTS[1:]), fold=np.zeros(4, int))


def test_scores_name_the_models_that_made_them(server: FakeServer) -> None:
    scores = sonic.Folds(MODELS)(EVENTS, fold=np.array([2, 0, 1, 2]))
    made_by = provenance.of_scores(scores)["models"]
    assert [record["model"] for record in made_by] == ["fold_1", "fold_2"]
    assert {record["version"] for record in made_by} == {"1"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sonic.Folds([MODELS[0]]), "two models or more"),
        (lambda: sonic.Folds([MODELS[0], fold(1, y=["a"])]), "'fold_0' and 'fold_1' give other"),
        (lambda: sonic.Folds(["a", "b"]), "expected models, got str"),
        (lambda: sonic.Folds({"a": MODELS[0]}), "expected a list of models, got dict"),
        (lambda: sonic.Folds(MODELS, fold="event %"), "expression 'event %' cannot be read"),
        (lambda: sonic.Folds(MODELS, fold=3), "expected a field or an expression as a str"),
        (
            lambda: sonic.Folds([fold(n, y=sonic.Output(["a"], "int64")) for n in (0, 1)])(
                EVENTS, fold=None
            ),
            "output 'y' has no mean over folds, as it has no fractions; .* % 2",
        ),
    ],
)
def test_bad_declarations_are_refused(make: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0, 1, 2, 3], "fold: event 3 has 3, which has no model; expected one of 0, 1, 2, or None"),
        ([0, 1, -1, 0], "fold: event 2 has -1"),
        ([0, 1, 2], "a fold for each of 4 events, got 3"),
        ([0], "a fold for each of 4 events, got 1"),
        ([0.5, 1, 2, 1], "event 0 has 0.5"),
        ([-0.5, 1, 2, 1], "event 0 has -0.5"),
        ([float("nan"), 1, 2, 1], "fold: event 0 has nan, which has no model"),
        (["a", "b", "c", "d"], "fold: "),
        ([[0], [], [1, 1], [0]], "the folds do not have the same objects"),
        ([[0], [0], [0], [0]], "the folds do not have the same objects"),
        (np.zeros((4, 1), int), "the folds do not have the same objects"),
        ([[[0], [0]], [], [[1], [1]], [[0]]], "the folds do not have the same objects"),
        ([0, "a", 1, 0], "fold: expected one value for each"),
        ([{"f": 0}] * 4, "fold: expected one value for each"),
        (object(), "fold: expected an array, got object"),
        (1, "fold: expected an array, got int"),
        ("event % 3", r"no field 'event'.*events=events"),
        ("event %", "cannot be read"),
    ],
)
def test_bad_numbers_of_folds_are_refused(numbers: Any, message: str) -> None:
    with pytest.raises((errors.InputError, errors.ConfigError), match=message):
        sonic.Folds(MODELS)(EVENTS, fold=numbers)
