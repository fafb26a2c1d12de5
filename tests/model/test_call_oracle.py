"""Whole calls against plain loops: from objects in any structure to their scores.

A row's answer depends on every number that is sent for it, and on the model. The loops ask for each
row alone, with the tensors of the layouts' slow reference, and put the answers into nested lists:
whatever is lost, doubled, reordered, padded otherwise or scored by another model shows.

The suite tries a few cases; ``make oracle`` tries many.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import awkward as ak
import hypothesis
import numpy as np
import pandas as pd
import pytest
from coffea import processor
from hypothesis import note, settings
from hypothesis import strategies as st
from tests.layouts.nodes import CASES, arrays, objects
from tests.layouts.reference import Refused, expected, padded_to, placed, rows_of, values
from tests.layouts.test_oracle import has_none
from tests.model.answers import Slots, axes_of, elements_of, finish, score, slots_of

import sonic_coffea as sonic
from sonic_coffea.errors import InputError
from sonic_coffea.pool import Settings
from sonic_coffea.testing import FakeModel, FakeServer

Tensors = Mapping[str, np.ndarray]
pick, flag = st.sampled_from, st.booleans()

# The inputs of a model; numbers that float32 rounds are those of the layouts' oracle.
HALVED, DOUBLED = sonic.Feature("q", shift=0.5, scale=0.5), sonic.Feature("pf.pt", scale=2.0)
missing = pick([1, 1, 1, None])
rows = st.builds(sonic.Row, pick([["q"], ["m", HALVED], ["pf[0].pt", "q"]]), missing=missing)
flat = {
    "fields": pick([["pf.pt"], ["pf.id", DOUBLED], ["pf.pt", "m"]]),
    "missing": missing,
    "sort_by": pick([None, None, "pf.pt"]),
}
padding = flat | {"fill": pick([0.0, -1.0]), "axis_order": pick(["FL", "LF"])}
padded = st.builds(sonic.Padded, **padding, length=st.integers(1, 4))
bucketed = st.builds(sonic.Bucketed, **padding, lengths=pick([(1, 3), (1, 2, 4)]))
flats = st.builds(sonic.Flat, **flat)
of_elements = st.one_of(
    padded,
    pick([bucketed, flats]).flatmap(lambda layouts: layouts),
    pick([flats, bucketed]).flatmap(lambda layouts: layouts),
    st.builds(lambda row, pf: sonic.Tokens({"row": row, "pf": pf}, flags="onehot"), rows, padded),
    st.just(sonic.Padded("pf.s", 2, "", "L", dtype="string", missing="?")),
)
of_others = {
    sonic.Padded: sonic.Padded("pf.id", 2, sort_by="pf.id", missing=0, axis_order="L"),
    sonic.Bucketed: sonic.Bucketed("sv.x", (1, 3), missing=0),
    sonic.Flat: sonic.Flat("sv.x", "y_splits", missing=0),
}
beside = {
    "row": rows,
    "pairs": st.just(sonic.Pairwise(["pf.pt", "pf.id"], 2, "pt_i - id_j")),
    "image": st.just(sonic.Dense("image", (2, 3))),
}


@st.composite
def some_inputs(draw: Any, per: str | None) -> dict[str, sonic.Layout]:
    """Draw an input whose elements may have scores, "x", and others beside it; or a row alone."""
    if draw(st.integers(0, 5)) == 0:
        names, dtype = draw(pick([(["q"], "float32"), (["q"], "bool"), (["m", HALVED], "float32")]))
        return {"row": sonic.Row(names, dtype, missing=draw(missing))}
    # Rows of one event share a bucket.
    kinds = {"alone": [padded], "event": [bucketed, of_elements]}.get(per or "", [of_elements])
    inputs = {"x": draw(draw(pick(kinds)))}
    is_flat = isinstance(inputs["x"], sonic.Flat)
    if draw(flag) and not is_flat:
        inputs["mask"] = sonic.Mask(draw(pick([None, None, 2, 9])), beside="x")
    if draw(flag):
        others = [sonic.Padded, *([sonic.Bucketed] if per != "alone" else [])]
        inputs["y"] = of_others[sonic.Flat if is_flat else draw(pick(others))]
    for name in draw(st.lists(pick(["row", "row", "pairs", "image"]), max_size=2)):
        inputs[name] = draw(beside[name])
    if per == "row" and draw(flag):  # whose elements nothing needs to tell apart
        for name in flat_inputs(inputs):
            inputs[name] = replace(inputs[name], splits=None)
    return inputs


def flat_inputs(inputs: Mapping[str, Any]) -> list[str]:
    return [name for name, layout in inputs.items() if isinstance(layout, sonic.Flat)]


# The outputs of a model.
LABELS = ["a", "b", "c"]
FINISHED: list[dict[str, Any]] = [
    {},
    {"scale": 2.0, "shift": 0.5, "over": ["b"]},
    {"function": "softmax", "scale": 2.0},
    {"function": "softmax", "over": slice(0, 2)},
    {"function": "sigmoid", "over": ["a", "c"]},
    {"function": "odds", "over": [1]},
    {"discriminants": {"d": "a / (a + b)"}},
    {"groups": {"ab": ["a", "b"], "rest": slice(2, 3)}},
    {"groups": {"ab": [0, 1]}, "discriminants": {"d": "2 * ab"}, "function": "softmax"},
]
NUMBERS = [
    *({"labels": LABELS, **how} for how in FINISHED),
    *({"shape": shape} for shape in (None, (), (2,), (1, 2))),
    *(
        {"labels": LABELS[:2], "dtype": dtype}
        for dtype in ("float64", "float16", "bfloat16", "int64")
    ),
]
STRINGS = [{"dtype": "string"}, {"dtype": "string", "labels": LABELS}]
SPLIT = [{**how, "splits": "ends"} for how in NUMBERS]
CHOSEN = [
    *({"labels": labels, "dtype": "int64", "choose": "slot"} for labels in (None, LABELS)),
    *({"labels": labels, "choose": "argmax"} for labels in (None, LABELS)),
]
ASSIGNED = [
    {"labels": labels, "axes": axes, "choose": "argmax"}
    for axes in (2, 3)
    for labels in (None, LABELS[:axes])
]


@st.composite
def axes_of_inputs(draw: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Draw axes between the rows and the labels, which need not be the last."""
    known = ["x", "1+x", "x+2", 2, *({"y"} & {*inputs})]
    axes = [*draw(st.permutations(["x", *draw(st.lists(pick(known), max_size=2))]))]
    place = draw(st.none() | st.integers(0, 3))
    if place is None:
        return {"axes": axes}
    return {"axes": [*axes[:place], "labels", *axes[place:]], "labels": LABELS}


@st.composite
def some_outputs(draw: Any, inputs: Mapping[str, Any], per: str | None) -> dict[str, sonic.Output]:
    """Draw one or two outputs, as the inputs allow."""
    x = inputs.get("x")
    is_flat = isinstance(x, sonic.Flat)
    of = pick([None, *({"y"} & {*flat_inputs(inputs)})])
    of_constituents = pick([*NUMBERS, *STRINGS]) | pick(CHOSEN[2 * is_flat :])
    if not is_flat:
        of_constituents |= pick(ASSIGNED)
    if not isinstance(x, (sonic.Flat, sonic.Tokens)):
        of_constituents |= axes_of_inputs(inputs) | axes_of_inputs(inputs)
    of_rows = [*NUMBERS, *STRINGS, *SPLIT]
    if per == "alone":  # whose first axis would be taken for that of the rows if its length is 1
        of_rows = [how for how in of_rows if how.get("shape") != (1, 2) and "splits" not in how]
    each = pick(of_rows).map(lambda how: sonic.Output(**how))
    if x is not None and per != "alone":
        each |= st.builds(
            lambda how, of: sonic.Output(**how, per="constituent", of=of), of_constituents, of
        )
    outputs = {"u": draw(each)}
    if draw(flag):
        outputs["v"] = draw(each.filter(lambda output: not output.splits))
    return outputs


# What a model makes of a row. Labels are the last axis, wherever they are sent.


def places(layout: sonic.Layout, tensor: np.ndarray) -> int:
    """Return how many elements a row's tensor has place for."""
    return tensor.shape[-1] if layout.axis_order == "FL" else len(tensor)


def network(
    model: sonic.Model, version: str, tensors: Tensors, request: list[Tensors]
) -> dict[str, np.ndarray]:
    """Return a row's answer, which depends on all that is sent for it, and on the model.

    Where an event has a request of its own, it depends on all rows of the request.
    """
    each = [tensors, *(request if model.one_request_per == "event" else ())]
    sent = [[(n, row[n].shape, row[n].tolist()) for n in sorted(row)] for row in each]
    sizes: dict[Any, int] = {2: 2}
    for name in {"x", "y"} & {*tensors}:
        sizes[name] = places(model.inputs[name], tensors[name])
    sizes |= {"1+x": 1 + sizes.get("x", 0), "x+2": sizes.get("x", 0) + 2}
    answer = {}
    for name, output in model.outputs.items():
        seed = zlib.crc32(repr((model.name, version, name, sent)).encode())
        random = np.random.default_rng(seed)
        axes = [random.integers(0, 4)] if output.splits else [sizes[of] for of in axes_of(output)]
        values: Any = random.integers(-8, 8, (*axes, *output.last))
        if output.choose == "argmax":
            values = np.asarray([0.0, 1.0, -np.inf, np.nan])[values % 4]
        if output.dtype == object:
            values = np.vectorize(lambda number: f"µ{number}".encode(), otypes=[object])(values)
        elif output.dtype.kind not in "iu":
            values = values / 4
        answer[name] = values.astype(output.dtype)
    return answer


def rows_of_request(model: sonic.Model, inputs: Tensors) -> list[Tensors]:
    """Return the tensors of each row."""
    each = {}
    for name, layout in model.inputs.items():
        each[name] = [*inputs[name]]
        if isinstance(layout, sonic.Flat):
            ends = inputs[layout.splits] if layout.splits else [0, len(inputs[name])]
            each[name] = [inputs[name][start:stop] for start, stop in itertools.pairwise(ends)]
    return [dict(zip(each, row, strict=True)) for row in zip(*each.values(), strict=True)]


def served(model: sonic.Model, server: FakeServer, has_axis: bool) -> FakeModel:
    """Return what answers requests of any rows, by the answer for each row."""

    def function(inputs: Tensors) -> Tensors:
        (version,) = (r.version for r in server.requests if r.inputs is inputs)
        rows = {name: tensor if has_axis else tensor[None] for name, tensor in inputs.items()}
        request = rows_of_request(model, rows)
        each = [network(model, version, row, request) for row in request]
        answer: dict[str, np.ndarray] = {}
        for name, output in model.outputs.items():
            values = [one[name] for one in each]
            is_joined = output.splits or {*axes_of(output)} & {*flat_inputs(model.inputs)}
            answer[name] = np.concatenate(values) if is_joined else np.stack(values)
            if isinstance(output.axes, tuple) and "labels" in output.axes:
                answer[name] = np.moveaxis(answer[name], -1, 1 + output.axes.index("labels"))
            if output.splits:
                answer[output.splits] = np.cumsum([0, *map(len, values)])
        return answer if has_axis else {name: values[0] for name, values in answer.items()}

    fake = FakeModel.of(model, function, versions=("1", "2"))
    has_ends = model.outputs["u"].splits is not None
    if has_axis and not has_ends:
        return fake
    # With offsets, the first axis is not that of the rows, so that shapes have all axes.
    added = (-1,) if has_ends and fake.max_rows else ()
    inputs, outputs = (
        {n: (dtype, (*added, *shape[not has_axis :])) for n, (dtype, shape) in tensors.items()}
        for tensors in (fake.inputs, fake.outputs)
    )
    if has_ends:
        outputs["ends"] = "int64", (-1,)
    return replace(fake, inputs=inputs, outputs=outputs, max_rows=0)


# What is sent for a row, and what for all.


def sent_together(
    inputs: Mapping[str, Any], request: list[Any]
) -> list[tuple[Tensors, dict[str, Slots]]]:
    """Return the tensors of each row of a request, and where its elements stand in them.

    Rows, and inputs, have one bucket: the largest that one of them needs.
    """
    rows = [ak.Array([plain]) for plain in request]
    bucketed = [layout for layout in inputs.values() if isinstance(layout, sonic.Bucketed)]
    bucket = max((bucket_of(layout, row) for layout in bucketed for row in rows), default=0)
    each = []
    for row in rows:
        slots = {name: slots_of(inputs[name], row) for name in ("x", "y") if name in inputs}
        tensors = {}
        for name, layout in inputs.items():
            if name == "mask":
                length = layout.length or places(inputs["x"], tensors["x"])
                # Elements are counted, also those that a shorter tensor has no place for.
                present: Any = range(len(slots["x"].get("", ())))
                if isinstance(inputs["x"], sonic.Tokens):
                    present = {slot for _, slot in elements_of(slots["x"])}
                tensors[name] = np.float32([[slot in present for slot in range(length)]])
            elif layout in bucketed:
                length = layout.lengths[min(bucket, len(layout.lengths) - 1)]
                tensors[name] = np.asarray(padded_to(layout, row, length), layout.dtype)[0]
            else:
                tensor = expected(layout, row)
                tensors[name] = tensor if isinstance(layout, sonic.Flat) else tensor[0]
        each.append((tensors, slots))
    return each


def bucket_of(layout: Any, row: ak.Array) -> int:
    (count,) = map(len, values(row, layout.features[0].name))
    return sum(count > length for length in layout.lengths[:-1])


# Who scores what.

Facts = dict[str, Any]
"""What an event, or an object, has beside the objects' fields."""


def nothing(_: Any) -> dict[str, Any]:
    return {}


def by_events(events: Any) -> dict[str, Any]:
    return {"events": events}


ROUTES: dict[str, tuple[Any, Any, Any]] = {
    "one": (lambda m: m[0], nothing, lambda e, r: [0]),
    "version": (lambda m: m[0], lambda t: {"version": t.version}, lambda e, r: [0]),
    "row version": (lambda m: m[0], lambda t: {"version": t.row_version}, lambda e, r: [0]),
    "mean": (lambda m: sonic.Folds(m, fold=None), nothing, lambda e, r: [0, 1]),
    "mean of now": (lambda m: sonic.Folds(m, "q"), lambda t: {"fold": None}, lambda e, r: [0, 1]),
    "event": (sonic.Folds, lambda t: {"fold": t.fold}, lambda e, r: [e["fold"]]),
    "row": (sonic.Folds, lambda t: {"fold": t.row_fold}, lambda e, r: [r["fold"]]),
    "field": (lambda m: sonic.Folds(m, "q > 9"), nothing, lambda e, r: [int(r["q"] > 9)]),
    "formula": (lambda m: sonic.Folds(m, "event % 2"), by_events, lambda e, r: [e["event"] % 2]),
    "formula of now": (
        lambda m: sonic.Folds(m, None),
        lambda t: {"fold": "event % 2", "events": t},
        lambda e, r: [e["event"] % 2],
    ),
    "number": (
        lambda m: sonic.Choice({1: m[0], 0: m[1]}, "m > 9"),
        nothing,
        lambda e, r: [None if r["m"] is None else int(r["m"] <= 9)],
    ),
    "text": (
        lambda m: sonic.Choice({"A": m[0], "B": m[1]}, "region"),
        by_events,
        lambda e, r: [{"A": 0, "B": 1}.get(e["region"])],
    ),
}
"""What is asked, with which options, and the numbers of the models, by the facts of a row."""
FACTS = {
    "event": st.integers(0, 5),
    "region": pick(["A", "B", None]),
    "fold": pick([0, 1, 0, 1, None]),
    "mask": pick([True, True, True, True, False, None]),
    "version": pick([1, 2]),
}


class Call(NamedTuple):
    """What is asked of two models, for some objects, and how."""

    models: list[sonic.Model]
    objects: ak.Array
    events: list[Facts]
    rows: list[Facts]
    route: str
    masked: str | None
    default: float | None
    deduplicate: bool
    pool: str
    given_as: str
    is_varied: bool
    has_axis: bool

    def options(self, events: ak.Array) -> dict[str, Any]:
        """Return the options of `submit`, of which some are made of events."""
        mask = None if self.masked is None else events[self.masked]
        own = {"mask": mask, "default": self.default, "deduplicate": self.deduplicate}
        return {**own, **ROUTES[self.route][1](events)}


numbers_of_models = itertools.count()


@st.composite
def calls(draw: Any) -> Call:
    # Rows are sent alone without an axis of rows: of other free lengths, each might be that.
    per = draw(pick([None, None, "row", "alone", "event", "event"]))
    inputs = draw(some_inputs(per))
    outputs = draw(some_outputs(inputs, per))
    has_axis, per = per != "alone", "row" if per == "alone" else per
    models = []
    for number in (1.0, 3.0):
        own = {**inputs}
        if "row" in own and number > 1:
            own["row"] = sonic.Row(sonic.Feature("q", scale=number))
        name = f"model {next(numbers_of_models)}"
        models.append(sonic.Model(name, own, outputs, one_request_per=per))
        outputs = dict(reversed(outputs.items()))
    least, is_table = draw(pick([0, 3, 3, 4])), "x" not in inputs and not outputs["u"].splits
    array = draw(objects(pairs="pairs" in inputs, least=least))
    if is_table:
        array = draw(
            arrays(({"m": ("float32",), "q": (draw(pick(["int32", "bool"])),)},), least=least)
        )
    plain, depth = ak.to_list(array), array["q"].ndim - 1
    counts = len(plain), sum(len(rows_of(event, depth)) for event in plain)
    facts = [draw(st.lists(st.fixed_dictionaries(FACTS), min_size=n, max_size=n)) for n in counts]
    each = outputs.values()
    are_numbers = all(not o.choose and not o.splits and o.dtype.kind != "O" for o in each)
    has_mean = are_numbers and all(o.dtype.kind not in "iu" for o in each)
    # Without rows, lists of what each row has are of no type.
    impossible = {"mean": not has_mean, "mean of now": not has_mean}
    impossible |= {"row": not facts[1], "row version": not facts[1]}
    route = draw(pick(["one", *(name for name in ROUTES if not impossible.get(name))]))
    masked = draw(pick([None, "mask", *(["row_mask"] if facts[1] else [])]))
    all_are_scored = masked is None and ("mean" in route or "version" in route or route == "one")
    has_default = are_numbers and all(o.per == "row" for o in each) and not all_are_scored
    given_as = ["array", "copy", "processor", "filter"]
    if route not in ("field", "number"):
        given_as.append("inputs")
    if not has_none(ak.to_list(array[["q"]])):
        given_as.append("columns")
    if is_table:
        given_as = (
            ["numpy"] if len(outputs) > 1 or outputs["u"].labels is None else ["numpy", "frame"]
        )
    return Call(
        models,
        array,
        *facts,
        route,
        masked,
        default=draw(pick([None, -1.0])) if has_default else None,
        deduplicate=not is_joint(models[0]) and draw(flag),
        pool=draw(pick(["large", "cached"] if per == "event" else ["large", "cached", "small"])),
        given_as=(given := draw(pick(given_as))),
        is_varied=given not in ("copy", "processor", "filter") and draw(flag),
        has_axis=has_axis,
    )


def is_joint(model: sonic.Model) -> bool:
    """Whether rows of a request are not told apart."""
    splits = any(output.splits for output in model.outputs.values())
    return splits or bool(flat_inputs(model.inputs)) or model.one_request_per == "event"


def scored_alone(call: Call) -> tuple[list[Any], list[tuple[int, str]]]:
    """Return the score of each row, and all that is sent, with the number of its event."""
    plain, depth = ak.to_list(call.objects), call.objects["q"].ndim - 1
    events = [n for n, event in enumerate(plain) for _ in rows_of(event, depth)]
    rows = [row for event in plain for row in rows_of(event, depth)]
    requests: dict[Any, list[int]] = {}
    for n, (event, row, own) in enumerate(zip(events, rows, call.rows, strict=True)):
        of_event = call.events[event]
        numbers = ROUTES[call.route][2](of_event, {**own, **row})
        mask = {"mask": of_event, "row_mask": own}.get(call.masked or "", {"mask": True})["mask"]
        version = {"version": of_event, "row version": own}.get(call.route, {"version": 2})
        unit = event if call.models[0].one_request_per == "event" else n
        for number in numbers if mask and None not in numbers else ():
            requests.setdefault((unit, number, str(version["version"])), []).append(n)
    outputs = call.models[0].outputs.items()
    answers: list[list[Any]] = [[] for _ in rows]
    sent = []
    for (_, number, version), places in requests.items():
        model = call.models[number]
        each = sent_together(model.inputs, [rows[n] for n in places])
        for n, (tensors, slots) in zip(places, each, strict=True):
            key = repr((model.name, version, {name: t.tolist() for name, t in tensors.items()}))
            sent.append((events[n], key))
            answer = network(model, version, tensors, [tensors for tensors, _ in each])
            answers[n].append(single({o: score(how, answer[o], slots) for o, how in outputs}))
    if call.default is not None or call.given_as in ("numpy", "frame"):
        blank = {n: finish(o, np.full(o.last, b"" if o.dtype == object else 0)) for n, o in outputs}
        default = single(mapped(lambda _: call.default, blank))
        answers = [each or [default] for each in answers]
    return [mapped(mean, *each) if each else None for each in answers], sent


def single(scores: dict[str, Any]) -> Any:
    """Return the scores of several outputs, or those of the only one."""
    return scores if len(scores) > 1 else scores["u"]


def mapped(function: Any, *each: Any) -> Any:
    """Return what a function makes of the numbers in the same places of nested dicts and lists."""
    if isinstance(each[0], dict):
        return {name: mapped(function, *(one[name] for one in each)) for name in each[0]}
    if isinstance(each[0], list):
        return [mapped(function, *some) for some in zip(*each, strict=True)]
    return function(*each)


def mean(*numbers: Any) -> Any:
    """Return the mean; of one number, or of nothing, what it is."""
    return numbers[0] if len(numbers) == 1 or None in numbers else sum(numbers) / len(numbers)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return [*found] == [*wanted] and all(same(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    is_number = isinstance(wanted, float)
    return bool(found == (pytest.approx(wanted, 1e-5, 1e-5, nan_ok=True) if is_number else wanted))


class Analysis(sonic.SonicProcessor, processor.ProcessorABC):
    """Scores the objects of events, in blocks of two, with options that are made of the events."""

    block_size: int | None = 2

    def __init__(self, model: Any, options: Any) -> None:
        self.models, self.options = {"m": model}, options

    def acquire(self, events: Any) -> Any:
        options = self.options(events)
        options.pop("events", None)  # those of the processor
        return {"m": sonic.Request(events.objects, **options)}

    def produce(self, events: Any, scores: Any) -> Any:
        return {"scores": scores["m"].tolist()}


class Filter(Analysis, sonic.SonicFilter):
    """Has the scores of events with an even number, and what was computed meanwhile."""

    block_size = None

    def overlap(self, events: Any) -> Any:
        return events.event

    def decide(self, events: Any, scores: Any) -> Any:
        return events.event % 2 == 0

    def produce(self, events: Any, scores: Any) -> Any:
        assert scores.overlap.tolist() == events.event.tolist()
        return super().produce(events, scores)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer({}) as running:
        yield running


@pytest.fixture(scope="module")
def pools(server: FakeServer, tmp_path_factory: Any) -> Iterator[dict[str, sonic.Pool]]:
    """Pools whose requests are large, small, or of rows that nobody has scored."""
    cache = tmp_path_factory.mktemp("cache") / "scores"
    options: dict[str, dict[str, Any]] = {
        "large": {},
        "small": {"max_request_bytes": 200, "max_in_flight": 1, "max_in_flight_bytes": 1},
        "cached": {"cache": cache, "cache_trusts_versions": True},
    }
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(sonic.Pool(Settings.make(server.url, **each)))
            for name, each in options.items()
        }


def table_of(call: Call) -> ak.Array:
    """Return the events with their objects, and the facts of both, as a file has them."""
    columns = {name: [facts[name] for facts in call.events] for name in FACTS}
    for name in ("fold", "mask", "version"):
        columns[f"row_{name}"] = placed(call.objects, [facts[name] for facts in call.rows])
    documented = {n: ak.with_parameter(c, "__doc__", "of a file") for n, c in columns.items()}
    return ak.zip({"objects": call.objects, **documented}, depth_limit=1)


def given(call: Call, array: ak.Array) -> Any:
    """Return objects as the call gives them."""
    if call.given_as == "inputs":
        return dict.fromkeys(call.models[0].inputs, array)
    columns = {name: array[name] for name in array.fields}
    if call.given_as in ("numpy", "frame"):
        columns = {name: np.asarray(ak.to_list(column)) for name, column in columns.items()}
    if call.given_as == "frame":
        return pd.DataFrame(columns, index=np.arange(len(array))[::-1])
    return array if call.given_as in ("array", "copy") else columns


def check(call: Call, asked: Any, pool: sonic.Pool, wanted: Any, sent: list[Any]) -> None:
    """Score all objects at once, as they are given; compare scores, rows that are sent, types."""
    events = table_of(call)
    options: dict[str, Any] = {"pool": pool, **call.options(events)}
    if call.given_as in ("processor", "filter"):
        is_filter = call.given_as == "filter"
        kind = Filter if is_filter else Analysis
        analysis = kind(asked, lambda events: {"pool": pool, **call.options(events)})
        each = zip(wanted, call.events, strict=True)
        passed = [one for one, facts in each if not is_filter or facts["event"] % 2 == 0]
        assert same(analysis.process(events)["scores"], passed)
        return
    objects = given(call, call.objects)
    # The events of a choice are the same for all variations.
    some = slice(None) if "events" in options else slice(None, 0, -1)
    if call.is_varied:
        objects = sonic.Variations(nominal=objects, other=given(call, call.objects[some]))
        for name in {"mask", "version", "fold"} & {*options}:
            if not isinstance(options[name], str | None):
                options[name] = {"nominal": options[name], "other": options[name][some]}
        left = range(len(events))[some]
        sent = sent + [(event, key) for event, key in sent if event in left]
    plain = by_row if call.given_as in ("numpy", "frame") else ak.to_list
    pending = asked.submit(objects, **options)
    result = pending.result()
    if call.is_varied:
        assert [*result] == ["nominal", "other"]
        assert same(plain(result["other"]), wanted[some])
        result = result["nominal"]
    is_once = call.deduplicate or call.pool == "cached" or call.is_varied
    keys = [key for _, key in sent]
    keys = [*{*keys}] if is_once and not is_joint(call.models[0]) else keys
    assert pending.statistics.total().rows == len(keys)
    assert same(plain(result), wanted)
    if call.given_as in ("numpy", "frame"):
        return
    assert "float16" not in str(result.type)  # which awkward does not reduce
    tracer = ak.Array(events.layout.to_typetracer(forget_length=True))
    for empty in (events[:0], tracer):
        scores = asked(empty.objects, **{**options, **call.options(empty)})
        assert type_of(scores) == type_of(result)


def by_row(scores: Any) -> list[Any]:
    """Return the scores of each row of a table, from those in columns."""
    if isinstance(scores, pd.DataFrame):
        none = scores.isna().all(axis=1)
        return scores.astype(object).mask(none, None).to_dict("records")  # type: ignore[no-any-return]
    if isinstance(scores, dict):
        columns = [by_row(column) for column in scores.values()]
        return [dict(zip(scores, each, strict=True)) for each in zip(*columns, strict=True)]
    assert isinstance(scores, np.ndarray)
    plain: list[Any] = scores.tolist()
    return plain


def type_of(scores: ak.Array) -> str:
    """Return the type of an event's scores; in some chunks, no element is truncated."""
    return re.sub(r"option\[|\]|\?", "", str(scores.type.content))


@pytest.mark.timeout(0)
@settings(max_examples=CASES // 4 or 2 * settings.default.max_examples, print_blob=True)
@hypothesis.given(calls())
def test_objects_have_the_scores_of_each_row_alone(
    server: FakeServer, pools: dict[str, sonic.Pool], call: Call
) -> None:
    for model in call.models:
        note(f"{model.name}: inputs {model.inputs}, outputs {model.outputs}")
    note(f"objects: {call.objects.type}, {ak.to_list(call.objects)}")
    server.requests.clear()
    for model in call.models:
        server.models[model.name] = served(model, server, call.has_axis)
    asked, pool = ROUTES[call.route][0](call.models), pools[call.pool]
    if call.given_as == "copy":
        asked = pickle.loads(pickle.dumps(asked))
    try:
        scores, sent = scored_alone(call)
    except Refused:
        with pytest.raises(InputError):
            asked(call.objects, pool=pool, **call.options(table_of(call)))
        return
    check(call, asked, pool, placed(call.objects, scores), sent)
