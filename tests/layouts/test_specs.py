from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np
import pytest
from coffea.nanoevents import NanoEventsFactory
from tests.nanoaod import Schema

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.errors import ConfigError, FieldError, InputError, ResponseError
from sonic_coffea.layouts import assemble, bind_inputs, declared, trace

JETS = ak.Array(
    [
        [
            {"pt": 50.0, "eta": 0.5, "pf": [{"pt": 1.0}, {"pt": 2.0}, {"pt": 3.0}]},
            {"pt": 30.0, "eta": -1.0, "pf": []},
        ],
        [],
        [{"pt": 40.0, "eta": 2.0, "pf": [{"pt": 7.0}]}],
    ]
)


@pytest.fixture
def events() -> tuple[Any, list[Any]]:
    log: list[Any] = []
    factory = NanoEventsFactory.from_root(
        {str(DATA / "TTbar_1.root"): "Events"},
        schemaclass=Schema,
        mode="virtual",
        access_log=log,
        entry_stop=200,
    )
    return factory.events(), log


def branches(log: list[Any]) -> set[str]:
    return {getattr(entry, "branch", entry) for entry in log}


def test_only_the_named_columns_are_read(events: tuple[Any, list[Any]]) -> None:
    array, log = events
    sonic.Row(["pt", "msoftdrop"]).pack(array.FatJet)
    assert branches(log) == {"nFatJet", "FatJet_pt", "FatJet_msoftdrop"}
    constituents = sonic.constituents(array)
    log.clear()
    sonic.Padded("eta", 8).pack(constituents)
    assert branches(log) == {"PFCand_eta"}


def test_behaviours_can_be_named(events: tuple[Any, list[Any]]) -> None:
    array, _ = events
    tensor = sonic.Row(["px", "pt"]).pack(array.FatJet)
    columns = [np.asarray(ak.flatten(array.FatJet[n])) for n in ("pt",)]
    columns.insert(0, np.asarray(ak.flatten(array.FatJet.px)))
    expected = np.stack(columns, axis=1)
    np.testing.assert_array_equal(tensor, expected.astype(np.float32))


@pytest.mark.parametrize("mode", ["virtual", "eager"])
def test_a_constant_of_the_chunk_is_a_channel(mode: str) -> None:
    events = NanoEventsFactory.from_root(
        {str(DATA / "TTbar_1.root"): "Events"},
        schemaclass=Schema,
        mode=mode,
        entry_stop=20,
        metadata={"year": "2018", "isMC": True, "dataset": "ttbar"},
    ).events()
    year = sonic.Metadata("year", shift=2016)
    layout = sonic.Row([year, "FatJet.pt", sonic.Metadata("isMC")])
    assert layout.columns == ("FatJet.pt",)
    tensor = layout.pack(events)
    assert len(tensor) == ak.count(events.FatJet.pt)
    assert {(row[0], row[2]) for row in tensor.tolist()} == {(2.0, 1.0)}
    of_jets = sonic.Row([year, sonic.Feature("later", expression="pt * metadata(year)")])
    for jets in (events.FatJet, {"pt": events.FatJet.pt, "eta": events.FatJet.eta}):
        assert of_jets.pack(jets)[:, 0].tolist() == [2.0] * len(tensor)
    assert sonic.Padded(["FatJet.pt", year], 2).pack(events).shape == (20, 2, 2)
    assert sonic.Row(year).pack(events).tolist() == [[2.0]] * 20
    with pytest.raises(
        FieldError, match="the events' metadata have no 'yaer'; did you mean 'year'"
    ):
        sonic.Row(["FatJet.pt", sonic.Metadata("yaer")]).pack(events)
    with pytest.raises(InputError, match="'dataset' of .* is 'ttbar'; expected a number"):
        sonic.Row(["FatJet.pt", sonic.Metadata("dataset")]).pack(events)
    with pytest.raises(InputError, match="no metadata with 'year'.*; give coffea's events"):
        sonic.Row(["pt", year]).pack(ak.Array([{"pt": 1.0}]))
    traced = ak.Array(events.FatJet.layout.to_typetracer(forget_length=True), attrs=events.attrs)
    inputs = {"x": sonic.Row(["pt", year])}
    assert str(trace(inputs, {"y": sonic.Output()}, traced).type.content) == "var * float32"


@pytest.mark.parametrize("mode", ["virtual", "eager"])
def test_scores_attach_to_events_and_survive(mode: str, tmp_path: Any) -> None:
    import uproot

    events = NanoEventsFactory.from_root(
        {str(DATA / "TTbar_1.root"): "Events"}, schemaclass=Schema, mode=mode, entry_stop=50
    )
    array = events.events()
    inputs = bind_inputs({"x": sonic.Row("pt")}, array.FatJet)
    output = assemble("out", sonic.Output(["qcd", "top"]), inputs)
    n = len(inputs.rows)
    output.place(slice(0, n), n, {"out": np.arange(2 * n, dtype=np.float32).reshape(n, 2)})
    scores = inputs.rows.unflatten(output.content())
    array["FatJet", "top"] = scores
    assert ak.flatten(array.FatJet.top.qcd).tolist() == list(range(0, 2 * n, 2))
    sliced = array[10:20]
    assert sliced.FatJet.top.top.tolist() == scores.top[10:20].tolist()
    ak.to_parquet(ak.zip({"top": array.FatJet.top.top}), tmp_path / "jets.parquet")
    assert ak.from_parquet(tmp_path / "jets.parquet").top.tolist() == scores.top.tolist()
    with uproot.recreate(tmp_path / "jets.root") as file:
        file.mktree("Events", {"top": "var * float32"})
        file["Events"].extend({"top": array.FatJet.top.top})
    with uproot.open(tmp_path / "jets.root") as file:
        assert file["Events"]["top"].array().tolist() == scores.top.tolist()


@pytest.mark.parametrize("source", ["float32", "float64", "int16", "int64"])
def test_transformation_is_that_of_numpy_bit_by_bit(source: str) -> None:
    rng = np.random.default_rng(1)
    values = (rng.normal(size=1000) * 50).astype(source)
    feature = sonic.Feature("x", shift=1.7, scale=0.031, lower=-1.0, upper=0.9)
    real = np.result_type(values.dtype, np.float32)
    expected = (values.astype(real) - real.type(1.7)) * real.type(0.031)
    expected = np.clip(expected, real.type(-1.0), real.type(0.9)).astype(np.float32)
    array = {"x": ak.Array(values), "y": ak.unflatten(values, 10)}
    np.testing.assert_array_equal(sonic.Row(feature).pack(array)[:, 0], expected)
    jagged = sonic.Feature("y", shift=1.7, scale=0.031, lower=-1.0, upper=0.9)
    tensor = sonic.Padded(jagged, 12, fill=-7.0).pack(array)
    np.testing.assert_array_equal(tensor[:, 0, :10].reshape(-1), expected)
    assert np.all(tensor[:, 0, 10:] == -7.0)  # not transformed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_numbers_raise_or_are_replaced(value: float) -> None:
    array = ak.Array([[[1.0]], [], [[2.0, value]]])
    with pytest.raises(InputError, match="field 'x' is NaN or infinite in event 2"):
        sonic.Padded("x", 4).pack({"x": array})
    with pytest.raises(InputError, match="field 'x' is NaN or infinite in event 2"):
        sonic.Padded(sonic.Feature("x", scale=2.0), 4).pack({"x": array})
    with pytest.raises(InputError, match="event 2"):
        sonic.Row("x").pack({"x": array})
    replaced = sonic.Padded(sonic.Feature("x", nonfinite=-5.0, scale=2.0), 2).pack({"x": array})
    assert replaced[:, 0].tolist() == [[2.0, 0.0], [4.0, -10.0]]
    cut = sonic.Padded("x", 1).pack({"x": array})
    assert cut[:, 0].tolist() == [[1.0], [2.0]]


def test_each_field_pads_with_its_own() -> None:
    tensor = sonic.Padded(["pf.pt", "pf.pt"], 2, fill=[-1.0, 9.0]).pack(JETS[2:])
    assert tensor.tolist() == [[[7.0, -1.0], [7.0, 9.0]]]


def test_bucketed_rows_of_like_length_share_a_segment() -> None:
    array = ak.Array([{"x": [1.0] * n} for n in (5, 1, 2, 9, 3, 0)])
    layouts = {"x": sonic.Bucketed("x", lengths=(2, 4, 8)), "m": sonic.Mask()}
    inputs = bind_inputs(layouts, array)
    by_level = {
        s.bucket: (inputs.selection(s.start, s.stop).tolist(), inputs.pack(s.start, s.stop))
        for s in inputs.segments
    }
    assert {level: rows for level, (rows, _) in by_level.items()} == {
        0: [1, 2, 5],
        1: [4],
        2: [0, 3],
    }
    for level, (rows, tensors) in by_level.items():
        assert tensors["x"].shape == tensors["m"].shape == (len(rows), 1, (2, 4, 8)[level])
    assert inputs.count_elements() == (5 + 1 + 2 + 8 + 3, 1, 3 + 1 + 0 + 0 + 1 + 2)


def test_groups_with_lengths_of_their_own() -> None:
    """A row's padding depends on its own counts: the largest step that any of its groups needs."""
    counts = [(3, 0), (13, 1), (5, 2), (100, 9), (0, 4), (48, 0), (12, 1)]
    array = ak.Array([{"pf": [1.0] * n, "sv": [1.0] * m} for n, m in counts])
    layouts = {
        "pf": sonic.Bucketed("pf", (12, 24, 48)),
        "pf mask": sonic.Mask(beside="pf"),
        "sv": sonic.Bucketed("sv", (1, 4), axis_order="LF"),
        "sv mask": sonic.Mask(of="sv", beside=None, length=6),
    }
    expected = {0: (12, 1), 1: (24, 4), 2: (48, 4)}
    by_hand = [0, 1, 1, 2, 1, 2, 0]
    for chosen in (slice(None), slice(None, None, -1), [4, 2], [0], []):
        inputs = bind_inputs(layouts, array[chosen])
        wanted = np.arange(len(counts))[chosen]
        levels = {}
        for segment in inputs.segments:
            sent = inputs.pack(segment.start, segment.stop)
            rows = wanted[inputs.selection(segment.start, segment.stop)]
            levels |= dict.fromkeys(rows.tolist(), segment.bucket)
            pf, sv = expected[segment.bucket]
            assert sent["pf"].shape == sent["pf mask"].shape == (len(rows), 1, pf)
            assert sent["sv"].shape == (len(rows), sv, 1)
            assert sent["sv mask"].shape == (len(rows), 1, 6)
            for name, axis, length in (("pf", 0, pf), ("sv", 1, sv), ("sv mask", 1, 6)):
                kept = [float(min(counts[row][axis], length)) for row in rows]
                assert sent[name].sum(axis=(1, 2)).tolist() == kept
            assert segment.row_bytes == 4 * (2 * pf + sv + 6)
        assert levels == {int(row): by_hand[row] for row in wanted}
    inputs = bind_inputs(layouts, array)
    padding = sum(
        expected[level][k] - min(row[k], expected[level][k])
        for row, level in zip(counts, by_hand, strict=True)
        for k in (0, 1)
    )
    assert inputs.count_elements()[2] == padding


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({}, "no input is padded, of none"),
        ({"x": sonic.Flat("pt")}, "no input is padded, of 'x'"),
        ({"x": sonic.Padded("pt", 2), "y": sonic.Padded("pt", 3)}, "inputs 'x', 'y' have several"),
    ],
)
def test_masks_of_a_field_whose_length_nobody_tells(others: dict[str, Any], message: str) -> None:
    """Not that of the longest row: the tensor of a row would depend on which others are sent."""
    layouts = {"m": sonic.Mask(of="pt"), "r": sonic.Row("mass"), **others}
    array = ak.Array([{"pt": [1.0], "mass": 2.0}])
    with pytest.raises(ConfigError, match=f"input 'm': Mask needs a length.*{message}"):
        bind_inputs(layouts, array)
    with pytest.raises(ConfigError, match="Mask needs a length"):
        declared(layouts)


def test_inputs_from_a_dict_of_arrays() -> None:
    layouts = {"a": sonic.Row("pt"), "b": sonic.Padded("pt", 2), "m": sonic.Mask(2)}
    inputs = bind_inputs(layouts, {"a": JETS, "b": JETS.pf})
    tensors = inputs.pack(0, 3)
    assert tensors["a"][:, 0].tolist() == [50.0, 30.0, 40.0]
    assert tensors["m"].sum(axis=(1, 2)).tolist() == [2.0, 0.0, 1.0]


def test_declared_tensors() -> None:
    tensors = declared({"x": sonic.Flat(["a", "b"], "splits"), "y": sonic.Bucketed("a")})
    assert {name: shape for name, (_, shape) in tensors.items()} == {
        "x": (2,),
        "splits": (),
        "y": (1, -1),
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sonic.Padded("pt", 0), "Padded: expected a length of at least 1, got 0"),
        (lambda: sonic.Mask(-1), "Mask: expected a length of at least 1, got -1"),
        (lambda: sonic.Padded("pt", 2.5), "at least 1, got 2.5"),  # type: ignore[arg-type]
        (lambda: sonic.Row([]), "Row needs at least one field"),
        (lambda: sonic.Row([3]), "Row needs a field beside constants"),
        (lambda: sonic.Row([None]), "expected field names, numbers or sonic.Feature, got None"),  # type: ignore[list-item]
        (lambda: sonic.Row("pt", dtype="float31"), "did you mean 'float32'"),
        (
            lambda: sonic.Padded("pt", 2, axis_order="NF"),
            "expected axis_order to be 'FL', 'LF' or 'L'",
        ),
        (lambda: sonic.Padded(["a", "b"], 2, fill=[1.0]), "one for each of 2 fields, got 1"),
        (lambda: sonic.Bucketed("a", lengths=(8, 4)), "expected ascending lengths"),
        (lambda: sonic.Feature("pt", lower=1.0, upper=0.0), "lower .* is above upper"),
        (lambda: sonic.Feature("pt", function="logg"), "did you mean 'log'"),
        (lambda: sonic.Output("qcd"), "labels as a list of names, got 'qcd'"),
        (lambda: sonic.Output(100_000), "labels as a list of names, got 100000"),
        (lambda: sonic.Output({"a": 1}), "labels as a list of names"),
        (lambda: sonic.Output([1, 2]), "labels as a list of names"),
        (lambda: sonic.Output(["a", "a"]), "labels must differ"),
        (
            lambda: sonic.Mask(2, of="a", beside="b"),
            "Mask: expected of='a' or beside='b', got both",
        ),
        (lambda: sonic.Output(per="jet"), "expected per to be 'row' or 'constituent'"),
        (lambda: sonic.Padded("x", 2, fill=300, dtype="uint8"), "uint8 cannot hold the fill 300"),
        (lambda: sonic.Padded("x", 2, fill=0.5, dtype="int32"), "int32 cannot hold the fill 0.5"),
        (lambda: sonic.Bucketed("x", fill=1e5, dtype="float16"), "float16 cannot hold the fill"),
    ],
)
def test_bad_declarations(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("layout", "array", "kind", "message"),
    [
        (sonic.Row("ptt"), JETS, FieldError, "no field 'ptt'; did you mean 'pt'"),
        (sonic.Row("pf.et"), JETS, FieldError, r"no field 'et' \(in 'pf.et'\)"),
        (sonic.Row("pf"), JETS, InputError, "is a record with fields pt"),
        (sonic.Row("x"), {"x": ak.Array(["a", "b"])}, InputError, "holds strings"),
        (sonic.Padded("pt", 2), JETS[0], InputError, "one number where a list is needed"),
        (
            sonic.Padded(["pf.pt", "x"], 2),
            {"pf": JETS.pf, "x": JETS.pt[:, :1]},
            InputError,
            "first difference is in event 0",
        ),
        (
            sonic.Padded(["x", "y"], 2),
            {"x": ak.Array([[1.0], [2.0]]), "y": ak.Array([[1.0], [2.0, 3.0]])},
            InputError,
            r"lists of different lengths \(1 and 2\) in event 1",
        ),
        (
            sonic.Row(["x", "y"]),
            {"x": ak.Array([1.0]), "y": ak.Array([1.0, 2.0])},
            InputError,
            "1 and 2 events",
        ),
        (
            sonic.Padded("x", 2),
            {"x": ak.Array([[1.0, None]])},
            InputError,
            "None among the constituents",
        ),
        (
            sonic.Row("x", dtype="int8"),
            {"x": ak.Array([[5], [300]])},
            InputError,
            "is 300 in event 1, which int8 cannot hold",
        ),
        (
            sonic.Row("x", dtype="int64"),
            {"x": ak.Array([[5.0], [0.5]])},
            InputError,
            "is 0.5 in event 1, which int64 cannot hold",
        ),
        (
            sonic.Padded(sonic.Feature("x", scale=100.0), 2, dtype="int8"),
            {"x": ak.Array([[1.0], [-5.0]])},
            InputError,
            "is -500.0 after its transformation in event 1, which int8 cannot hold",
        ),
        (
            sonic.Row("x", dtype="float16"),
            {"x": ak.Array([1.0, 70000.0])},
            InputError,
            "is 70000.0 in event 1, which float16 cannot hold",
        ),
        (
            sonic.Padded("x", 2),
            {"x": ak.Array([[1.0], [1e300]])},
            InputError,
            r"is 1e\+300 in event 1, which float32 cannot hold",
        ),
        (
            sonic.Padded(sonic.Feature("x", scale=1e30), 2),
            {"x": ak.Array([[1.0], [1e20]])},
            InputError,
            r"is 1e\+50 after its transformation in event 1, which float32 cannot hold",
        ),
        (
            sonic.Row(sonic.Feature("x", scale=1e30)),
            {"x": ak.Array([1.0, 1e20])},
            InputError,
            r"is 1e\+50 after its transformation in event 1, which float32 cannot hold",
        ),
        (
            sonic.Row(sonic.Feature("x", scale=4.0), dtype="int64"),
            {"x": ak.Array([1.0, 2.0**61])},
            InputError,
            "after its transformation in event 1, which int64 cannot hold",
        ),
        (
            sonic.Dense("x", dtype="int8"),
            {"x": ak.Array(np.asarray([[5, 6], [5, 300]]))},
            InputError,
            "is 300 in event 1, which int8 cannot hold",
        ),
        (sonic.Dense("pf"), JETS, InputError, "is a record with fields"),
        (sonic.Dense("pt"), JETS, InputError, "without axes of fixed length"),
        (
            sonic.Dense("x", (2, 2)),
            {"x": ak.Array(np.zeros((3, 2, 3)))},
            InputError,
            r"has \[2, 3\] numbers a row, expected \[2, 2\]",
        ),
    ],
)
def test_bad_arrays(layout: Any, array: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        layout.pack(array)


def test_inputs_must_have_the_same_objects() -> None:
    layouts = {"a": sonic.Row("pt"), "b": sonic.Padded("pf.pt", 2)}
    with pytest.raises(InputError, match="input 'a' and input 'b' .* difference is in event 2"):
        bind_inputs(layouts, {"a": JETS[:, :2], "b": ak.concatenate([JETS[:2], JETS[1:2]])})


def test_inputs_are_named_when_they_fail() -> None:
    with pytest.raises(FieldError, match="input 'a': no field 'ptt'"):
        bind_inputs({"a": sonic.Row("ptt")}, JETS)
    with pytest.raises(FieldError, match="no field 'pt', as the array has none; give records, or"):
        bind_inputs({"a": sonic.Row("pt")}, {"a": JETS.pt})
    with pytest.raises(FieldError, match="no input 'aa'; did you mean 'a'"):
        bind_inputs({"a": sonic.Row("pt"), "b": sonic.Row("pt")}, {"a": JETS, "aa": JETS})
    with pytest.raises(ConfigError, match="input 'm': Mask needs of="):
        bind_inputs({"a": sonic.Row("pt"), "m": sonic.Mask(2)}, JETS)
    with pytest.raises(ConfigError, match="Mask beside 'aa', which is no .* did you mean 'a'"):
        bind_inputs({"a": sonic.Padded("pf.pt", 2), "m": sonic.Mask(beside="aa")}, JETS)


JAGGED = ak.Array([[{"pt": [1.0, 2.0, 3.0]}, {"pt": []}], [], [{"pt": [7.0]}]])


def test_one_field_without_an_axis() -> None:
    row, flat = sonic.Row("pt", axis_order=""), sonic.Flat("pf.pt", axis_order="L")
    jets = ak.Array([[{"pt": 3.0, "pf": [{"pt": 2.0}, {"pt": 1.0}]}], [], [{"pt": 5.0, "pf": []}]])
    assert row.pack(jets).tolist() == [3.0, 5.0]
    assert row.unpack(row.pack(jets), jets).tolist() == jets[["pt"]].tolist()
    assert flat.pack(jets).tolist() == [2.0, 1.0]
    assert flat.unpack(flat.pack(jets), jets)["pf.pt"].tolist() == jets.pf.pt.tolist()
    tensors = declared({"row": row, "flat": flat})
    assert tensors["row"] == tensors["flat"] == (np.dtype("float32"), ())
    for layout, order in ((sonic.Row, ""), (sonic.Flat, "L")):
        with pytest.raises(ConfigError, match=f"of several fields to be .*got '{order}'"):
            layout(["pt", "eta"], axis_order=order)


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 4000])
@pytest.mark.parametrize(
    "layout",
    [
        sonic.Padded(["pt", "pt"], 2),
        sonic.Padded("pt", 2, sort_by="pt", axis_order="LF"),
        sonic.Bucketed("pt", (2, 4)),
        sonic.Row("pt"),
    ],
)
def test_unpack_refuses_a_tensor_of_other_rows(layout: Any, rows: int) -> None:
    """Compiled code would read, and write, beyond its memory."""
    array = {"pt": ak.Array([1.0, 2.0, 3.0])} if isinstance(layout, sonic.Row) else JAGGED
    whole = layout.pack(array)
    tensor = np.zeros((rows, *whole.shape[1:]), np.float32)
    expected = f"expected a tensor of shape {list(whole.shape)}, .* got {list(tensor.shape)}"
    with pytest.raises(InputError, match=expected.replace("[", r"\[").replace("]", r"\]")):
        layout.unpack(tensor, array)
    with pytest.raises(InputError, match="expected a tensor of shape"):
        layout.unpack(whole[..., np.newaxis], array)


@pytest.mark.parametrize(
    ("first", "second"),
    [((2, 3, 2), (1, 3, 3)), ((2, 3, 2), (1, 3, 1)), ((2, 3), (1, 3, 4))],
)
def test_answers_for_constituents_are_all_of_one_kind(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    inputs = bind_inputs({"in": sonic.Padded("pt", 3)}, JAGGED)
    output = assemble("out", sonic.Output(per="constituent"), inputs)
    output.place(slice(0, 2), 2, {"out": np.zeros(first, np.float32)})
    with pytest.raises(ResponseError, match="before as float32"):
        output.place(slice(2, 3), 1, {"out": np.zeros(second, np.float32)})
    with pytest.raises(ResponseError, match="came back as float64"):
        output.place(slice(2, 3), 1, {"out": np.zeros((1, *first[1:]), np.float64)})


@pytest.mark.parametrize("feature", [sonic.Feature("x"), sonic.Feature("x", scale=2.0)])
@pytest.mark.parametrize("layout", [sonic.Padded, lambda f, n: sonic.Flat(f)])
def test_the_event_that_is_named_has_the_number_that_was_sent(layout: Any, feature: Any) -> None:
    """What was truncated is not sent, so that it may be anything."""
    lists = [[1.0, 2.0], [3.0], [4.0, np.inf]] if layout is not sonic.Padded else None
    array = ak.Array(lists or [[1.0, np.nan], [2.0], [np.inf, np.nan]])
    with pytest.raises(InputError, match="field 'x' is NaN or infinite in event 2"):
        layout(feature, 1).pack({"x": array})
