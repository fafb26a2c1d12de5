"""A model for each value of a field: each object by its own."""

from __future__ import annotations

import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

PHOTONS = ak.Array(
    [
        [
            {"pt": 1.0, "eta": 0.5, "region": "EB"},
            {"pt": 2.0, "eta": 2.0, "region": "EE"},
        ],
        [],
        [None, {"pt": 3.0, "eta": 3.0, "region": None}],
        [{"pt": 4.0, "eta": 1.0, "region": "EB"}],
    ]
)


def model(name: str, **outputs: Any) -> sonic.Model:
    return sonic.Model(name, {"x": sonic.Row("pt")}, outputs or {"y": ["mva"]})


def times(model: sonic.Model, factor: float) -> FakeModel:
    return FakeModel.of(model, lambda inputs: {"y": inputs["x"] * np.float32(factor)})


BARREL, ENDCAP = model("barrel"), model("endcap")
CHOICE = sonic.Choice({"EB": BARREL, "EE": ENDCAP}, by="region")


@pytest.fixture
def server() -> Any:
    with (
        FakeServer({"barrel": times(BARREL, 10), "endcap": times(ENDCAP, 100)}) as running,
        sonic.connect(running.url),
    ):
        yield running


def test_each_object_is_scored_by_the_model_of_its_field(server: FakeServer) -> None:
    CHOICE.check()
    expected = [[10.0, 200.0], [], [None, None], [40.0]]
    for choice in (CHOICE, pickle.loads(pickle.dumps(CHOICE))):
        pending = choice.submit(PHOTONS)
        assert pending.result().mva.tolist() == expected
        assert pending.statistics.total().rows == 3
    by_number = sonic.Choice({True: BARREL, False: ENDCAP}, by="abs(eta) < 1.5")
    assert by_number(PHOTONS).mva.tolist() == [[10.0, 200.0], [], [None, 300.0], [40.0]]
    one_array = {"pt": PHOTONS.pt, "region": PHOTONS.region}
    assert CHOICE(one_array).mva.tolist() == expected
    up = ak.with_field(PHOTONS, PHOTONS.pt * 2, "pt")
    varied = CHOICE(sonic.Variations(nominal=PHOTONS, up=up))
    assert varied["up"].mva.tolist() == [[20.0, 400.0], [], [None, None], [80.0]]


def test_changed_outputs_are_those_of_each_model(server: FakeServer) -> None:
    """Models of the same inputs may share their outputs, if these are equal when rows are sent."""
    changed = model("endcap")
    choice = sonic.Choice({"EB": BARREL, "EE": changed}, by="region")
    changed.outputs = {"y": sonic.Output(["mva"], scale=0.5)}
    assert choice(PHOTONS).mva.tolist() == [[10.0, 100.0], [], [None, None], [40.0]]


def test_processors_choose_by_objects_or_by_events(server: FakeServer) -> None:
    class Analysis(sonic.SonicProcessor):
        def __init__(self, choice: sonic.Choice) -> None:
            self.models = {"photon": choice}

        def acquire(self, events: Any) -> Any:
            return {"photon": events.Photon}

        def produce(self, events: Any, scores: Any) -> Any:
            return {"mva": scores["photon"].mva.tolist()}

    events = ak.zip({"Photon": PHOTONS, "run": [2, 2, 1, 1]}, depth_limit=1)
    out = Analysis(CHOICE).process(events)
    assert out["mva"] == [[10.0, 200.0], [], [None, None], [40.0]]
    out = Analysis(sonic.Choice({1: BARREL, 2: ENDCAP}, by="run")).process(events)
    assert out["mva"] == [[100.0, 200.0], [], [None, 30.0], [40.0]]
    with pytest.raises(errors.FieldError, match=r"'ran'.*nor have the events"):
        Analysis(sonic.Choice({1: BARREL, 2: ENDCAP}, by="ran")).process(events)


def test_numbers_of_objects_of_another_model_may_be_anything(server: FakeServer) -> None:
    shower = sonic.Model("endcap", {"x": sonic.Row("shower")}, {"y": ["mva"]})
    objects = ak.Array(
        [
            [{"pt": 1.0, "shower": np.nan, "ee": 0}, {"pt": 2.0, "shower": 5.0, "ee": 1}],
            [{"pt": np.nan, "shower": 6.0, "ee": 1}],
        ]
    )
    choice = sonic.Choice({0: BARREL, 1: shower}, by="ee")
    assert choice(objects).mva.tolist() == [[10.0, 500.0], [600.0]]
    with pytest.raises(errors.InputError, match="'shower' is NaN"):
        choice(ak.with_field(objects, 1, "ee"))


def test_types_do_not_depend_on_the_objects(server: FakeServer) -> None:
    scores = CHOICE(PHOTONS)
    tracer = ak.Array(PHOTONS.layout.to_typetracer(forget_length=True))
    for some in (PHOTONS[:0], PHOTONS[1:2], PHOTONS[3:], tracer):
        assert str(CHOICE(some).type.content) == str(scores.type.content)


def test_objects_without_what_chooses_get_none(server: FakeServer) -> None:
    jets = ak.Array([[{"eta": 0.5, "r": "EB"}], [], [{"eta": 2.0, "r": "EE"}]])
    events = ak.zip({"Jet": jets, "pt": [1.0, 2.0, 3.0]}, depth_limit=1)
    by_number = sonic.Choice({1: BARREL, 0: ENDCAP}, by="abs(Jet[0].eta) < 1.5")
    by_text = sonic.Choice({"EB": BARREL, "EE": ENDCAP}, by="Jet[0].r")
    tracer = ak.Array(events.layout.to_typetracer(forget_length=True))
    for choice in (by_number, by_text):
        assert choice(events).mva.tolist() == [10.0, None, 300.0]
        assert choice(events, default=-1.0).mva.tolist() == [10.0, -1.0, 300.0]
        for some in (events[:1], events[:0], tracer):
            assert str(choice(some).type.content) == str(choice(events).type.content)
    photons = ak.Array([[{"pt": 1.0}, {"pt": 2.0}], [{"pt": 3.0}], []])
    assert by_text(photons, events=events).mva.tolist() == [[10.0, 20.0], [None], []]


def test_models_of_different_shapes_are_refused() -> None:
    models = [sonic.Model(name, BARREL.inputs, {"y": None}) for name in ("barrel", "endcap")]
    served = {
        m.name: FakeModel(
            inputs={"x": ("float32", (1,))},
            outputs={"y": ("float32", (n,))},
            function=lambda inputs, n=n: {"y": np.tile(inputs["x"], n)},
        )
        for m, n in zip(models, (2, 3), strict=True)
    }
    choice = sonic.Choice(dict(zip(("EB", "EE"), models, strict=True)), by="region")
    with FakeServer(served) as running, sonic.connect(running.url):
        assert choice(PHOTONS[3:]).tolist() == [[[4.0, 4.0]]]
        with pytest.raises(errors.ContractError, match="scores of different types"):
            choice(PHOTONS)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sonic.Choice([BARREL, ENDCAP], by="x"), "expected a dict of two models or more"),
        (lambda: sonic.Choice({"EB": BARREL}, by="x"), "two models or more"),
        (lambda: sonic.Choice({"EB": BARREL, 1: ENDCAP}, by="x"), "numbers or strings as keys"),
        (lambda: sonic.Choice({0.5: BARREL, 1: ENDCAP}, by="x"), "numbers or strings as keys"),
        (lambda: sonic.Choice({0: BARREL, 1: "endcap"}, by="x"), "expected models, got str"),
        (lambda: sonic.Choice({0: BARREL, 1: ENDCAP}, by=3), "as a str, got int"),
        (lambda: sonic.Choice({0: BARREL, 1: ENDCAP}, by="eta <"), "cannot be read"),
        (
            lambda: sonic.Choice({"EB": BARREL, "HF": ENDCAP}, by="region")(PHOTONS),
            "region: event 0 has EE, which has no model; expected one of EB, HF",
        ),
        (lambda: sonic.Choice({1: BARREL, 2: ENDCAP}, by="region")(PHOTONS), "region"),
        (lambda: sonic.Choice({1: BARREL, 2: ENDCAP}, by="pt / 2")(PHOTONS), "event 0 has 0.5"),
        (lambda: sonic.Choice({"1": BARREL, "2": ENDCAP}, by="pt")(PHOTONS), "pt"),
    ],
)
def test_bad_choices_are_refused(make: Any, message: str) -> None:
    with pytest.raises(errors.SonicError, match=message):
        make()


def test_pools_check_and_wake_declarations(server: FakeServer) -> None:
    pool = sonic.connect(server.url)
    other = sonic.Model("barrel", {"x": sonic.Row(["pt", "eta"])}, {"y": ["mva"]})
    assert pool.check(BARREL).ok
    names = [step.name for step in pool.check(CHOICE)[0].servers[server.url]]
    assert names[-2:] == ["declaration of barrel", "declaration of endcap"]
    assert not pool.check(sonic.Choice({0: other, 1: ENDCAP}, by="x")).ok
    assert not pool.check(declared=[other]).ok
    assert pool.wake(CHOICE, BARREL, "endcap", progress=False) < 60
    for wrong in (3, {"barrel": BARREL}, [BARREL]):
        with pytest.raises(errors.ConfigError, match="expected the name of a model, or a Model"):
            pool.check(wrong)
