"""Answers of any rank are put back in the structure of what was sent, as plain loops do."""

from __future__ import annotations

import itertools
from itertools import permutations
from typing import Any

import awkward as ak
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.errors import InputError
from sonic_coffea.layouts import ByRow, bind_inputs, trace
from sonic_coffea.model._submission import Submission
from sonic_coffea.testing import FakeModel, FakeServer

Events = list[Any]

number = st.integers(0, 50).map(lambda n: n / 4)
jets = st.lists(st.fixed_dictionaries({"pt": number}), max_size=5)
events = st.lists(jets | st.none(), max_size=5)


def array_of(plain: Events) -> ak.Array:
    return ak.Array([*plain, [{"pt": 0.5}], None])[: len(plain)]


def layouts(length: int) -> Any:
    return st.sampled_from(
        [
            sonic.Padded("pt", length),
            sonic.Padded("pt", length, sort_by="pt"),
            sonic.Bucketed("pt", (1, length + 1), sort_by="pt"),
            sonic.Bucketed("pt", (1, 2, length + 2)),
        ]
    )


def order_of(layout: Any, row: list[Any]) -> list[int]:
    """Where each sent element was."""
    if layout.sort_by is None:
        return list(range(len(row)))[: layout.lengths[-1]]
    return sorted(range(len(row)), key=lambda k: -row[k]["pt"])[: layout.lengths[-1]]


def answered(output: sonic.Output, layout: Any, array: ak.Array, tensor: Any) -> ak.Array:
    """Place the answers of one request after the other, the last first."""
    inputs = bind_inputs({"x": layout}, array)
    assembly = ByRow("y", output, inputs)
    for segment in reversed(inputs.segments):
        for start in range(segment.start, segment.stop, 2):
            stop = min(start + 2, segment.stop)
            length = layout.padded_length(segment.bucket)
            assembly.place(
                inputs.selection(start, stop),
                stop - start,
                {"y": tensor(inputs.numbers(start, stop), length)},
            )
    return inputs.rows.unflatten(assembly.content())


def replaced(plain: Events, values: Any) -> Any:
    return [None if row is None else next(values) for row in plain]


@given(events, st.integers(1, 3).flatmap(layouts), st.integers(1, 3), st.sampled_from([None, 2]))
def test_values_of_pairs_have_the_length_of_the_row(
    plain: Events, layout: Any, axes: int, width: int | None
) -> None:
    """A value is the row's number and the slots, so that each shows where it comes from."""

    def tensor(rows: Any, length: int) -> Any:
        shape = (len(rows), *(length,) * axes, *(() if width is None else (width,)))
        out = np.zeros(shape, np.int64)
        for place in np.ndindex(*shape):
            digits = (rows[place[0]], *place[1:])
            out[place] = sum(int(d) * 10**i for i, d in enumerate(reversed(digits)))
        return out

    def value(row: int, slots: tuple[int, ...]) -> Any:
        base = row
        for slot in slots:
            base = 10 * base + slot
        return base if width is None else {"a": 10 * base, "b": 10 * base + 1}

    def nested(row: int, places: dict[int, int], count: int, *before: int) -> Any:
        if len(before) == axes:
            slots = tuple(places.get(k, -1) for k in before)
            return None if -1 in slots else value(row, slots)
        return [nested(row, places, count, *before, k) for k in range(count)]

    labels = None if width is None else ["a", "b"]
    output = sonic.Output(labels, "int64", per="constituent", axes=axes)
    result = answered(output, layout, array_of(plain), tensor)
    rows = [row for row in plain if row is not None]
    expected = []
    for i, row in enumerate(rows):
        places = {at: slot for slot, at in enumerate(order_of(layout, row))}
        expected.append(nested(i, places, len(row)))
    assert result.tolist() == replaced(plain, iter(expected))


@given(events, st.integers(1, 3).flatmap(layouts), st.integers(1, 3), st.randoms(), st.booleans())
def test_the_greatest_is_chosen_among_what_was_sent(
    plain: Events, layout: Any, axes: int, random: Any, labelled: bool
) -> None:
    rows = [row for row in plain if row is not None]
    sent = [order_of(layout, row) for row in rows]
    scores: dict[tuple[int, ...], float] = {}
    for i in range(len(rows)):
        for slots in itertools.product(range(len(rows[i]) + 9), repeat=axes):
            choices = [0.0, 1.0, 2.0, random.random(), -np.inf, np.nan]
            scores[(i, *slots)] = random.choice(choices)

    def tensor(numbers: Any, length: int) -> Any:
        out = np.zeros((len(numbers), *(length,) * axes), np.float32)
        for place in np.ndindex(*out.shape):
            out[place] = scores[(int(numbers[place[0]]), *place[1:])]
        return out

    def chosen(i: int) -> Any:
        best = None
        for slots in itertools.product(range(len(sent[i])), repeat=axes):
            score = np.float32(scores[(i, *slots)])
            if np.isnan(score) or score == -np.inf:
                continue
            if best is None or score > best[0]:
                best = score, slots
        each = [None] * axes if best is None else [sent[i][slot] for slot in best[1]]
        if labelled:
            return dict(zip("abc", each, strict=False))
        return each if axes > 1 else each[0]

    labels = list("abc"[:axes]) if labelled else None
    output = sonic.Output(labels, per="constituent", axes=axes, choose="argmax")
    result = answered(output, layout, array_of(plain), tensor)
    assert result.tolist() == replaced(plain, map(chosen, range(len(rows))))


@given(events, st.integers(1, 3).flatmap(layouts), st.booleans(), st.randoms())
def test_slots_become_places_in_the_list(
    plain: Events, layout: Any, labelled: bool, random: Any
) -> None:
    rows = [row for row in plain if row is not None]
    slots = [[random.randint(-2, 7) for _ in range(2 if labelled else 1)] for _ in rows]

    def tensor(numbers: Any, length: int) -> Any:
        del length
        chosen = np.asarray([slots[i] for i in numbers], np.int32)
        return chosen if labelled else chosen[:, 0]

    expected = []
    for row, chosen in zip(rows, slots, strict=True):
        sent = order_of(layout, row)
        each = [sent[slot] if 0 <= slot < len(sent) else None for slot in chosen]
        expected.append(dict(zip("ab", each, strict=True)) if labelled else each[0])
    labels = ["a", "b"] if labelled else None
    output = sonic.Output(labels, "int32", per="constituent", choose="slot")
    result = answered(output, layout, array_of(plain), tensor)
    assert result.tolist() == replaced(plain, iter(expected))


def test_choices_may_be_of_each_class_and_of_nodes() -> None:
    array = ak.Array([[{"pt": 1.0}, {"pt": 3.0}], [], [{"pt": 2.0}]])
    scores = np.asarray([[0.1, 0.9], [0.7, 0.2], [0.5, 0.5]], np.float32)
    for layout in (sonic.Flat("pt"), sonic.Flat("pt", sort_by="pt")):
        inputs = bind_inputs({"x": layout}, array)
        output = sonic.Output(["b", "c"], per="constituent", choose="argmax")
        assembly = ByRow("y", output, inputs)
        assembly.place(slice(0, 3), 3, {"y": scores})
        first, second = (1, 0) if layout.sort_by is None else (0, 1)
        assert assembly.content().to_list() == [
            {"b": first, "c": second},
            {"b": None, "c": None},
            {"b": 0, "c": 0},
        ]


@pytest.mark.parametrize(
    ("output", "inputs", "message"),
    [
        (sonic.Output(per="constituent", axes=2), {"x": sonic.Flat("pt")}, "which is not padded"),
        (
            sonic.Output(None, "int64", per="constituent", choose="slot"),
            {"x": sonic.Flat("pt")},
            "has slots of .* which is not padded",
        ),
        (
            sonic.Output(per="constituent", axes=2),
            {"x": sonic.Tokens({"a": sonic.Padded("a.pt", 2), "b": sonic.Padded("b.pt", 2)})},
            "which is of several collections",
        ),
        (
            sonic.Output(per="constituent", axes=("1+x",)),
            {"x": sonic.Tokens({"a": sonic.Padded("a.pt", 2), "b": sonic.Padded("b.pt", 2)})},
            "has other places beside those of the elements of input 'x', which is of several",
        ),
        (
            sonic.Output(per="constituent", axes=("x+1",)),
            {"x": sonic.Flat("pt")},
            "has other places .* which is not padded",
        ),
    ],
)
def test_outputs_that_their_input_does_not_allow(output: Any, inputs: Any, message: str) -> None:
    lists = ak.Array([[{"pt": 1.0}]])
    array = lists if "Flat" in repr(inputs) else ak.zip({"a": lists, "b": lists}, depth_limit=1)
    with pytest.raises(errors.ConfigError, match=f"output 'y': .*{message}"):
        ByRow("y", output, bind_inputs(inputs, array))


@pytest.mark.parametrize(
    ("output", "shape", "dtype"),
    [
        (sonic.Output(per="constituent", axes=2), (2, 3, 2), "f4"),
        (sonic.Output(per="constituent", axes=2), (2, 3), "f4"),
        (sonic.Output(["a"], per="constituent", axes=2), (2, 3, 3, 2), "f4"),
        (sonic.Output(shape=(2,), per="constituent"), (2, 3, 3), "f4"),
        (sonic.Output(shape=(2,)), (2, 3), "f4"),
        (sonic.Output(per="constituent", choose="argmax"), (2, 3, 2), "f4"),
        (sonic.Output(["a", "b"], per="constituent", axes=2, choose="argmax"), (2, 3, 3, 2), "f4"),
        (sonic.Output(None, "i8", per="constituent", choose="slot"), (2, 3), "i8"),
    ],
)
def test_answers_of_another_shape_are_refused(output: Any, shape: Any, dtype: str) -> None:
    inputs = bind_inputs({"x": sonic.Padded("pt", 3)}, ak.Array([[{"pt": 1.0}], [{"pt": 2.0}]]))
    with pytest.raises(errors.ResponseError):
        ByRow("y", output, inputs).place(slice(0, 2), 2, {"y": np.zeros(shape, dtype)})


OUTPUTS = {
    "number": sonic.Output(shape=()),
    "embedding": sonic.Output(shape=(4,)),
    "matrix": sonic.Output(shape=(2, 3)),
    "labels": sonic.Output(["a", "b"]),
    "weights": sonic.Output(per="constituent", of="x"),
    "vectors": sonic.Output(shape=(2,), per="constituent", of="x"),
    "nodes": sonic.Output(shape=(2,), per="constituent", of="f"),
    "pairs": sonic.Output(per="constituent", axes=2, of="x"),
    "assignment": sonic.Output(["q", "b"], per="constituent", axes=2, choose="argmax", of="x"),
    "best": sonic.Output(per="constituent", choose="argmax", of="x"),
    "chosen": sonic.Output(None, "int64", per="constituent", choose="slot", of="x"),
    "clusters": sonic.Output(shape=(3,), splits="s"),
}
JETS = ak.Array([[{"pf": [{"pt": 1.0}, {"pt": 2.0}]}, {"pf": []}], [], [{"pf": [{"pt": 3.0}]}]])


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_type_is_the_same_without_rows_and_without_data(name: str) -> None:
    output = OUTPUTS[name]
    layouts = {"x": sonic.Padded("pf.pt", 2), "f": sonic.Flat("pf.pt")}
    inputs = bind_inputs(layouts, JETS)
    shape = () if output.inner is None else output.last
    axes = (3,) if output.of == "f" else (3, *(2,) * output.axes) if output.of else (3,)
    if output.choose == "slot":
        axes = (3,)
    if output.choose == "argmax" and output.axes == 2:
        shape = ()
    answer = {
        name: np.zeros((*axes, *shape), output.dtype),
        "s": np.asarray([0, 1, 1, 3]),
    }
    assembly = ByRow(name, output, inputs)
    assembly.place(slice(0, 3), 3, answer)
    whole = inputs.rows.unflatten(assembly.content())
    none = bind_inputs(layouts, JETS[:0])
    empty = none.rows.unflatten(ByRow(name, output, none).content())
    assert str(whole.type.content) == str(empty.type.content)
    traced = trace(layouts, {name: output}, ak.Array(JETS.layout.to_typetracer(forget_length=True)))
    shown = str(traced.type.content)
    # What is truncated is None, in any chunk.
    if name in ("weights", "vectors", "pairs"):
        assert "?" in shown or "option[" in shown
        shown = shown.replace("?", "").replace("option[", "").replace("]", "")
    assert shown == str(whole.type.content)
    assert ak.concatenate([whole, empty]).tolist() == whole.tolist()


def test_servers_tell_the_shape_that_nobody_declares() -> None:
    """Chunks concatenate, and an array of any length has the type of every other."""
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": None})
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
        declared = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": sonic.Output(shape=(4,))})
        assert declared(events).tolist() == full.tolist()
        assert str(declared(events).type) == str(full.type)
        for shape in ((3,), (), (4, 4)):
            wrong = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": sonic.Output(shape=shape)})
            with pytest.raises(errors.ContractError, match="output 'y' is declared with shape"):
                wrong(events)
            with pytest.raises(errors.ContractError, match="output 'y' is declared with shape"):
                wrong.check()
        # What a graph has promised cannot be mended when it is computed.
        with pytest.raises(
            errors.ContractError, match=r"declare it, as sonic.Output\(shape=\(4,\)"
        ):
            Submission((model,), of_partition=True).send(events).result()
        partition = Submission((declared,), of_partition=True).send(events).result()
        assert partition.tolist() == full.tolist()
    assert str(model(events[:0]).type) == "0 * var * float32"
    assert str(declared(events[:0]).type) == "0 * var * 4 * float32"


LISTS = ak.Array([[{"pt": 1.0}, {"pt": 3.0}], [], [{"pt": 2.0}]])


def scored(output: sonic.Output, tensor: Any, **layouts: Any) -> Any:
    inputs = bind_inputs(layouts or {"pf": sonic.Padded("pt", 3)}, LISTS)
    assembly = ByRow("y", output, inputs)
    for row in (2, 0, 1):
        assembly.place(slice(row, row + 1), 1, {"y": tensor[row : row + 1]})
    return inputs.rows.unflatten(assembly.content()).tolist()


def test_labels_may_come_before_the_elements() -> None:
    output = sonic.Output(["a", "b"], per="constituent", axes=("labels", "pf"))
    tensor = np.arange(18.0, dtype=np.float32).reshape(3, 2, 3)
    expected = [[{"a": 0, "b": 3}, {"a": 1, "b": 4}], [], [{"a": 12, "b": 15}]]
    assert scored(output, tensor) == expected


def test_class_tokens_come_with_the_elements() -> None:
    tensor = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    first = sonic.Output(per="constituent", axes=("1+pf",))
    assert scored(first, tensor) == [[0, 1, 2], [4], [8, 9]]
    last = sonic.Output(per="constituent", axes=("pf+1",))
    assert scored(last, tensor) == [[0, 1, 3], [7], [8, 11]]


def test_queries_and_pairs_of_two_inputs() -> None:
    queries = sonic.Output(per="constituent", axes=(2, "pf"))
    tensor = np.arange(18.0, dtype=np.float32).reshape(3, 2, 3)
    assert scored(queries, tensor) == [[[0, 1], [3, 4]], [[], []], [[12], [15]]]
    pairs = sonic.Output(per="constituent", axes=("pf", "sv"))
    layouts = {"pf": sonic.Padded("pt", 3), "sv": sonic.Padded("pt", 2, sort_by="pt")}
    tensor = np.arange(18.0, dtype=np.float32).reshape(3, 3, 2)
    assert scored(pairs, tensor, **layouts) == [[[1, 0], [3, 2]], [], [[12]]]


def test_scores_are_made_of_the_numbers() -> None:
    numbers = np.log(np.asarray([[1, 2, 5], [1, 1, 2], [4, 4, 2]], np.float32))
    soft = sonic.Output(["a", "b", "c"], function="softmax", groups={"ab": ["a", "b"], "c": "c"})
    for row, ab in zip(scored(soft, numbers), (3 / 8, 0.5, 0.8), strict=True):
        assert row == pytest.approx({"ab": ab, "c": 1 - ab}, rel=1e-6)
    by_slice = sonic.Output(groups={"bc": slice(1, 3)}, scale=2.0, shift=1.0)
    sums = [row["bc"] for row in scored(by_slice, np.ones((3, 3), np.float32))]
    assert sums == [6.0] * 3
    logistic = sonic.Output(function="sigmoid")
    assert scored(logistic, np.zeros((3, 1), np.float32)) == [0.5] * 3


@pytest.mark.parametrize(
    ("first", "second"),
    [((2, 3, 2), (1, 3, 3)), ((2, 3, 2), (1, 3, 1)), ((2, 3), (1, 3, 4))],
)
def test_answers_for_constituents_are_of_one_kind(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    inputs = bind_inputs({"in": sonic.Padded("pt", 3)}, LISTS)
    output = ByRow("out", sonic.Output(per="constituent"), inputs)
    output.place(slice(0, 2), 2, {"out": np.zeros(first, np.float32)})
    with pytest.raises(errors.ResponseError, match="before as float32"):
        output.place(slice(2, 3), 1, {"out": np.zeros(second, np.float32)})
    with pytest.raises(errors.ResponseError, match="came back as float64"):
        output.place(slice(2, 3), 1, {"out": np.zeros((1, *first[1:]), np.float64)})


@pytest.mark.parametrize(("length", "lengths"), [(4, ()), (2, ()), (4, (2, 4)), (8, (2, 4))])
def test_answers_of_another_length_are_refused(length: int, lengths: tuple[int, ...]) -> None:
    """What was not sent has no score, and what was sent has one."""
    array = ak.Array([{"x": [1.0, 2.0, 3.0]}, {"x": [4.0]}])
    x: Any = sonic.Bucketed("x", lengths) if lengths else sonic.Padded("x", 3)
    inputs = bind_inputs({"in": x}, array)
    output = ByRow("out", sonic.Output(per="constituent"), inputs)
    short = inputs.selection(0, 1) if lengths else slice(0, 1)
    with pytest.raises(errors.ResponseError, match=r"came back with shape .* for 1 rows of"):
        output.place(short, 1, {"out": np.zeros((1, length), np.float32)})


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
    """Assign one event's constituents, in plain Python."""
    length = len(event["H"])
    banned: set[Any] = set()
    out = []
    for _ in range(choices):
        free, chosen = set(range(length)), dict.fromkeys(RANKS)
        for _ in RANKS:
            options = [
                (np.asarray(event[name])[at], name, at)
                for name, rank in RANKS.items()
                if chosen[name] is None
                for at in permutations(sorted(free), rank)
                if (name, frozenset(at[:2]), at[2:]) not in banned
            ]
            if options:
                _, name, at = max(options)
                chosen[name] = (at, np.exp(np.asarray(event[name])[at]))
                free -= set(at)
        for name, choice in chosen.items():
            if choice is not None:
                banned.add((name, frozenset(choice[0][:2]), choice[0][2:]))
        out.append(chosen)
    return out


def test_choices_are_those_of_one_event_after_the_other() -> None:
    counts = [8, 6, 9, 3, 2, 0, 8]
    outputs = network(counts)
    assigned = sonic.assignments(outputs, choices=3)
    for number in range(len(counts)):
        event = {name: array[number].to_list() for name, array in outputs.items()}
        expected = greedy(event, 3) if counts[number] else [dict.fromkeys(RANKS)] * 3
        for choice, wanted in zip(assigned[number].to_list(), expected, strict=True):
            for name, target in wanted.items():
                if target is None:
                    assert choice[name] == {"index": None, "probability": None}
                    continue
                at, probability = target
                assert {*choice[name]["index"][:2]} == {*at[:2]}
                assert choice[name]["index"][2:] == [*at[2:]]
                assert choice[name]["probability"] == pytest.approx(probability)
    jets = ak.Array([[10.0 * n for n in range(count)] for count in counts])
    first = ak.drop_none(assigned.H.index[:, 0], axis=0)
    there = jets[~ak.is_none(assigned.H.index[:, 0])]
    assert (there[first] == 10.0 * first).to_list() == [[True, True]] * len(first)


def test_nothing_is_assigned_that_has_no_probability() -> None:
    nan = float("nan")
    pairs = ak.Array([[[0.9, nan, 0.1], [nan, 0.8, 0.0], [0.1, 0.0, 0.9]], [], [[0.5]]])
    assigned = sonic.assignments({"H": pairs}, choices=2, log=False)
    assert assigned.H.index.to_list() == [[[0, 2], [1, 2]], [None, None], [None, None]]
    assert assigned.H.probability.to_list() == [[0.1, 0.0], [None, None], [None, None]]
    nothing = sonic.assignments({"H": pairs[:0]}, choices=2, log=False)
    assert nothing.type.content == assigned.type.content
    masked = sonic.assignments({"H": ak.mask(pairs, [True, False, True])}, log=False)
    assert masked.H.index.to_list() == [[[0, 2]], [None], [None]]
    with pytest.raises(InputError, match="different numbers of events: H 3, b 2"):
        sonic.assignments({"H": pairs, "b": ak.Array([[0.5]] * 2)})
    for nothing in ({}, None, {"b": None}, {"b": ak.Array([0.5])}):
        with pytest.raises(InputError, match="expected a dict of targets"):
            sonic.assignments(nothing)
    with pytest.raises(
        errors.ConfigError, match="expected choices to be a number of at least 1, got -1"
    ):
        sonic.assignments({"b": ak.Array([[0.5]])}, choices=-1)
    with pytest.raises(InputError, match="target 'b': expected 3 constituents in each axis"):
        sonic.assignments({"H": pairs[:1], "b": ak.Array([[0.5, 0.1]])}, log=False)


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


def test_discriminants_are_of_labels_with_dots() -> None:
    output = sonic.Output(["a.b", "q"], discriminants={"d": "a.b + q"})
    inputs = bind_inputs({"x": sonic.Row("pt")}, ak.Array([{"pt": 1.0}]))
    assembly = ByRow("y", output, inputs)
    assembly.place(slice(0, 1), 1, {"y": np.asarray([[2.0, 3.0]], np.float32)})
    assert assembly.content().to_list() == [{"a.b": 2.0, "q": 3.0, "d": 5.0}]
