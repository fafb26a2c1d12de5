"""Each object is scored by its own model, by all, or by none: folds, choices and masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

LABELS = ["a", "b"]


def fold(number: int, **outputs: Any) -> sonic.Model:
    """Models with inputs and transformations of their own."""
    scaled = sonic.Row(sonic.Feature("pt", scale=1.0 + number))
    declared = {"y": LABELS, "w": sonic.Output(per="constituent")}
    inputs = {"x": scaled, "pf": sonic.Padded("pf", 2)}
    return sonic.Model(f"fold_{number}", inputs, outputs or declared)


def plain(number: int, **outputs: Any) -> sonic.Model:
    """Models with the same inputs, whose scores are numbers."""
    return sonic.Model(f"plain_{number}", {"x": sonic.Row("pt")}, outputs or {"y": LABELS})


def served(model: sonic.Model, number: int) -> FakeModel:
    def function(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        each = {"y": np.hstack([x, x + number]), "z": x.astype(np.int64)}
        if "pf" in inputs:
            each["w"] = inputs["pf"][:, 0] + np.float32(10 * number)
        return {name: each[name] for name in model.outputs}

    return FakeModel.of(model, function)


FOLDS = [fold(number) for number in range(3)]
PLAIN = [plain(number) for number in range(3)]
WHOLE = plain(9, y=LABELS, z=sonic.Output(dtype="int64"))
CHOICE = sonic.Choice({"A": FOLDS[0], "B": FOLDS[1]}, by="region")


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    models = [*enumerate(FOLDS), *enumerate(PLAIN), (9, WHOLE)]
    with FakeServer({model.name: served(model, number) for number, model in models}) as server:
        yield server


@pytest.fixture
def server(running: FakeServer) -> Iterator[FakeServer]:
    with sonic.connect(running.url):
        yield running


# The events of all other tests.
EVENTS = ak.Array(
    [
        [{"pt": 1.0, "pf": [1.0, 2.0], "region": "A"}, {"pt": 2.0, "pf": [], "region": "B"}],
        [],
        [None, {"pt": 3.0, "pf": [3.0], "region": None}],
        [{"pt": 4.0, "pf": [4.0], "region": "A"}],
    ]
)
ONE, TWO = PLAIN[:2]
MASK = EVENTS.pt > 1.5
NUMBERED = ak.zip({"jets": EVENTS, "event": [5, 3, 4, 6]}, depth_limit=1)
EVEN = ak.zip({"event": [0, 3, 6, 9]})
BY_EVEN = [[1.0, 2.0], [], [None, 3.0], [4.0]]
MEANS = [[2.0, 4.0], [], [None, 6.0], [8.0]]


@pytest.mark.usefixtures("server")
def test_folds_are_lists_or_masked_arrays() -> None:
    by_list = sonic.Folds(FOLDS)(EVENTS, fold=[[0, 2], [], [1, 1], [None]])
    assert by_list.y.a.tolist() == [[1.0, 6.0], [], [None, 6.0], [None]]
    of_some = sonic.Folds(FOLDS)(EVENTS, fold=[[0, 2], [], None, [None]])
    assert of_some.y.a.tolist() == [[1.0, 6.0], [], [None, None], [None]]
    masked = np.ma.masked_array([2, 0, 1, 0], [0, 1, 0, 1])
    by_event = sonic.Folds(FOLDS)(EVENTS, fold=masked)
    assert by_event.y.a.tolist() == [[3.0, 6.0], [], [None, 6.0], [None]]


@pytest.mark.usefixtures("server")
def test_each_variation_has_folds_of_its_own() -> None:
    varied = sonic.Variations(nominal=EVENTS, up=EVENTS[:1])
    scores = sonic.Folds(FOLDS)(varied, fold={"nominal": [2, 0, 1, 0], "up": [1]})
    assert scores["nominal"].y.a.tolist() == [[3.0, 6.0], [], [None, 6.0], [4.0]]
    assert scores["up"].y.a.tolist() == [[2.0, 4.0]]
    with pytest.raises(errors.InputError, match="no fold for variation 'up'; there are: nominal"):
        sonic.Folds(FOLDS)(varied, fold={"nominal": [2, 0, 1, 0]})


@pytest.mark.usefixtures("server")
def test_masks_have_the_objects_of_events_or_lists_that_are_none() -> None:
    events = ak.Array([{"jets": [{"pt": 3.0}, {"pt": 0.5}]}, None, {"jets": None}])
    model = sonic.Model("plain_0", {"x": sonic.Row("jets.pt")}, {"y": LABELS})
    assert model(events, mask=events.jets.pt > 1).a.tolist() == [[3.0, None], None, None]
    masked = ak.mask(EVENTS, [True, True, False, True])
    assert ONE(masked, mask=MASK).a.tolist() == [[None, 2.0], [], None, [4.0]]


class Analysis(sonic.SonicProcessor):
    """Returns all scores ``a``."""

    def __init__(self, model: Any, **request: Any) -> None:
        self.models = {"y": model}
        self.request = request

    def acquire(self, events: Any) -> Any:
        options = {name: value(events) for name, value in self.request.items()}
        return {"y": sonic.Request(events.jets, **options) if options else events.jets}

    def produce(self, events: Any, scores: Any) -> Any:
        return {"a": scores["y"].y.a.tolist()}


def test_requests_have_the_options_of_submit(server: FakeServer) -> None:
    pinned = Analysis(FOLDS[1], version=lambda _: 1, deduplicate=lambda _: True)
    out = pinned.process(ak.concatenate([NUMBERED, NUMBERED]))
    assert out["a"] == 2 * MEANS
    assert sonic.report(out).statistics.deduplicated == 4
    of_others = Analysis(sonic.Folds(FOLDS, fold="event % 3"), events=lambda _: EVEN)
    assert of_others.process(NUMBERED)["a"] == BY_EVEN
    with pytest.raises(errors.ConfigError, match="expected Folds, as fold= is sent .* 'y', got Mo"):
        Analysis(FOLDS[0], fold=lambda events: events.event).process(NUMBERED)
    with pytest.raises(errors.FieldError, match=r"'ran'.*nor have the events"):
        Analysis(sonic.Choice({1: FOLDS[0], 2: FOLDS[1]}, by="ran")).process(NUMBERED)


def test_changed_outputs_are_those_of_each_model(server: FakeServer) -> None:
    """Models of the same inputs may share their outputs, if these are equal when rows are sent."""
    changed = plain(1)
    choice = sonic.Choice({"A": PLAIN[0], "B": changed}, by="region")
    changed.outputs = {"y": sonic.Output(LABELS, scale=0.5)}
    assert choice(EVENTS).b.tolist() == [[1.0, 1.5], [], [None, None], [4.0]]


def test_models_with_inputs_in_another_order_have_masks_and_lists_of_their_own(
    sonic_server: Any,
) -> None:
    parts = {name: sonic.Padded(name, 2) for name in ("a", "b")}
    inputs = {**parts, "m": sonic.Mask()}
    turned = {name: inputs[name] for name in ("b", "a", "m")}
    outputs = {"n": ["n"], "w": sonic.Output(per="constituent")}
    models = [
        sonic.Model(f"of_{name}", each, outputs)
        for name, each in zip("ab", (inputs, turned), strict=True)
    ]

    def served(inputs: Any) -> dict[str, np.ndarray]:
        return {"n": inputs["m"].sum(axis=2), "w": inputs["b"][:, 0]}

    events = ak.Array([{"a": [1.0, 2.0], "b": [3.0]}, {"a": [], "b": [4.0, 5.0]}])
    sonic_server(*models, functions=dict.fromkeys(("of_a", "of_b"), served))
    expected = [{"n": {"n": 1.0}, "w": [3.0]}, {"n": {"n": 2.0}, "w": [4.0, 5.0]}]
    assert models[1](events).tolist() == expected
    assert sonic.Folds(models)(events, fold=[1, 1]).tolist() == expected
    without_lists = [sonic.Model(model.name, model.inputs, {"n": ["n"]}) for model in models]
    means = sonic.Folds(without_lists, fold=None)(events)
    assert means.n.tolist() == [(2 + 1) / 2, (0 + 2) / 2]


def test_numbers_that_are_not_sent_may_be_anything(server: FakeServer) -> None:
    """Those of another model's objects, and of objects that a mask leaves out."""
    shower = sonic.Model("plain_1", {"x": sonic.Row("shower")}, {"y": LABELS})
    columns = {"pt": [[1.0, 2.0], [np.nan]], "shower": [[np.nan, 5.0], [6.0]], "ee": [[0, 1], [1]]}
    objects = ak.zip({name: ak.Array(column) for name, column in columns.items()})
    choice = sonic.Choice({0: ONE, 1: shower}, by="ee")
    assert choice(objects).a.tolist() == [[1.0, 5.0], [6.0]]
    assert ONE(objects, mask=objects.pt > 0).a.tolist() == [[1.0, 2.0], [None]]
    with pytest.raises(errors.InputError, match="'shower' is NaN"):
        choice(ak.with_field(objects, 1, "ee"))


@pytest.mark.parametrize(
    "number",
    [
        "jets[0].pt",
        "met",
        sonic.Feature("y", expression="jets[0].pt + 0 * met"),
        sonic.Feature("jets.pt", index="at"),
    ],
)
def test_events_that_are_left_out_may_lack_numbers(number: Any, server: FakeServer) -> None:
    there = {"jets": [{"pt": 4.0}], "met": 4.0, "at": 0}
    events = ak.Array([there, {"jets": [], "met": None, "at": -1}, there])
    model = sonic.Model("plain_1", {"x": sonic.Row(number)}, {"y": LABELS})
    wanted = model(events, mask=[True, False, True], default=-1.0).a.tolist()
    assert wanted == [4.0, -1.0, 4.0]
    choice = sonic.Choice({0: model, 1: model}, by="where")
    events["where"] = ak.Array([1, None, 1])
    assert choice(events).a.tolist() == [4.0, None, 4.0]
    with pytest.raises(errors.InputError, match="in event 1.* say what stands for"):
        model(events)


def test_objects_without_what_chooses_get_none(server: FakeServer) -> None:
    jets = ak.Array([[{"eta": 0.5, "r": "EB"}], [], [{"eta": 2.0, "r": "EE"}]])
    events = ak.zip({"Jet": jets, "pt": [1.0, 2.0, 3.0]}, depth_limit=1)
    by_number = sonic.Choice({1: ONE, 0: TWO}, by="abs(Jet[0].eta) < 1.5")
    by_text = sonic.Choice({"EB": ONE, "EE": TWO}, by="Jet[0].r")
    for choice in (by_number, by_text):
        assert choice(events).b.tolist() == [1.0, None, 4.0]
    photons = ak.Array([[{"pt": 1.0}, {"pt": 2.0}], [{"pt": 3.0}], []])
    assert by_text(photons, events=events).b.tolist() == [[1.0, 2.0], [None], []]


def test_models_of_different_shapes_are_refused() -> None:
    one, two, three = (sonic.Model(f"m{n}", {"x": sonic.Row("pt")}, {"y": None}) for n in (1, 2, 3))
    served = {
        f"m{n}": FakeModel(
            inputs={"x": ("float32", (1,))},
            outputs={"y": ("float32", (n,))},
            function=lambda inputs, n=n: {"y": np.tile(inputs["x"], n)},
        )
        for n in (1, 2, 3)
    }
    choice, mean = sonic.Choice({"A": two, "B": three}, by="region"), sonic.Folds([one, three])
    jets = ak.Array([{"pt": 1.0}, {"pt": 2.0}, {"pt": 3.0}])
    with FakeServer(served) as running, sonic.connect(running.url):
        assert choice(EVENTS[3:]).tolist() == [[[4.0, 4.0]]]
        for refused in (
            lambda: choice(EVENTS),
            lambda: mean(jets, fold=None),  # of a number and three, also for three objects
            lambda: mean(jets[:2], fold=None),
        ):
            with pytest.raises(errors.ContractError, match="scores of different types"):
                refused()


def test_pools_check_declarations(server: FakeServer) -> None:
    pool = sonic.connect(server.url)
    assert pool.check(FOLDS[0]).ok
    names = [step.name for step in pool.check(CHOICE)[0].servers[server.url]]
    assert names[-2:] == ["declaration of fold_0", "declaration of fold_1"]
    other = sonic.Model("plain_0", {"x": sonic.Row(["pt", "eta"])}, {"y": LABELS})
    assert not pool.check(sonic.Choice({0: other, 1: PLAIN[1]}, by="x")).ok
    assert not pool.check(declared=[other]).ok
    for wrong in (3, {"fold_0": FOLDS[0]}, [FOLDS[0]]):
        with pytest.raises(errors.ConfigError, match="expected the name of a model, or a Model"):
            pool.check(wrong)


def test_none_stays_for_rows_that_servers_lost(server: FakeServer) -> None:
    for lost in (PLAIN[0], sonic.Folds(PLAIN, fold=None)):
        server.fail(grpc.StatusCode.INVALID_ARGUMENT)
        scores = lost(EVENTS, mask=MASK, default=-1.0, on_error="mask")
        assert scores.a.tolist() == [[-1.0, None], [], [None, None], [None]]


def test_events_that_lack_an_object_are_left_out() -> None:
    """By a mask where one input reads the object and others, and by ak.mask for all inputs."""
    leptons, met = ak.Array([{"pt": 1.0}, None, {"pt": 3.0}]), ak.Array([{"pt": 4.0}] * 3)
    events = ak.zip({"lepton": leptons, "MET": met}, depth_limit=1)
    inputs = {"x": sonic.Row(["lepton.pt", "MET.pt"]), "lepton": sonic.Row("lepton.pt")}
    for names in (["x"], ["x", "lepton"]):
        model = sonic.Model("sums", {name: inputs[name] for name in names}, {"y": ["sum"]})
        served = FakeModel.of(model, lambda each: {"y": each["x"].sum(axis=1, keepdims=True)})
        with FakeServer({"sums": served}) as server, sonic.connect(server.url):
            there = ~ak.is_none(leptons)
            assert model(ak.mask(events, there)).sum.tolist() == [5.0, None, 7.0]
            if names == ["x"]:
                assert model(events, mask=there, default=-1.0).sum.tolist() == [5.0, -1.0, 7.0]


LISTS = "the folds do not have the same objects"
NUMBERS = ak.Array({"pt": [1.0, 2.0, 3.0, 4.0]})
WHOLES = [plain(number, y=sonic.Output(["a"], "int64")) for number in range(2)]


def folds(models: Any, fold: Any = None) -> Any:
    return lambda: sonic.Folds(models, fold=fold)


def choose(models: Any, by: Any = "x", objects: Any = None) -> Any:
    def make() -> Any:
        choice = sonic.Choice(models, by=by)
        return choice if objects is None else choice(objects)

    return make


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (folds([ONE]), "Folds: expected a list of two models or more"),
        (folds([ONE, FOLDS[1]]), "'plain_0' and 'fold_1' give other"),
        (folds(["a", "b"]), "expected models, got 'a'"),
        (folds({"a": ONE}), "expected a list of two models or more, got {'a'"),
        (folds(PLAIN, "event %"), "expression 'event %' cannot be read"),
        (folds(PLAIN, 3), "expected a field or an expression as a str"),
        (lambda: sonic.Folds(WHOLES)(EVENTS, fold=None), "'y' has no mean .* no fractions; .* % 2"),
        (lambda: sonic.Folds(FOLDS)(EVENTS), "which fold"),
        (
            lambda: Analysis(sonic.Folds(FOLDS)).process(NUMBERED),
            r"which fold .* fold=\"event % 3\".*fold=None",
        ),
        # None of the events would be scored, without a word.
        (lambda: ONE(NUMBERS, mask=MASK), "same objects"),
        (lambda: ONE(NUMBERS, mask=ak.mask(MASK, [True, False, True, True])), "same objects"),
        (choose([ONE, TWO]), "expected a dict of two models or more"),
        (choose({"EB": ONE}), "two models or more"),
        (choose({"EB": ONE, 1: TWO}), "numbers or strings as keys"),
        (choose({0: ONE, 1: "endcap"}), "expected models, got 'endcap'"),
        (choose({0: ONE, 1: TWO}, 3), "as a str, got 3"),
        (choose({0: ONE, 1: TWO}, "eta <"), "cannot be read"),
        (choose({"A": ONE, "HF": TWO}, "region", EVENTS), "event 0 has B, .*; expected one of A"),
        (choose({1: ONE, 2: TWO}, "region", EVENTS), "region"),
        (choose({1: ONE, 2: TWO}, "pt / 2", EVENTS), "event 0 has 0.5"),
        (choose({"1": ONE, "2": TWO}, "pt", EVENTS), "pt"),
    ],
)
def test_bad_declarations_are_refused(make: Any, message: str) -> None:
    with pytest.raises((errors.ConfigError, errors.InputError), match=message):
        make()


SEEDS = ak.zip({"event": np.asarray([2**64 - 1, 1, 2, 3], np.uint64)})
NO_INTEGERS = ak.with_parameter([1.7, 1.0, 1.0, 1.0], "__doc__", "interactions")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fold": [0, 1, 2, 3]}, "event 3 has 3, which has no model; expected one of 0, 1, 2, or"),
        ({"fold": [0, 1, -1, 0]}, "fold: event 2 has -1"),
        ({"fold": [0, 1, 2]}, "a fold for each of 4 events, got 3"),
        ({"fold": [float("nan"), 1, 2, 1]}, "fold: event 0 has nan, which has no model"),
        ({"fold": ["a", "b", "c", "d"]}, "fold: "),
        ({"fold": [[0], [], [1, 1], [0]]}, LISTS),
        ({"fold": [[[0], [0]], [], [[1], [1]], [[0]]]}, LISTS),
        ({"fold": [{"f": 0}] * 4}, "fold: expected one value for each"),
        ({"fold": 1}, "fold: expected an array, got int"),
        ({"fold": "event % 3"}, r"no field 'event'.*events=events"),
        (
            {"fold": "event % 3", "events": SEEDS},
            "field .event. is 18446744073709551615, and integers in an expression are int64",
        ),
        ({"mask": EVENTS.pt}, "mask: expected True or False for each event or object, got 4 "),
        ({"mask": MASK[:3]}, "expected a mask for each of 4 events, got 3"),
        ({"mask": MASK[:, ::2]}, "the masks do not have the same objects"),
        ({"mask": [[[True]], [], [[True], [False]], [[True]]]}, "same objects"),
        ({"mask": [True, [True], [], []]}, "mask: expected True or False for each"),
        ({"version": [1.0, 1.0, 1.0, 1.0]}, "version: expected a whole number for each"),
        ({"version": NO_INTEGERS}, "version: expected a whole number for each"),
        ({"defualt": -1.0}, "submit has no option 'defualt'; did you mean 'default'"),
        ({"default": -1.0}, "default= is the score of objects that mask= leaves out"),
        ({"fold": [0] * 4, "mask": MASK, "default": 1}, "numbers, and not for lists or strings"),
        ({"mask": MASK, "default": "x"}, "expected default to be a number, got 'x'"),
        ({"mask": MASK, "default": 0.5}, "the scores: int64 cannot hold the default 0.5"),
        ({"mask": MASK, "default": 1e300}, "the scores: float32 cannot hold the default 1e"),
    ],
)
def test_bad_folds_masks_and_defaults_are_refused(options: Any, message: str) -> None:
    scored = sonic.Folds(FOLDS) if "fold" in options else WHOLE
    with pytest.raises((errors.InputError, errors.ConfigError), match=message):
        scored(EVENTS, **options)
