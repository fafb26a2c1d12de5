"""Answers of any rank are put back in the structure of what was sent, as plain loops do."""

from __future__ import annotations

import math
from functools import partial
from itertools import permutations
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.errors import InputError
from sonic_coffea.layouts import ByRow, bind_inputs
from sonic_coffea.testing import FakeModel, FakeServer

of_elements = partial(sonic.Output, per="constituent")


LISTS = ak.Array([[{"pt": 1.0}, {"pt": 3.0}], [], [{"pt": 2.0}]])


FLAT = {"x": sonic.Flat("a.pt")}
TOKENS = {"x": sonic.Tokens({name: sonic.Padded(f"{name}.pt", 2) for name in "ab"})}
SEVERAL = "has other places beside those of the elements of input 'x', which is of several"


@pytest.mark.parametrize(
    ("output", "inputs", "message"),
    [
        (of_elements(axes=2), FLAT, "which is not padded"),
        (of_elements(None, "int64", choose="slot"), FLAT, "has slots of .* which is not padded"),
        (of_elements(axes=2), TOKENS, "which is of several collections"),
        (of_elements(axes=("1+x",)), TOKENS, SEVERAL),
        (of_elements(axes=("x+1",)), FLAT, "has other places .* which is not padded"),
        (of_elements(), {"x": sonic.Row("a.pt")}, "but no input has a jagged axis"),
    ],
)
def test_outputs_that_their_input_does_not_allow(output: Any, inputs: Any, message: str) -> None:
    lists = ak.Array([[{"pt": 1.0}]])
    array = ak.zip({"a": lists, "b": lists}, depth_limit=1)
    with pytest.raises(errors.ConfigError, match=f"output 'y'.*{message}"):
        ByRow("y", output, bind_inputs(inputs, array))


PADDED, BUCKETED = sonic.Padded("pt", 3), sonic.Bucketed("pt", (2, 4))
OTHER = r"came back with shape .* for 1 rows of"


@pytest.mark.parametrize(
    ("output", "layout", "shape", "message"),
    [
        (of_elements(axes=2), PADDED, (3, 2), None),
        (of_elements(axes=2), PADDED, (3,), None),
        (of_elements(["a"], axes=2), PADDED, (3, 3, 2), None),
        (of_elements(shape=(2,)), PADDED, (3, 3), None),
        (sonic.Output(shape=(2,)), PADDED, (3,), None),
        (sonic.Output(["a", "b"]), PADDED, (3,), "'y': expected 2 values for labels a, b"),
        (sonic.Output([*"abcd"]), PADDED, (2, 2), "'y': expected 4 values for labels a, b, c, d"),
        (of_elements(["a", "b"], axes=("labels", "x")), PADDED, (), None),
        # Each row has one index, and not those of the rows before it.
        (of_elements(choose="argmax"), PADDED, (3, 2), "'y' came back .* 1 choices of each row"),
        (of_elements(["a", "b"], axes=2, choose="argmax"), PADDED, (3, 3, 2), None),
        (of_elements(None, "i8", choose="slot"), PADDED, (3,), None),
        # What was not sent has no score, and what was sent has one.
        *((of_elements(), PADDED, (length,), OTHER) for length in (2, 4)),
        *((of_elements(), BUCKETED, (length,), OTHER) for length in (4, 8)),
    ],
)
def test_answers_of_another_shape_are_refused(
    output: Any, layout: Any, shape: Any, message: str | None
) -> None:
    inputs = bind_inputs({"x": layout}, ak.Array([[{"pt": 1.0}], [{"pt": 2.0}] * 3]))
    with pytest.raises(errors.ResponseError, match=message):
        ByRow("y", output, inputs).place(
            inputs.selection(0, 1), 1, {"y": np.zeros((1, *shape), output.dtype)}
        )


@pytest.mark.parametrize("splits", [[0, 3], [0, 2, 4], [1, 2, 3], [0, 4, 3]])
def test_answers_are_split_whole(splits: Any) -> None:
    """Of three values and two rows."""
    inputs = bind_inputs({"x": sonic.Row("pt")}, ak.Array([{"pt": 1.0}, {"pt": 2.0}]))
    with pytest.raises(errors.ResponseError, match="output 's' (came back|does not split the 3)"):
        ByRow("y", sonic.Output(shape=(), splits="s"), inputs).place(
            slice(0, 2), 2, {"y": np.zeros((3, 1), "f4"), "s": np.asarray(splits)}
        )


@pytest.mark.parametrize(
    ("first", "second"), [((2, 3, 2), (1, 3, 3)), ((2, 3, 2), (1, 3, 1)), ((2, 3), (1, 3, 4))]
)
def test_answers_for_constituents_are_of_one_kind(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    output = ByRow("out", of_elements(), bind_inputs({"in": PADDED}, LISTS))
    output.place(slice(0, 2), 2, {"out": np.zeros(first, np.float32)})
    with pytest.raises(errors.ResponseError, match="before as float32"):
        output.place(slice(2, 3), 1, {"out": np.zeros(second, np.float32)})
    with pytest.raises(errors.ResponseError, match="came back as float64"):
        output.place(slice(2, 3), 1, {"out": np.zeros((1, *first[1:]), np.float64)})


def test_groups_have_the_same_type_without_a_shape() -> None:
    """Whether there are rows, none, or no data."""
    output, array = sonic.Output(groups={"a": [0, 2], "b": slice(1, 3)}), ak.Array({"pt": [1.0]})
    layouts, none = {"x": sonic.Row("pt")}, array[:0]
    whole, empty = (ByRow("y", output, bind_inputs(layouts, some)) for some in (array, none))
    whole.place(slice(0, 1), 1, {"y": np.zeros((1, 3), "f4")})
    traced = sonic.Model("m", layouts, {"y": output})(ak.Array(array.layout.to_typetracer()))
    types = {str(ak.Array(scores.content()).type.content) for scores in (whole, empty)}
    assert types == {str(traced.type.content)}


def test_servers_tell_the_shape_that_nobody_declares() -> None:
    """Chunks concatenate, and an array of any length has the type of every other."""
    inputs = {"x": sonic.Row("pt")}
    model, declared, *wrong = (
        sonic.Model("m", inputs, {"y": sonic.Output(shape=shape)})
        for shape in (None, (4,), (3,), (), (4, 4))
    )
    served = FakeModel(
        inputs={"x": ("float32", [1])},
        outputs={"y": ("float32", [4])},
        function=lambda inputs: {"y": np.repeat(inputs["x"], 4, axis=1)},
    )
    events = ak.Array([[{"pt": 1.0}], [], [{"pt": 2.0}, {"pt": 3.0}]])
    with FakeServer({"m": served}) as server, sonic.connect(server.url):
        full, empty = model(events), model(events[:0])
        assert str(full.type) == "3 * var * 4 * float32"
        assert str(empty.type) == "0 * var * 4 * float32"
        assert model(events[1:2]).type == ak.concatenate([empty, full])[1:2].type
        assert ak.array_equal(declared(events), full, dtype_exact=True)
        for other in wrong:
            for ask in (lambda other=other: other(events), other.check):
                with pytest.raises(errors.ContractError, match="'y' is declared with shape"):
                    ask()
    assert str(model(events[:0]).type) == "0 * var * float32"
    assert str(declared(events[:0]).type) == "0 * var * 4 * float32"


def test_values_of_constituents_have_the_declared_shape() -> None:
    """In chunks without data, any may be truncated."""
    model = sonic.Model("m", {"x": PADDED}, {"y": of_elements(shape=(2,))})
    twice = FakeModel.of(model, lambda inputs: {"y": np.stack([inputs["x"][:, 0]] * 2, axis=2)})
    with FakeServer({"m": twice}) as server, sonic.connect(server.url):
        assert str(model(LISTS).type) == "3 * var * 2 * float32"
    traced = model(ak.Array(LISTS.layout.to_typetracer(forget_length=True)))
    assert str(traced.type) == "## * var * option[2 * float32]"


RANKS = {"t1": 3, "t2": 3, "H": 2}


def network(counts: list[int]) -> dict[str, Any]:
    """Return random logarithms, symmetric in the first two constituents of a target."""
    rng = np.random.default_rng(5)
    each: dict[str, list[Any]] = {name: [] for name in RANKS}
    for n in counts:
        for name, rank in RANKS.items():
            numbers = rng.normal(size=(n,) * rank)
            each[name].append((numbers + numbers.swapaxes(0, 1)).tolist())
    return {name: ak.Array(lists) for name, lists in each.items()}


def greedy(event: dict[str, Any], choices: int) -> list[dict[str, Any]]:
    """Assign one event's constituents, in plain Python: places, and the logarithm."""
    banned: set[Any] = set()
    out = []
    for _ in range(choices):
        free, chosen = set(range(len(event["H"]))), dict.fromkeys(RANKS)
        for _ in RANKS:
            options = [
                (event[name][at], name, at)
                for name, rank in RANKS.items()
                if chosen[name] is None
                for at in permutations(sorted(free), rank)
                if (name, unordered(at)) not in banned
            ]
            if options:
                logarithm, name, at = max(options)
                chosen[name] = (unordered(at), pytest.approx(np.exp(logarithm)))
                free -= set(at)
        banned |= {(name, choice[0]) for name, choice in chosen.items() if choice is not None}
        out.append(chosen)
    return out


def unordered(at: Any) -> Any:
    """The first two constituents of a target may be swapped."""
    return frozenset(at[:2]), *at[2:]


def test_choices_are_those_of_one_event_after_the_other() -> None:
    counts = [8, 6, 9, 3, 2, 0, 8]
    outputs = network(counts)
    assigned = sonic.assignments(outputs, choices=3)
    for number, choices in enumerate(assigned.to_list()):
        event = {name: ak.to_numpy(array[number]) for name, array in outputs.items()}
        assert [
            {
                name: None if a["index"] is None else (unordered(a["index"]), a["probability"])
                for name, a in choice.items()
            }
            for choice in choices
        ] == (greedy(event, 3) if counts[number] else [dict.fromkeys(RANKS)] * 3)
    jets = ak.Array([[10.0 * n for n in range(count)] for count in counts])
    first = ak.drop_none(assigned.H.index[:, 0], axis=0)
    there = jets[~ak.is_none(assigned.H.index[:, 0])]
    assert (there[first] == 10.0 * first).to_list() == [[True, True]] * len(first)


PAIRS = ak.Array([[[0.9, np.nan, 0.1], [np.nan, 0.8, 0.0], [0.1, 0.0, 0.9]], [], [[0.5]]])


def test_small_probabilities_of_permutations_are_told_apart() -> None:
    pairs = ak.Array([[[0.0, 5e-9], [1e-9, 0.0]]])
    assigned = sonic.assignments({"W": pairs}, choices=2, log=False).W
    assert assigned.index.tolist() == [[[0, 1], [1, 0]]]
    assert assigned.probability.tolist() == [[5e-9, 1e-9]]


def test_nothing_is_assigned_that_has_no_probability() -> None:
    assigned = sonic.assignments({"H": PAIRS}, choices=2, log=False)
    assert assigned.H.index.to_list() == [[[0, 2], [1, 2]], [None, None], [None, None]]
    assert assigned.H.probability.to_list() == [[0.1, 0.0], [None, None], [None, None]]
    nothing = sonic.assignments({"H": PAIRS[:0]}, choices=2, log=False)
    assert nothing.type.content == assigned.type.content
    masked = sonic.assignments({"H": ak.mask(PAIRS, [True, False, True])}, log=False)
    assert masked.H.index.to_list() == [[[0, 2]], [None], [None]]


@pytest.mark.parametrize(
    ("targets", "choices", "message"),
    [
        ({"H": PAIRS, "b": ak.Array([[0.5]] * 2)}, 1, "different numbers of events: H 3, b 2"),
        ({"H": PAIRS[:1], "b": ak.Array([[0.5]])}, 1, "'b': expected 3 constituents in each axis"),
        ({"H": PAIRS[:1], "b": np.ones((1, 9, 1))}, 1, "'b': expected 3 constituents in each axis"),
        ({"H": PAIRS[1:2], "b": ak.Array([[0.5]])}, 1, "'b': expected 0 constituents in each axis"),
        *((nothing, 1, "a dict of targets") for nothing in ({}, None, {"b": ak.Array([0.5])})),
        ({"b": ak.Array([[0.5]])}, -1, "expected choices to be a number of at least 1, got -1"),
    ],
)
def test_assignments_of_other_arrays_are_refused(targets: Any, choices: Any, message: str) -> None:
    with pytest.raises((InputError, errors.ConfigError), match=message):
        sonic.assignments(targets, choices=choices)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (sonic.Output(function="softmax"), "softmax needs several values, got one number"),
        (sonic.Output(groups={"a": [0], "b": [1]}), "group 'b' has members beyond the 1 values"),
        (sonic.Output(groups={"a": slice(0, 2)}), "group 'a' has members beyond the 1 values"),
    ],
)
def test_what_one_number_does_not_have_is_refused(output: Any, message: str) -> None:
    """Whether the server tells the shape, or the response is the first to do so."""
    inputs = bind_inputs({"x": sonic.Row("pt")}, ak.Array([{"pt": 1.0}]))
    with pytest.raises(errors.ConfigError, match=message):
        ByRow("y", output, inputs).expect((1,))
    with pytest.raises(errors.ConfigError, match=message):
        ByRow("y", output, inputs).place(slice(0, 1), 1, {"y": np.zeros((1, 1), "f4")})


@pytest.mark.parametrize("declared", [{"labels": ["a", "b"]}, {"shape": (2,)}])
@pytest.mark.parametrize("over", [None, [0, 1]])
def test_values_that_come_back_as_a_column_are_scored_as_declared(declared: Any, over: Any) -> None:
    inputs = bind_inputs({"x": sonic.Row("pt")}, ak.Array([{"pt": 1.0}]))
    assembly = ByRow("y", sonic.Output(**declared, function="softmax", over=over), inputs)
    assembly.place(slice(0, 1), 1, {"y": np.zeros((1, 2, 1), "f4")})
    (scores,) = inputs.rows.unflatten(assembly.content()).tolist()
    assert scores in ([0.5, 0.5], {"a": 0.5, "b": 0.5})


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "odds"])
def test_scores_of_infinite_numbers_are_made_without_warnings(function: str) -> None:
    each = [[math.inf, math.inf], [-math.inf, -math.inf], [math.nan, 1.0], [1.0, 1.0]]
    numbers = np.asarray(each, "f4")
    content = sonic.Output(["a", "b"], function=function).content(numbers)
    with np.errstate(all="ignore"):
        expected = {
            "softmax": np.exp(numbers) / np.exp(numbers).sum(axis=1, keepdims=True),
            "sigmoid": 1 / (1 + np.exp(-numbers)),
            "odds": numbers / (1 - numbers),
        }
    np.testing.assert_allclose(ak.to_numpy(ak.Array(content).a), expected[function][:, 0])
