"""Objects that a mask leaves out are not sent, and have a default, or None."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import grpc
import numpy as np
import pytest
from tests.nanoaod import sample

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

JETS = ak.Array(
    [[{"pt": 1.0, "n": 0}, {"pt": 2.0, "n": 1}], [], [None, {"pt": 3.0, "n": 0}], [{"pt": 4.0}]]
)
MASK = JETS.pt > 1.5
MODELS = {
    name: sonic.Model(
        name,
        {"x": sonic.Row("pt")},
        {"y": ["a", "b"], "z": sonic.Output(dtype="int64")},
    )
    for name in ("one", "two")
}
ONE, TWO = MODELS.values()
NUMBERS = sonic.Folds([sonic.Model(name, ONE.inputs, {"y": ["a", "b"]}) for name in MODELS])


def answers(factor: int) -> Any:
    return lambda inputs: {
        "y": np.repeat(inputs["x"] * np.float32(factor), 2, axis=1),
        "z": inputs["x"].astype(np.int64),
    }


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    served = {"one": FakeModel.of(ONE, answers(10)), "two": FakeModel.of(TWO, answers(100))}
    with FakeServer(served) as running:
        yield running


@pytest.fixture(autouse=True)
def connected(server: FakeServer) -> Iterator[sonic.Pool]:
    with sonic.connect(server.url) as pool:
        yield pool


def test_objects_that_a_mask_leaves_out_are_not_sent() -> None:
    pending = ONE.submit(JETS, mask=MASK)
    scores = pending.result()
    assert scores.y.a.tolist() == [[None, 20.0], [], [None, 30.0], [40.0]]
    assert scores.z.tolist() == [[None, 2], [], [None, 3], [4]]
    assert pending.statistics.total().rows == 3
    unreadable = ak.with_field(JETS, ak.where(JETS.pt > 1.5, JETS.pt, np.nan), "pt")
    assert ONE(unreadable, mask=MASK).tolist() == scores.tolist()


def test_defaults_are_scores_of_objects_that_were_left_out() -> None:
    scores = ONE(JETS, mask=MASK, default=-1)
    assert scores.y.b.tolist() == [[-1.0, 20.0], [], [None, 30.0], [40.0]]
    assert scores.z.tolist() == [[-1, 2], [], [None, 3], [4]]
    assert scores.y.a.type == ONE(JETS).y.a.type
    by_event = ONE(JETS, mask=np.asarray([False, True, True, False]), default=-1.0)
    assert by_event.y.a.tolist() == [[-1.0, -1.0], [], [None, 30.0], [-1.0]]
    may_be_none = ak.Array([[True, None], [], [None, None], [False]])
    assert ONE(JETS, mask=may_be_none, default=9.0).z.tolist() == [[1, 9], [], [None, 9], [9]]


def test_none_stays_for_rows_that_servers_lost(server: FakeServer) -> None:
    server.fail(grpc.StatusCode.INVALID_ARGUMENT)
    lost = ONE(JETS, mask=MASK, default=-1.0, on_error="mask")
    assert lost.y.a.tolist() == [[-1.0, None], [], [None, None], [None]]
    server.fail(grpc.StatusCode.INVALID_ARGUMENT)
    mean = NUMBERS(JETS, fold=None, mask=MASK, default=-1.0, on_error="mask")
    assert mean.a.tolist() == [[-1.0, None], [], [None, None], [None]]


@pytest.mark.parametrize("default", [None, -1.0])
def test_types_do_not_depend_on_the_objects(default: float | None) -> None:
    def scores(some: ak.Array) -> Any:
        return ONE(some, mask=some.pt > 1.5, default=default)

    tracer = ak.Array(JETS.layout.to_typetracer(forget_length=True))
    for some in (JETS[:0], JETS[1:2], JETS[:1], JETS[3:], tracer):
        assert str(scores(some).type.content) == str(scores(JETS).type.content)


def test_masks_of_variations_folds_and_choices() -> None:
    up = ak.with_field(JETS, JETS.pt * 2, "pt")
    varied = sonic.Variations(nominal=JETS, up=up)
    each = {"nominal": MASK, "up": up.pt > 7}
    scores = ONE(varied, mask=each, default=-1.0)
    assert scores["nominal"].y.a.tolist() == [[-1.0, 20.0], [], [None, 30.0], [40.0]]
    assert scores["up"].y.a.tolist() == [[-1.0, -1.0], [], [None, -1.0], [80.0]]
    mean = NUMBERS(JETS, fold=None, mask=MASK, default=-1.0)
    assert mean.a.tolist() == [[-1.0, 110.0], [], [None, 165.0], [220.0]]
    choice = sonic.Choice({0: ONE, 1: TWO}, by="n")
    chosen = choice(JETS, mask=MASK, default=-1.0)
    assert chosen.y.a.tolist() == [[-1.0, 200.0], [], [None, 30.0], [-1.0]]
    assert choice(JETS, default=-1.0).y.a.tolist()[0] == [10.0, 200.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": JETS.pt}, "mask: expected True or False for each event or object, got 4 "),
        ({"mask": MASK[:3]}, "expected a mask for each of 4 events, got 3"),
        ({"mask": MASK[:, ::2]}, "the masks do not have the same objects"),
        ({"mask": [[[True]], [], [[True], [False]], [[True]]]}, "same objects"),
        ({"mask": JETS}, "mask: expected True or False for each event or object"),
        ({"mask": [True, [True], [], []]}, "mask: expected True or False for each"),
        ({"version": [1.0, 1.0, 1.0, 1.0]}, "version: expected a whole number for each"),
        (
            {"version": ak.with_parameter([1.7, 1.0, 1.0, 1.0], "__doc__", "interactions")},
            "version: expected a whole number for each",
        ),
        ({"default": -1.0}, "default= is the score of objects that mask= leaves out"),
        ({"mask": MASK, "default": "x"}, "expected default to be a number, got 'x'"),
        ({"mask": MASK, "default": 0.5}, "the scores are int64, which cannot be default=0.5"),
        ({"mask": MASK, "default": 1e300}, "the scores are float32, which cannot be default=1e"),
        ({"mask": MASK, "default": 2**63}, "the scores are int64, which cannot be default=92"),
    ],
)
def test_bad_masks_and_defaults_are_refused(options: Any, message: str) -> None:
    with pytest.raises(errors.SonicError, match=message):
        ONE(JETS, **options)


def test_masks_of_columns_may_be_described() -> None:
    events = sample(entry_stop=20)
    jets = events.FatJet
    mask = (jets.pt > 400) & (abs(jets.eta) < 2)
    of_events = ak.num(jets) > 1
    for some in (mask, of_events, ak.with_parameter(of_events, "__doc__", "the union of bits")):
        scores = ONE(jets, mask=some)
        expected = ak.broadcast_arrays(some, jets.pt)[0]
        assert (~ak.is_none(scores.y.a, axis=1)).tolist() == expected.tolist()
        assert ak.any(expected)
    assert not ak.all(mask, axis=None)


def test_masks_of_objects_are_refused_for_events() -> None:
    """None of them would be scored, without a word."""
    events = ak.Array([{"pt": 1.0}, {"pt": 2.0}, {"pt": 3.0}, {"pt": 4.0}])
    for mask in (MASK, ak.mask(MASK, [True, False, True, True])):
        with pytest.raises(errors.InputError, match="same objects"):
            ONE(events, mask=mask)


def test_masks_of_events_that_are_none_leave_their_objects_out() -> None:
    events = [True, True, False, True]
    for jets, mask in (
        (JETS, ak.mask(MASK, events)),
        (ak.mask(JETS, events), MASK),
        (ak.mask(JETS, events), ak.mask(MASK, events)),
    ):
        scores = ONE(jets, mask=mask).y.a
        assert scores[0].tolist() == [None, 20.0]
        assert scores[3].tolist() == [40.0]
        assert scores[2] is None or scores[2].tolist() == [None, None]


def test_defaults_are_for_numbers() -> None:
    lists = sonic.Model(
        "lists",
        {"x": sonic.Padded("x", 3)},
        {"each": sonic.Output(["a"], per="constituent"), "vector": sonic.Output(shape=(2,))},
    )
    objects = ak.Array([{"x": [1.0, 2.0]}, {"x": [3.0]}])

    def function(inputs: Any) -> Any:
        return {"each": inputs["x"].transpose(0, 2, 1), "vector": inputs["x"][:, 0, :2]}

    vector = sonic.Model("lists", lists.inputs, {"vector": lists.outputs["vector"]})
    with (
        FakeServer({"lists": FakeModel.of(lists, function)}) as server,
        sonic.connect(server.url) as pool,
    ):
        options: Any = {"mask": np.asarray([True, False]), "pool": pool}
        assert vector(objects, **options, default=-1.0).tolist() == [[1.0, 2.0], [-1.0, -1.0]]
        assert lists(objects, **options).each.a.tolist() == [[1.0, 2.0], None]
        with pytest.raises(errors.ConfigError, match="numbers, and not for lists or strings"):
            lists(objects, **options, default=-1.0)
