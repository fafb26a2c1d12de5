"""Whole calls against plain loops: from objects in any structure to their scores.

A row's answer depends on every number that is sent for it, and on the model. The loops ask for each
row alone, with the tensors of the layouts' slow reference, and put the answers into nested lists:
whatever is lost, doubled, reordered, padded otherwise or scored by another model shows.

The suite tries a few cases; ``make oracle`` tries many.
"""

from __future__ import annotations

import contextlib
import itertools
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
from tests.layouts.reference import Refused, expected, placed, rows_of
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
of_elements = st.one_of(
    padded,
    st.builds(sonic.Bucketed, **padding, lengths=pick([(1, 3), (1, 2, 4)])),
    st.builds(sonic.Flat, **flat),
    st.builds(lambda row, pf: sonic.Tokens({"row": row, "pf": pf}, flags="onehot"), rows, padded),
    st.just(sonic.Padded("pf.s", 2, "", "L", dtype="string", missing="?")),
)
beside = {
    "y": st.just(sonic.Padded("pf.id", 2, sort_by="pf.id", missing=0, axis_order="L")),
    "row": rows,
    "pairs": st.just(sonic.Pairwise(["pf.pt", "pf.id"], 2, "pt_i - id_j")),
    "image": st.just(sonic.Dense("image", (2, 3))),
}


@st.composite
def some_inputs(draw: Any) -> dict[str, sonic.Layout]:
    """Draw an input whose elements may have scores, "x", and others beside it; or a row alone."""
    if draw(st.integers(0, 5)) == 0:
        return {"row": sonic.Row(draw(pick([["q"], ["m", HALVED]])), missing=draw(missing))}
    inputs = {"x": draw(of_elements)}
    if draw(flag) and not isinstance(inputs["x"], sonic.Flat):
        inputs["mask"] = sonic.Mask(beside="x")
    for name in draw(st.lists(pick(["y", "y", "row", "row", "pairs", "image"]), max_size=2)):
        inputs[name] = draw(beside[name])
    return inputs


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
def some_outputs(draw: Any, inputs: Mapping[str, Any]) -> dict[str, sonic.Output]:
    """Draw one or two outputs, as the inputs allow."""
    x = inputs.get("x")
    is_flat = isinstance(x, sonic.Flat)
    of_constituents = pick([*NUMBERS, *STRINGS]) | pick(CHOSEN[2 * is_flat :])
    if not is_flat:
        of_constituents |= pick(ASSIGNED)
    if not isinstance(x, (sonic.Flat, sonic.Tokens)):
        of_constituents |= axes_of_inputs(inputs) | axes_of_inputs(inputs)
    each = pick([*NUMBERS, *STRINGS, *SPLIT]).map(lambda how: sonic.Output(**how))
    if x is not None:
        each |= of_constituents.map(lambda how: sonic.Output(**how, per="constituent"))
    outputs = {"u": draw(each)}
    if draw(flag):
        outputs["v"] = draw(each.filter(lambda output: not output.splits))
    return outputs


# What a model makes of a row. Labels are the last axis, wherever they are sent.


def places(layout: sonic.Layout, tensor: np.ndarray) -> int:
    """Return how many elements a row's tensor has place for."""
    return tensor.shape[-1] if layout.axis_order == "FL" else len(tensor)


def network(model: sonic.Model, version: str, tensors: Tensors) -> dict[str, np.ndarray]:
    """Return a row's answer, which depends on all that is sent for it, and on the model."""
    sent = [(name, tensor.shape, tensor.tolist()) for name, tensor in sorted(tensors.items())]
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


def served(model: sonic.Model, server: FakeServer) -> FakeModel:
    """Return what answers requests of any rows, by the answer for each row."""
    is_flat = isinstance(model.inputs.get("x"), sonic.Flat)

    def rows_of_request(inputs: Tensors) -> Iterator[Tensors]:
        if not is_flat:
            for each in zip(*inputs.values(), strict=True):
                yield dict(zip(inputs, each, strict=True))
            return
        for n, (start, stop) in enumerate(itertools.pairwise(inputs["row_splits"])):
            others = {name: inputs[name][n] for name in model.inputs if name != "x"}
            yield {"x": inputs["x"][start:stop], **others}

    def function(inputs: Tensors) -> Tensors:
        (version,) = (r.version for r in server.requests if r.inputs is inputs)
        each = [network(model, version, row) for row in rows_of_request(inputs)]
        answer: dict[str, np.ndarray] = {}
        for name, output in model.outputs.items():
            values = [one[name] for one in each]
            joined = output.splits or (is_flat and axes_of(output))
            answer[name] = np.concatenate(values) if joined else np.stack(values)
            if isinstance(output.axes, tuple) and "labels" in output.axes:
                answer[name] = np.moveaxis(answer[name], -1, 1 + output.axes.index("labels"))
            if output.splits:
                answer[output.splits] = np.cumsum([0, *map(len, values)])
        return answer

    fake = FakeModel.of(model, function, versions=("1", "2"))
    if model.outputs["u"].splits:  # whose first axis is not that of the rows
        axis = () if fake.max_rows == 0 else (-1,)
        inputs, outputs = (
            {name: (dtype, (*axis, *shape)) for name, (dtype, shape) in tensors.items()}
            for tensors in (fake.inputs, fake.outputs)
        )
        outputs["ends"] = "int64", (-1,)
        fake = replace(fake, inputs=inputs, outputs=outputs, max_rows=0)
    return fake


# What is sent for a row, and what for all.


def sent_alone(inputs: Mapping[str, Any], plain: Any) -> tuple[Tensors, dict[str, Slots]]:
    """Return the tensors of a row that is sent alone, and where its elements stand in them."""
    row = ak.Array([plain])
    slots = {name: slots_of(inputs[name], row) for name in ("x", "y") if name in inputs}
    tensors = {}
    for name, layout in inputs.items():
        if name == "mask":
            tensors[name] = np.zeros((1, places(inputs["x"], tensors["x"])), np.float32)
            tensors[name][0, [slot for _, slot in elements_of(slots["x"])]] = 1
        else:
            tensor = expected(layout, row)
            tensors[name] = tensor if isinstance(layout, sonic.Flat) else tensor[0]
    return tensors, slots


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
    "mean": (lambda m: sonic.Folds(m, fold=None), nothing, lambda e, r: [0, 1]),
    "event": (sonic.Folds, lambda t: {"fold": t.fold}, lambda e, r: [e["fold"]]),
    "row": (sonic.Folds, lambda t: {"fold": t.row_fold}, lambda e, r: [r["fold"]]),
    "field": (lambda m: sonic.Folds(m, "q > 9"), nothing, lambda e, r: [int(r["q"] > 9)]),
    "formula": (lambda m: sonic.Folds(m, "event % 2"), by_events, lambda e, r: [e["event"] % 2]),
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

    def options(self, events: ak.Array) -> dict[str, Any]:
        """Return the options of `submit`, of which some are made of events."""
        mask = None if self.masked is None else events[self.masked]
        own = {"mask": mask, "default": self.default, "deduplicate": self.deduplicate}
        return {**own, **ROUTES[self.route][1](events)}


numbers_of_models = itertools.count()


@st.composite
def calls(draw: Any) -> Call:
    inputs = draw(some_inputs())
    outputs = draw(some_outputs(inputs))
    has_buckets = isinstance(inputs.get("x"), sonic.Bucketed)  # an event's longest row decides
    per = draw(pick([None, None, None, "row", "row" if has_buckets else "event"]))
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
    impossible = {"mean": not has_mean, "row": not facts[1]}
    route = draw(pick(["one", *(name for name in ROUTES if not impossible.get(name))]))
    masked = draw(pick([None, "mask", *(["row_mask"] if facts[1] else [])]))
    all_are_scored = masked is None and route in ("one", "version", "mean")
    has_default = are_numbers and all(o.per == "row" for o in each) and not all_are_scored
    given_as = ["array", "processor", "variations"]
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
        given_as=draw(pick(given_as)),
    )


def is_joint(model: sonic.Model) -> bool:
    """Whether rows of a request are not told apart."""
    splits = any(output.splits for output in model.outputs.values())
    return (
        splits or isinstance(model.inputs.get("x"), sonic.Flat) or model.one_request_per == "event"
    )


def scored_alone(call: Call) -> tuple[list[Any], list[Any]]:
    """Return the score of each row, and what is sent for all of them."""
    plain, depth = ak.to_list(call.objects), call.objects["q"].ndim - 1
    outputs = call.models[0].outputs
    events = zip(call.events, plain, strict=True)
    rows = [(event, row) for event, of_event in events for row in rows_of(of_event, depth)]
    scores, sent = [], []
    for (event, row), of_row in zip(rows, call.rows, strict=True):
        numbers = ROUTES[call.route][2](event, {**row, "fold": of_row["fold"]})
        mask = {"mask": event, "row_mask": of_row}.get(call.masked or "", {"mask": True})["mask"]
        version = str(event["version"]) if call.route == "version" else "2"
        answers = []
        for model in (call.models[number] for number in numbers if mask and None not in numbers):
            tensors, slots = sent_alone(model.inputs, row)
            sent.append(repr((model.name, version, {n: t.tolist() for n, t in tensors.items()})))
            answer = network(model, version, tensors)
            each = {name: score(o, answer[name], slots) for name, o in outputs.items()}
            answers.append(each if len(each) > 1 else each["u"])
        if not answers and (call.default is not None or call.given_as in ("numpy", "frame")):
            blank = {
                n: np.full(o.last, b"" if o.dtype == object else 0) for n, o in outputs.items()
            }
            each = {name: finish(output, blank[name]) for name, output in outputs.items()}
            each = mapped(lambda _: call.default, each)
            answers = [each if len(each) > 1 else each["u"]]
        scores.append(mapped(mean, *answers) if answers else None)
    return scores, sent


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

    block_size = 2

    def __init__(self, model: Any, options: Any) -> None:
        self.models, self.options = {"m": model}, options

    def acquire(self, events: Any) -> Any:
        options = self.options(events)
        options.pop("events", None)  # those of the processor
        return {"m": sonic.Request(events.objects, **options)}

    def produce(self, events: Any, scores: Any) -> Any:
        return {"scores": scores["m"].tolist()}


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
        "small": {"max_request_bytes": 200},
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
    for name in ("fold", "mask"):
        columns[f"row_{name}"] = placed(call.objects, [facts[name] for facts in call.rows])
    documented = {n: ak.with_parameter(c, "__doc__", "of a file") for n, c in columns.items()}
    return ak.zip({"objects": call.objects, **documented}, depth_limit=1)


def given(call: Call, turn: int) -> Any:
    """Return the objects as the call gives them."""
    array = call.objects
    if call.given_as == "inputs":
        return dict.fromkeys(call.models[0].inputs, array)
    if call.given_as == "variations":
        return sonic.Variations(nominal=array, other=array[::turn])
    columns = {name: array[name] for name in array.fields}
    if call.given_as in ("numpy", "frame"):
        columns = {name: np.asarray(ak.to_list(column)) for name, column in columns.items()}
    if call.given_as == "frame":
        return pd.DataFrame(columns, index=np.arange(len(array))[::-1])
    return array if call.given_as == "array" else columns


def check(call: Call, asked: Any, pool: sonic.Pool, wanted: Any, sent: list[Any]) -> None:
    """Score all objects at once, as they are given; compare scores, rows that are sent, types."""
    events = table_of(call)
    options: dict[str, Any] = {"pool": pool, **call.options(events)}
    if call.given_as == "processor":
        analysis = Analysis(asked, lambda events: {"pool": pool, **call.options(events)})
        assert same(analysis.process(events)["scores"], wanted)
        return
    # Folds, and the events of a choice, are the same for all variations.
    turn = 1 if {"fold", "events"} & {*options} else -1
    is_varied = call.given_as == "variations"
    for name in {"mask", "version"} & {*options} if is_varied else ():
        if options[name] is not None:
            options[name] = {"nominal": options[name], "other": options[name][::turn]}
    pending = asked.submit(given(call, turn), **options)
    result = pending.result()
    if is_varied:
        assert same(result["other"].tolist(), wanted[::turn])
        result, sent = result["nominal"], 2 * sent
    is_once = call.deduplicate or call.pool == "cached" or is_varied
    is_once = is_once and not is_joint(call.models[0])
    assert pending.statistics.total().rows == len({*sent} if is_once else sent)
    if call.given_as in ("numpy", "frame"):
        assert same(by_row(result), wanted)
        return
    assert same(result.tolist(), wanted)
    assert "float16" not in str(result.type)  # which awkward does not reduce
    tracer = ak.Array(events.layout.to_typetracer(forget_length=True))
    for some in (events[:0], tracer):
        scores = asked(some.objects, **{**options, **call.options(some)})
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
    server.models.update({model.name: served(model, server) for model in call.models})
    asked, pool = ROUTES[call.route][0](call.models), pools[call.pool]
    try:
        scores, sent = scored_alone(call)
    except Refused:
        with pytest.raises(InputError):
            asked(call.objects, pool=pool, **call.options(table_of(call)))
        return
    check(call, asked, pool, placed(call.objects, scores), sent)
