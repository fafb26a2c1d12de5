"""Answers of any rank, put back in the structure of what was sent, against plain loops."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import awkward as ak
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.layouts import Outputs, assemble, bind_inputs, trace
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
    assembly = assemble("y", output, inputs)
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


def test_a_choice_of_each_class_and_of_nodes() -> None:
    array = ak.Array([[{"pt": 1.0}, {"pt": 3.0}], [], [{"pt": 2.0}]])
    scores = np.asarray([[0.1, 0.9], [0.7, 0.2], [0.5, 0.5]], np.float32)
    for layout in (sonic.Flat("pt"), sonic.Flat("pt", sort_by="pt")):
        inputs = bind_inputs({"x": layout}, array)
        output = sonic.Output(["b", "c"], per="constituent", choose="argmax")
        assembly = assemble("y", output, inputs)
        assembly.place(slice(0, 3), 3, {"y": scores})
        first, second = (1, 0) if layout.sort_by is None else (0, 1)
        assert assembly.content().to_list() == [
            {"b": first, "c": second},
            {"b": None, "c": None},
            {"b": 0, "c": 0},
        ]


def test_what_is_chosen_picks_from_the_collection() -> None:
    """As `lepton = jets[scores.lead]` would, for events with any number of jets."""
    array = ak.Array([[{"pt": 1.0}, {"pt": 3.0}], [], [{"pt": 2.0}]])
    output = sonic.Output(["lead", "other"], per="constituent", axes=2, choose="argmax")
    pairs = np.zeros((3, 2, 2), np.float32)
    pairs[0, 1, 0] = 1
    chosen = answered(output, sonic.Padded("pt", 2), array, lambda rows, _: pairs[rows])
    index = ak.fill_none(ak.singletons(chosen.lead), [], axis=0)
    assert array.pt[index].tolist() == [[3.0], [], [2.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sonic.Output(["a"], shape=(1,)), "labels or a shape"),
        (lambda: sonic.Output(shape=(0,)), "Output: expected a length of at least 1, got 0"),
        (lambda: sonic.Output(axes=2), "and per='constituent', got axes=2"),
        (lambda: sonic.Output(axes=0, per="constituent"), "expected axes of constituents"),
        (
            lambda: sonic.Output(per="constituent", choose="argmin"),
            "expected choose to be 'argmax' or 'slot'",
        ),
        (lambda: sonic.Output(choose="argmax"), "needs per='constituent'"),
        (
            lambda: sonic.Output(per="constituent", choose="argmax", shape=(2,)),
            "has labels, and no shape",
        ),
        (lambda: sonic.Output(per="constituent", choose="slot"), "of dtype='int64'"),
        (
            lambda: sonic.Output(["a"], per="constituent", axes=2, choose="argmax"),
            "a label for each of 2 axes, got a",
        ),
    ],
)
def test_bad_outputs(make: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make()


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
            "are of several collections",
        ),
    ],
)
def test_outputs_that_their_input_does_not_allow(output: Any, inputs: Any, message: str) -> None:
    lists = ak.Array([[{"pt": 1.0}]])
    array = lists if "Flat" in repr(inputs) else ak.zip({"a": lists, "b": lists}, depth_limit=1)
    with pytest.raises(errors.ConfigError, match=f"output 'y' .*{message}"):
        assemble("y", output, bind_inputs(inputs, array))


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
        assemble("y", output, inputs).place(slice(0, 2), 2, {"y": np.zeros(shape, dtype)})


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
    assembly = assemble(name, output, inputs)
    assembly.place(slice(0, 3), 3, answer)
    whole = inputs.rows.unflatten(assembly.content())
    none = bind_inputs(layouts, JETS[:0])
    empty = none.rows.unflatten(assemble(name, output, none).content())
    assert str(whole.type.content) == str(empty.type.content)
    traced = trace(layouts, {name: output}, ak.Array(JETS.layout.to_typetracer(forget_length=True)))
    shown = str(traced.type.content)
    # What is truncated is None, in any chunk.
    if name in ("weights", "vectors", "pairs"):
        assert "?" in shown or "option[" in shown
        shown = shown.replace("?", "").replace("option[", "").replace("]", "")
    assert shown == str(whole.type.content)
    assert ak.concatenate([whole, empty]).tolist() == whole.tolist()


def test_a_server_tells_the_shape_that_nobody_declares() -> None:
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
            Submission((model,), of_partition=True).score(events)
        partition = Submission((declared,), of_partition=True).score(events)
        assert partition.tolist() == full.tolist()
    assert str(model(events[:0]).type) == "0 * var * float32"
    assert str(declared(events[:0]).type) == "0 * var * 4 * float32"


class Watched:
    """An output that sees whether others may be placed meanwhile."""

    def __init__(self) -> None:
        self.outputs: Outputs | None = None
        self.alone: list[bool] = []

    def place(self, *_: Any) -> None:
        assert self.outputs is not None
        self.alone.append(not self.outputs.lock.acquire(blocking=False))


def test_answers_are_placed_one_by_one() -> None:
    """Also those of parts that come with and without the axis of the rows."""
    watched: Any = Watched()
    watched.outputs = Outputs({"y": watched}, ["y"])
    for outputs in (watched.outputs, replace(watched.outputs, without_axis=frozenset("y"))):
        outputs.place(slice(0, 1), 1, {"y": np.zeros(1)})
    assert watched.alone == [True, True]
