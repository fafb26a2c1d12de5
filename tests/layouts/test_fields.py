"""What a field may be, packed by the layouts and by plain Python loops."""

from __future__ import annotations

import math
import pickle
from typing import Any

import awkward as ak
import numpy as np
import pytest
from coffea.nanoevents import NanoEventsFactory
from hypothesis import given
from hypothesis import strategies as st
from tests.nanoaod import Schema

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.errors import ConfigError, FieldError, InputError
from sonic_coffea.layouts import bind_inputs

NAN = float("nan")
numbers = st.integers(-40, 40).map(lambda n: n / 4)
maybe = st.one_of(st.none(), numbers)
CANDIDATE = st.fixed_dictionaries({"x": maybe, "q": st.integers(-1, 1), "at": st.integers(-1, 2)})
JET = st.fixed_dictionaries({"m": numbers, "maybe": maybe, "pf": st.lists(CANDIDATE, max_size=4)})
EVENT = st.fixed_dictionaries(
    {
        "jets": st.lists(st.one_of(st.none(), JET), max_size=3),
        "met": numbers,
        "some": maybe,
        "hits": st.lists(numbers, min_size=3, max_size=5),
    }
)
# It gives the array its full type, also where there is nothing in it.
PART = {"x": 0.5, "q": 1, "at": 0}
SAMPLE = {
    "jets": [
        {"m": 0.5, "maybe": 0.5, "pf": [PART, {**PART, "x": None}]},
        {"m": 0.5, "maybe": None, "pf": []},
        None,
    ],
    "met": 0.5,
    "some": 0.5,
    "hits": [0.5],
}
FORMS = {
    "as it is": lambda a: a,
    "chosen": lambda a: a[np.arange(len(a))[::-1]][np.arange(len(a))[::-1]],
    "cut from more": lambda a: ak.concatenate([a[-1:], a, a[:1]])[1 : 1 + len(a)] if len(a) else a,
}


@st.composite
def samples(draw: Any) -> tuple[list[Any], ak.Array]:
    plain = draw(st.lists(EVENT, max_size=4))
    array = ak.Array([*plain, SAMPLE, {**SAMPLE, "some": None}])[: len(plain)]
    return plain, FORMS[draw(st.sampled_from(sorted(FORMS)))](array)


def jets_of(event: Any) -> list[Any]:
    return [jet for jet in event["jets"] if jet is not None]


def check(tensor: Any, expected: list[Any], *axes: int) -> None:
    wanted = np.asarray(expected, np.float32).reshape(-1, *axes)
    np.testing.assert_array_equal(tensor, wanted)


@given(samples(), st.integers(1, 4), st.booleans())
def test_constituents_beside_numbers_of_jets_and_events(
    data: tuple[list[Any], ak.Array], length: int, sort: bool
) -> None:
    plain, array = data
    rows = []
    for event in plain:
        for jet in jets_of(event):
            parts = [
                [
                    -7.0 if c["x"] is None else c["x"],
                    jet["m"],
                    -8.0 if jet["maybe"] is None else jet["maybe"],
                    event["met"],
                    -9.0 if event["some"] is None else event["some"],
                    1.5,
                    float(c["q"] == 1),
                    float(c["q"] == -1),
                    -1.0 if c["x"] is None else c["x"] * jet["m"] - event["met"],
                    -2.0 if c["at"] < 0 else event["hits"][c["at"]],
                ]
                for c in (sorted(jet["pf"], key=lambda c: c["q"]) if sort else jet["pf"])
            ]
            rows.append(parts)
    fields = [
        "jets.pf.x",
        "jets.m",
        "jets.maybe",
        "met",
        "some",
        1.5,
        sonic.OneHot("jets.pf.q", [1, -1]),
        sonic.Feature("y", expression="jets.pf.x * jets.m - met"),
        sonic.Feature("hits", index="jets.pf.at"),
    ]
    absent = [-7.0, 0.0, -8.0, 0.0, -9.0, 0.0, 0.0, 0.0, -1.0, -2.0]
    by: dict[str, Any] = {"sort_by": "jets.pf.q", "sort_ascending": True} if sort else {}
    for mode in ("constant", "wrap"):
        layout = sonic.Padded(
            fields, length, fill=3.0, axis_order="LF", pad_mode=mode, missing=absent, **by
        )
        expected = []
        for parts in rows:
            padding = [parts[k % len(parts)] for k in range(length)] if parts else []
            behind = padding[len(parts) :] if mode == "wrap" else []
            behind = behind or [[3.0] * 10] * max(0, length - len(parts))
            expected.append((parts + behind)[:length])
        check(layout.pack(array), expected, length, 10)
    flat = sonic.Flat(fields, missing=absent, **by).pack(array)
    check(flat, [part for parts in rows for part in parts], 10)


@given(samples())
def test_jets_beside_numbers_of_events_and_of_leading_constituents(
    data: tuple[list[Any], ak.Array],
) -> None:
    plain, array = data
    expected = [
        [
            jet["m"],
            5.0 if jet["maybe"] is None else jet["maybe"],
            event["met"],
            7.0 if not jet["pf"] else jet["pf"][0]["q"],
            8.0 if not jet["pf"] else jet["pf"][-1]["q"],
            9.0 if len(jet["pf"]) < 2 else jet["pf"][1]["q"],
        ]
        for event in plain
        for jet in jets_of(event)
    ]
    fields = ["jets.m", "jets.maybe", "met"]
    fields += ["jets.pf[0].q", "jets.pf[-1].q", "jets.pf[1].q"]
    layout = sonic.Row(fields, missing=[0, 5, 0, 7, 8, 9])
    check(layout.pack(array), expected, 6)


@given(samples())
def test_leading_objects_beside_numbers_of_events(data: tuple[list[Any], ak.Array]) -> None:
    plain, array = data
    expected = []
    for event in plain:
        masses = [NAN if jet is None else jet["m"] for jet in [*event["jets"], None, None][:2]]
        quotient = masses[1] - event["met"]
        some = NAN if event["some"] is None else event["some"]
        expected.append([*masses, event["met"], quotient, some])
    difference = sonic.Feature("y", expression="jets[1].m - met")
    layout = sonic.Row(["jets[:2].m", "met", difference, "some"], missing=NAN)
    check(layout.pack(array), expected, 5)


EVENTS = ak.Array(
    [
        {"Jet": [{"pt": 50.0, "id": 3}, {"pt": 30.0, "id": 4}], "MET": {"pt": 80.0}, "x": None},
        {"Jet": [], "MET": {"pt": 10.0}, "x": 2.0},
    ]
)


def test_an_event_without_the_object_is_no_event_that_is_missing() -> None:
    layout = sonic.Row("Jet[0].pt", missing=-1.0)
    assert layout.pack(EVENTS).tolist() == [[50.0], [-1.0]]
    present = ak.mask(EVENTS, [True, False])
    assert layout.pack(present).tolist() == [[50.0]]
    assert layout.unpack(np.asarray([[2.0]]), present).tolist() == [{"Jet[0].pt": 2.0}, None]


def test_tensors_without_an_axis_of_fields() -> None:
    array = ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": []}])
    layout = sonic.Padded("pt", 2, axis_order="L")
    assert layout.pack(array).tolist() == [[3.0, 2.0], [0.0, 0.0]]
    assert layout.unpack(layout.pack(array), array).pt.tolist() == [[3.0, 2.0, None], []]
    bucketed = {"x": sonic.Bucketed("pt", (2, 4), axis_order="L"), "m": sonic.Mask(axis_order="L")}
    inputs = bind_inputs(bucketed, array)
    shapes = {
        s.bucket: [t.shape for t in inputs.pack(s.start, s.stop).values()] for s in inputs.segments
    }
    assert shapes == {0: [(1, 2), (1, 2)], 1: [(1, 4), (1, 4)]}
    for dtype in ("bool", "int64", "float16"):
        mask = sonic.Mask(4, of="pt", axis_order="L", dtype=dtype).pack(array)
        assert (mask.dtype, mask.tolist()) == (dtype, [[1, 1, 1, 0], [0, 0, 0, 0]])
    assert sonic.Mask(4, of="pt", axis_order="LF").pack(array).shape == (2, 4, 1)


FUNCTIONS = {
    "log10": math.log10,
    "arctan": math.atan,
    "sinh": math.sinh,
    "cosh": math.cosh,
    "arcsinh": math.asinh,
    "sign_log": lambda x: math.copysign(math.log(1 + abs(x)), x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    values = [0.25, 0.5, 3.0] if name == "log10" else [-2.5, -0.5, 0.0, 0.25, 3.0]
    array = {"x": ak.Array(values), "many": ak.Array([values])}
    expected = [FUNCTIONS[name](x) for x in values]
    row = sonic.Row(sonic.Feature("x", function=name), dtype="float64").pack(array)
    np.testing.assert_allclose(row[:, 0], expected, rtol=1e-14)
    padded = sonic.Padded(sonic.Feature("many", function=name), 5, dtype="float64").pack(array)
    np.testing.assert_allclose(padded[0, 0, : len(values)], expected, rtol=1e-14)


def test_limits_before_a_function_and_powers() -> None:
    array = {"x": ak.Array([[0.0, 4.0, 100.0], [-3.0]])}
    clipped = sonic.Feature("x", function="log", within=(1.0, 16.0))
    tensor = sonic.Padded(clipped, 3, fill=-1.0).pack(array)
    np.testing.assert_allclose(tensor[:, 0], [np.log([1, 4, 16]), [0, -1, -1]], rtol=1e-6)
    root = sonic.Feature("x", power=0.5, within=(0, None), scale=2.0)
    assert sonic.Flat(root).pack(array)[:, 0].tolist() == [0.0, 4.0, 20.0, 0.0]
    only = sonic.Flat(sonic.Feature("x", within=(None, 5))).pack(array)
    assert only[:, 0].tolist() == [0.0, 4.0, 5.0, -3.0]
    with pytest.raises(
        InputError, match=r"field 'x' is NaN or infinite after power 0.5 in event 1"
    ):
        sonic.Flat(sonic.Feature("x", power=0.5)).pack(array)


@pytest.mark.parametrize("layout", [sonic.Row, lambda f, **k: sonic.Padded(f, 1, **k)])
def test_nan_passes_where_it_is_asked_for(layout: Any) -> None:
    array = {"x": ak.Array([1.0, NAN, np.inf]), "y": ak.Array([1.0, 2.0, 3.0])}
    if layout is not sonic.Row:
        array = {name: values[:, np.newaxis] for name, values in array.items()}
    passing = sonic.Feature("x", nonfinite=NAN, scale=2.0, lower=-9.0, upper=9.0)
    for dtype in ("float32", "float16"):
        tensor = layout([passing, "y"], dtype=dtype).pack(array).reshape(3, 2)
        np.testing.assert_array_equal(tensor, [[2, 1], [NAN, 2], [NAN, 3]])
    with pytest.raises(InputError, match="field 'x' is NaN"):
        layout(["y", "x"]).pack(array)
    with pytest.raises(InputError, match="float32 cannot hold"):
        layout([sonic.Feature("y", nonfinite=NAN, scale=1e38)], dtype="float32").pack(
            {"y": array["y"] * 1e3}
        )
    with pytest.raises(ConfigError, match="feature 'x': int32 cannot hold nonfinite=nan"):
        layout(passing, dtype="int32")


def test_categories() -> None:
    array = {"id": ak.Array([[211, -211], [], [22]])}
    known = sonic.Feature("id", categories={211: 1, -211: 2, 22: 3})
    tensor = sonic.Padded(known, 2, dtype="int64").pack(array)
    assert tensor.tolist() == [[[1, 2]], [[0, 0]], [[3, 0]]]
    other = sonic.Feature("id", categories={211: 1, None: 9}, scale=0.5)
    assert sonic.Flat(other).pack(array)[:, 0].tolist() == [0.5, 4.5, 4.5]
    onehot = sonic.OneHot("id", [22, 211])
    assert sonic.Flat([onehot]).pack(array).tolist() == [[0, 1], [0, 0], [1, 0]]
    back = sonic.Flat(onehot).unpack(sonic.Flat(onehot).pack(array), array)
    assert back.fields == ["id=22", "id=211"]
    few = sonic.Feature("id", categories={211: 1, -211: 2})
    message = "field 'id' is 22 in event 2, which is none of its categories 211, -211"
    for layout in (sonic.Flat(few), sonic.Padded(few, 2), sonic.Padded(few, 2, dtype="int8")):
        with pytest.raises(InputError, match=message):
            layout.pack(array)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a + 2 * b - 1", [4.0, 9.0]),
        ("-a // 2 ** b", [-1.0, -1.0]),
        ("log(a) * np.sqrt(c)", [0.0, math.log(2)]),
        ("1 <= a < 2", [1.0, 0.0]),
        ("(a > 1) & flag | ~flag", [0.0, 1.0]),
        ("where(flag, a, -b)", [1.0, -4.0]),
        ("u - 200", [-190.0, 0.0]),
        ("delta_phi(c * 3, -3 * c)", [6 - 2 * math.pi, 6 - 2 * math.pi]),
        ("np.pi * c", [math.pi, math.pi]),
    ],
)
def test_expressions(expression: str, expected: list[float]) -> None:
    columns = {
        "a": np.asarray([1.0, 2.0], np.float32),
        "b": np.asarray([2, 4]),
        "c": [1.0, 1.0],
        "flag": [True, False],
        "u": np.asarray([10, 200], np.uint8),
    }
    array = ak.Array(columns)
    tensor = sonic.Row(sonic.Feature("y", expression=expression)).pack(array)
    np.testing.assert_allclose(tensor[:, 0], expected, rtol=1e-6, atol=1e-7)


def test_what_is_computed_may_be_transformed_and_must_be_finite() -> None:
    array = ak.Array([[{"a": 1.0, "b": 2.0}], [{"a": 1.0, "b": 0.0}]])
    ratio = sonic.Feature("ratio", expression="a / b", scale=4.0, nonfinite=3.0)
    assert sonic.Padded(ratio, 1).pack(array)[:, 0, 0].tolist() == [2.0, 12.0]
    with pytest.raises(InputError, match="field 'ratio' is NaN or infinite in event 1"):
        sonic.Padded(sonic.Feature("ratio", expression="a / b"), 1).pack(array)
    with pytest.raises(FieldError, match="no field 'c'"):
        sonic.Row(sonic.Feature("y", expression="a / c")).pack(array)


def test_what_is_computed_of_a_number_that_is_missing_is_missing() -> None:
    jets = ak.Array(
        [[{"q": 2.0, "pf": [{"pt": 1.0}, {"pt": 3.0}]}, {"q": None, "pf": [{"pt": 5.0}]}], []]
    )
    ratio = sonic.Feature("ratio", expression="pf.pt / q")
    tensor = sonic.Padded([ratio, "pf.pt"], 2, missing=-1.0).pack(jets)
    assert tensor.tolist() == [[[0.5, 1.5], [1.0, 3.0]], [[-1.0, 0.0], [5.0, 0.0]]]
    with pytest.raises(InputError, match="'q' has None .* say what stands for it"):
        sonic.Padded(ratio, 2).pack(jets)


def test_a_number_of_a_row_without_elements_is_not_sent() -> None:
    array = ak.Array([{"pt": NAN, "pf": []}, {"pt": 2.0, "pf": [1.0, 3.0]}])
    layout = sonic.Padded(["pf", "pt"], 2)
    assert layout.pack(array).tolist() == [[[0, 0], [0, 0]], [[1, 3], [2, 2]]]
    for other in (layout, sonic.Flat(["pf", "pt"])):
        with pytest.raises(InputError, match="field 'pt' is NaN or infinite in event 0"):
            other.pack({"pf": array.pf[::-1], "pt": array.pt})


def test_references_must_lie_in_their_event() -> None:
    events = ak.Array(
        [
            {
                "Jet": [{"pt": 5.0, "mu": 1}, {"pt": 3.0, "mu": -1}],
                "Muon": [{"pt": 1.0}, {"pt": 2.0}],
            },
            {"Jet": [{"pt": 4.0, "mu": 0}], "Muon": [{"pt": 7.0}]},
        ]
    )
    muon = sonic.Feature("Muon.pt", index="Jet.mu", scale=10.0)
    layout = sonic.Row(["Jet.pt", muon], missing=-1.0)
    assert layout.pack(events).tolist() == [[5, 20], [3, -1], [4, 70]]
    assert layout.columns == ("Jet.pt", "Jet.mu", "Muon.pt")
    arrays = {"Jet": events.Jet[:, ::-1], "Muon": events.Muon}
    assert layout.pack(arrays).tolist() == [[3, -1], [5, 20], [4, 70]]
    with pytest.raises(InputError, match="'Jet.mu' refers to no 'Muon.pt' in event 0; say what"):
        sonic.Row(["Jet.pt", muon]).pack(events)
    with pytest.raises(InputError, match="is 1 in event 0, which has 0 of .* not over all events"):
        layout.pack({"Jet": events.Jet, "Muon": events.Muon[:, :0]})
    with pytest.raises(InputError, match="expected a list in each of 2 events"):
        layout.pack({"Jet": events.Jet, "Muon": events.Muon[:1]})


def test_a_path_through_a_reference_of_nanoaod() -> None:
    events = NanoEventsFactory.from_root(
        {str(DATA / "TTbar_1.root"): "Events"}, schemaclass=Schema, mode="virtual", entry_stop=30
    ).events()
    jets = ak.with_field(events.FatJet, sonic.constituents(events), "parts")
    linked = sonic.Padded(["parts.pt", "pt", "parts.pdgId"], 4).pack(jets)
    parts, leading = ak.flatten(jets.parts.pt), ak.flatten(jets.pt)
    for i in range(len(leading)):
        here = parts[i][:4]
        assert linked[i, 0, : len(here)].tolist() == here.tolist()
        assert linked[i, 1, : len(here)].tolist() == [leading[i]] * len(here)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sonic.Feature("x[0"), "expected a path, with indices"),
        (lambda: sonic.Feature("x[a]"), "expected a path, with indices"),
        (lambda: sonic.Feature("x", power=2, function="log"), "function= or power=, got both"),
        (lambda: sonic.Feature("x", within=(2, 1)), "limits the wrong way round"),
        (lambda: sonic.Feature("x", within=3), r"expected within=\(least, most\), got 3"),  # type: ignore[arg-type]
        (lambda: sonic.Feature("x", categories={}), "expected categories={value: number}"),
        (lambda: sonic.Feature("x", categories={"a": 1}), "expected categories={value: number}"),
        (lambda: sonic.Feature("x", expression="a +"), "expression 'a \\+' cannot be read"),
        (
            lambda: sonic.Feature("x", expression="logg(a)"),
            "no function 'logg'; did you mean 'log'",
        ),
        (lambda: sonic.Feature("x", expression="a and b"), "write & and |"),
        (lambda: sonic.Feature("x", expression="a if b else c"), r"write where\("),
        (lambda: sonic.Feature("x", expression="[a, b]"), "is no part of an expression"),
        (lambda: sonic.Feature("x", expression="a.__class__(b)"), "no function 'a.__class__'"),
        (lambda: sonic.Feature("x", expression="a", index="b"), "expression= or index=, got both"),
        (lambda: sonic.Dense(sonic.Feature("x", expression="a")), "Dense takes a field as it is"),
        (lambda: sonic.Dense("x[0]"), "Dense takes a field as it is"),
        (lambda: sonic.OneHot("x", []), "expected different values"),
        (lambda: sonic.OneHot("x", [1, 1]), "expected different values"),
        (lambda: sonic.Row(["a", "b"], missing=[1.0]), "one missing or one for each of 2 fields"),
        (lambda: sonic.Row("a", "int32", missing=NAN), "int32 cannot hold the missing nan"),
        (lambda: sonic.Row(["a", NAN]), "expected field names, numbers"),
        (
            lambda: sonic.Padded(["a", "b"], 2, axis_order="L"),
            "expected axis_order of several fields to be 'FL' or 'LF', got 'L'",
        ),
        (
            lambda: sonic.Padded("a", 2, pad_mode="warp"),
            "expected pad_mode to be 'constant' or 'wrap'",
        ),
        (
            lambda: sonic.Mask(2, axis_order="F"),
            "Mask: expected axis_order to be 'FL', 'LF' or 'L'",
        ),
    ],
)
def test_bad_declarations(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (sonic.Row(["Jet[0].pt", "MET.pt"]), r"event 1 has no Jet\[0\]; say what stands for it"),
        (sonic.Row(["MET.pt", "x"]), "'x' has None"),
        (sonic.Padded(["Jet.pt", "Jet[0].id", "x"], 2, missing=None), "event 1 has no|has None"),
        (sonic.Padded("Jet.pt", 2, sort_by="MET.pt"), "'MET.pt', by which .* of the whole row"),
        (sonic.Padded("Jet[0].pt", 2), "one number where a list is needed|an index picks"),
    ],
)
def test_what_is_missing_is_named(layout: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layout.pack(EVENTS)


def test_declarations_pickle_and_are_shown() -> None:
    feature = sonic.Feature("x", categories={1: 2, None: 0}, within=(None, 3))
    assert eval(repr(feature), {"Feature": sonic.Feature}) == feature  # noqa: S307
    for layout in (
        sonic.Row([feature, sonic.OneHot("y", [1, 2]), 3.0, "Jet[:2].pt"], missing=1.0),
        sonic.Padded("x", 2, axis_order="L", pad_mode="wrap"),
    ):
        assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize(
    ("layout", "read"),
    [
        (sonic.Row(["Jet[:2].pt", "MET.pt"], missing=0.0), {"Jet.pt", "MET.pt"}),
        (
            sonic.Padded(["Jet.pt", "MET.pt", sonic.OneHot("Jet.id", [3])], 2),
            {"Jet.pt", "Jet.id", "MET.pt"},
        ),
        (sonic.Row(sonic.Feature("y", expression="Jet.pt / MET.pt")), {"Jet.pt", "MET.pt"}),
    ],
)
def test_what_is_read_is_known_without_data(layout: Any, read: set[str]) -> None:
    events = ak.drop_none(EVENTS[["Jet", "MET"]])
    form, report = ak.typetracer.typetracer_with_report(events.layout.form_with_key("node{id}"))
    model = sonic.Model("m", {"in": layout}, {"y": ["a"]})
    traced = model(ak.Array(form))
    assert traced.type.content == model(events[:0]).type.content
    assert report.data_touched
    assert set(layout.columns) == read
