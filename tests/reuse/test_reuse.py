"""Duplicates, variations and rows whose scores are on disk are not sent, and score the same."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import resource
import sqlite3
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest
import xxhash
from tests.doubling import MODEL, double
from tests.layouts.test_proportional import peak
from tests.limits import limited
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.reuse import ScoreCache
from sonic_coffea.testing import FakeModel, FakeServer

PADDED = sonic.Model(
    "p",
    {"x": sonic.Bucketed(["pt"], (2, 4)), "mask": sonic.Mask(None)},
    {"y": ["sum"], "each": sonic.Output(None, per="constituent")},
)


def add(inputs: Any) -> dict[str, Any]:
    x = inputs["x"] * inputs["mask"]
    return {"y": x.sum(axis=2), "each": 3 * x.transpose(0, 2, 1)}


TEXT = sonic.Model("t", {"x": sonic.Row("pt")}, {"y": sonic.Output(["name"], dtype="string")})


def write(inputs: Any) -> dict[str, Any]:
    return {"y": np.char.mod("n%d", inputs["x"]).astype(object)}


def triple(inputs: Any) -> dict[str, Any]:
    return {"y": 3 * inputs["x"]}


ALONE = sonic.Model("alone", MODEL.inputs, MODEL.outputs, one_request_per="row")
X, Y = ({name: ("float32", (1,))} for name in "xy")  # without the axis of the rows


@pytest.fixture
def server() -> Iterator[FakeServer]:
    models = {
        "alone": FakeModel(inputs=X, outputs=Y, function=double, max_rows=0),
        "m": FakeModel.of(MODEL, double, max_rows=4, versions=("1", "2")),
        "p": FakeModel.of(PADDED, add, max_rows=4),
        "t": FakeModel.of(TEXT, write, max_rows=4),
    }
    with FakeServer(models) as running:
        yield running


@pytest.fixture
def pool(server: FakeServer) -> Iterator[Pool]:
    with Pool(Settings.make(server.url)) as one:
        yield one


def objects(numbers: Any) -> ak.Array:
    array = ak.values_astype(ak.Array(numbers), np.float32)
    there = ak.zip({"pt": ak.fill_none(array, 0)})
    return (
        ak.mask(there, ~ak.is_none(array, axis=-1)) if ak.any(ak.is_none(array, axis=-1)) else there
    )


def sent(server: FakeServer, model: str = "m") -> int:
    return server.statistics[model, "rows"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    models = {"p": FakeModel.of(PADDED, add, max_rows=4)}
    with FakeServer(models) as running, Pool(Settings.make(running.url)) as one:
        yield one


@pytest.mark.parametrize("cached", [False, True])
def test_rows_differ_whose_hashes_begin_alike(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Rows are sorted by half of a hash, and compared by all of it."""
    whole = xxhash.xxh3_128_digest
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: bytes(8) + whole(data)[8:])
    numbers = [[5, 6, 7, 6], [5, 8], [7]]
    with sonic.connect(server.url, cache=tmp_path / "scores" if cached else None) as pool:
        for _ in range(2):
            scores = MODEL(objects(numbers), pool=pool, deduplicate=True)
            assert scores.twice.tolist() == [[10, 12, 14, 12], [10, 16], [14]]


def test_rows_are_compared_without_a_copy_of_them_all() -> None:
    images = np.ones((16, 3, 512, 512), np.float32)  # a row is larger than a block of rows
    model = sonic.Model("m", {"x": sonic.Dense("image", shape=(3, 512, 512))}, {"y": ["mean"]})
    answers = FakeModel.of(model, lambda inputs: {"y": inputs["x"].mean(axis=(1, 2, 3))[:, None]})
    with FakeServer({"m": answers}) as server, Pool(Settings.make(server.url)) as pool:
        objects = ak.Array({"image": images})
        taken = peak(lambda: model(objects, pool=pool, deduplicate=True))
        assert sent(server) == 2
    assert taken < images.nbytes / 2


def test_variations_read_the_columns_of_the_model_alone(pool: Pool) -> None:
    """NanoAOD has hundreds, and a virtual array reads them from the file."""
    read: list[str] = []

    def buffer(key: str, data: Any) -> Any:
        return lambda: read.append(key) or data

    jets = ak.zip({"pt": [[1.0, 2.0], [3.0]], "eta": [[4.0, 5.0], [6.0]]})
    form, length, buffers = ak.to_buffers(ak.zip({"jets": jets, "muons": jets}, depth_limit=1))
    virtual = {key: buffer(key, data) for key, data in buffers.items()}
    model = sonic.Model("m", {"x": sonic.Row("jets.pt")}, MODEL.outputs)
    model.pack(ak.from_buffers(form, length, virtual))
    expected, read[:] = set(read), []
    events = ak.from_buffers(form, length, virtual)
    scores = model(sonic.Variations(nominal=events, up=events), pool=pool)
    assert scores["up"].twice.tolist() == [[2, 4], [6]]
    assert set(read) == expected
    # Such as the variations that coffea notes in the nominal jets.
    noted = ak.with_field(jets, ak.zip({"up": jets}), "systematics")
    scores = MODEL(sonic.Variations(nominal=noted, up=noted.systematics.up[["pt"]]), pool=pool)
    assert scores["up"].twice.tolist() == scores["nominal"].twice.tolist() == [[2, 4], [6]]


class Halved(ak.Array):
    """Jets whose pt is a property."""

    @property
    def pt(self) -> Any:
        return 2 * self.half


def test_variations_have_fields_in_any_order_and_methods(pool: Pool) -> None:
    fields = {"half": objects([[1], []]).pt, "eta": objects([[5], []]).pt}
    other = {"eta": fields["eta"], "half": 3 * fields["half"]}
    nominal, up = (
        ak.zip(each, with_name="jet", behavior={("*", "jet"): Halved}) for each in (fields, other)
    )
    # Their names may be numbers.
    pending = MODEL.submit(sonic.Variations({1: nominal, 2: up, 3: nominal}), pool=pool)
    assert "under 1, 2, 3" in repr(pending)
    assert {name: each.twice.tolist() for name, each in pending.result().items()} == {
        1: [[4], []],
        2: [[12], []],
        3: [[4], []],
    }
    assert pending.statistics.deduplicated == 1


ONE = objects([[1]])
THREE = objects([[1], [2], [3]])
OTHER = ak.zip({"eta": ONE.pt})
BOTH = {"nominal": ONE, "up": ONE}
UNEQUAL = {"nominal": objects([[1], [2]]), "up": objects([[3], [4], [5], [6]])}


def test_variations_with_other_metadata_are_refused_if_these_are_read(pool: Pool) -> None:
    model = sonic.Model("m", {"x": sonic.Row([sonic.Metadata("m_x")])}, {"y": ["twice"]})
    light, heavy = (ak.with_parameter(ONE, "metadata", {"m_x": m}) for m in (125, 250))
    assert model(sonic.Variations(nominal=heavy, up=heavy), pool=pool)["up"].twice.tolist() == [500]
    assert MODEL(sonic.Variations(light=light, heavy=heavy), pool=pool)["heavy"].twice.tolist()
    for up in (light, ONE):
        with pytest.raises(errors.InputError, match="different metadata, .* set the number"):
            model(sonic.Variations(nominal=heavy, up=up), pool=pool)
    # Such as the number of a block's last event, which objects of its events do not have.
    block = ak.with_parameter(ONE, "metadata", {"m_x": 250, "entrystop": 10})
    both = sonic.Variations(nominal=heavy, up=block)
    assert model(both, pool=pool)["up"].twice.tolist() == [500]


def test_inputs_of_variations_have_metadata_of_their_own(sonic_server: Any) -> None:
    """Jets that were made anew have none, unlike those of the events.

    In a block of a chunk, events say where it ends, and their objects where the chunk does.
    """
    year = sonic.Row([sonic.Metadata("year")])
    model = sonic.Model("m", {"jets": sonic.Row("pt"), "a": year, "b": year}, {"y": ["sum"]})
    sonic_server(model, functions={"m": lambda sent: {"y": sum(sent.values())}})
    made = ak.Array([{"pt": 1.0}])
    read, other, whole = (
        ak.with_parameter(made, "metadata", {"year": year, "entrystop": stop})
        for year, stop in ((8, 10), (9, 10), (8, 20))
    )
    nominal, up = ({"jets": jets, "a": read, "b": whole} for jets in (other, made))
    scores = model(sonic.Variations(nominal=nominal, up=up))
    assert [each["sum"].tolist() for each in scores.values()] == [[17], [17]]
    with pytest.raises(errors.InputError, match="different metadata, .* set the number"):
        model(sonic.Variations(nominal=nominal, up={**up, "a": other}))


def test_variations_are_refused_as_their_objects_are(pool: Pool) -> None:
    model = sonic.Model("model", {"x": sonic.Tokens({"Jet": sonic.Padded("x", 2)})}, {"y": ["a"]})
    jets = ak.Array([[{"x": 1.0}], [{"x": 2.0}, {"x": 3.0}]])
    events = ak.zip({"x": [9.0, 8.0], "Jet": jets}, depth_limit=1)
    for objects in (events, sonic.Variations(nominal=events, up=events)):
        with pytest.raises(errors.FieldError, match="'x' is one of the record and one of 'Jet'"):
            model(objects, pool=pool)


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        ({}, {}, "at least one variation"),
        ({"nominal": ONE, "up": OTHER}, {}, "variation 'up' has other fields .*: eta, pt; give"),
        ({"nominal": {"x": ONE}, "up": {"z": ONE}}, {}, "variation 'up' has other inputs"),
        ({"nominal": ONE, "up": None}, {}, "expected an array of each variation"),
        (BOTH, {"mask": {"nominal": [True]}}, "no mask for variation 'up'; there are"),
        (BOTH, {"mask": {"dwon": [True], **BOTH}}, "mask is of no variation 'dwon'"),
        (BOTH, {"mask": True}, "the masks: expected an array of each variation: .*got bool"),
        (BOTH, {"mask": "[true]"}, "the masks: expected an array of each variation: .*got str"),
        # As many in total would be scored by those of others.
        (UNEQUAL, {"version": [1, 2, 1]}, "'nominal' have .*'the objects' 2, 'the versions' 3"),
        (THREE, {"version": [1, 2]}, "a version for each of 3 events, got 2"),
        (THREE, {"version": [1.0, 2.0, 1.0]}, "version: expected a whole .*, got 3 . float64"),
        (THREE, {"version": [1, None, 2]}, "got None for some"),
    ],
)
def test_bad_variations_and_versions_are_refused(
    pool: Pool, array: Any, options: Any, message: str
) -> None:
    given = sonic.Variations(array) if isinstance(array, dict) else array
    with pytest.raises(errors.InputError, match=message):
        MODEL(given, pool=pool, **options)


def test_versions_are_of_events_or_of_all(server: FakeServer, pool: Pool) -> None:
    array, versions = objects([[1, 2], [1], [None, 4]]), ak.Array([1, 2, 2])
    for given in (versions, ak.to_numpy(versions), versions.tolist(), np.int64(2)):
        server.requests.clear()
        pending = MODEL.submit(array, pool=pool, version=given)
        assert pending.result().twice.tolist() == [[2, 4], [2], [None, 8]]
        sent = {r.version: r.inputs["x"].ravel().tolist() for r in server.requests}
        of_all = np.ndim(given) == 0
        assert sent == ({"2": [1, 2, 1, 4]} if of_all else {"1": [1, 2], "2": [1, 4]})
        assert pending.provenance()["model"] == "m"
        assert pending.provenance()["version"] == ("2" if of_all else "1, 2")
        assert {version for (_, _, version), _ in pending.statistics} == {*sent}


def test_variations_and_versions_without_data() -> None:
    """No server is asked: there is none."""
    events = ak.Array({"jets": objects([[1], [2]]), "fold": [1, 2]})
    tracer, report = ak.typetracer.typetracer_with_report(
        ak.forms.form_with_unique_keys(events.layout.form, ("events",)), highlevel=True
    )
    with Pool(Settings.make("grpc://127.0.0.1:9", retry_timeout_s=0.1)) as pool:
        varied = sonic.Variations(nominal=tracer.jets, up=tracer.jets)
        scores = MODEL(varied, pool=pool, version=tracer.fold)
        assert list(scores) == ["nominal", "up"]
        assert str(scores["up"].type.content) == "var * {twice: float32}"
        assert any("fold" in key for key in report.data_touched)
        with pytest.raises(errors.InputError, match="variation 'up' is not lazy, as others are"):
            MODEL(sonic.Variations(nominal=tracer.jets, up=events.jets), pool=pool)


def test_missing_versions_are_named(server: FakeServer, pool: Pool) -> None:
    with pytest.raises(errors.ModelNotFoundError, match="version 7.*it has version 1") as caught:
        MODEL(objects([[1], [2]]), pool=pool, version=ak.Array([1, 7]))
    assert (caught.value.server, caught.value.model) == (server.url, "m")
    pinned = sonic.Model("m", MODEL.inputs, {"y": ["twice"]}, version=1)
    with pytest.raises(errors.ConfigError, match="declared with version 1"):
        pinned(objects([[1]]), pool=pool, version=2)
    assert MODEL(objects([[1]]), pool=pool, version=2).twice.tolist() == [[2]]


# Scores on disk.


def kept(path: Path) -> int:
    """Return how many rows have scores in a file."""
    with contextlib.closing(sqlite3.connect(path / "scores")) as database:
        return int(database.execute("SELECT count(*) FROM scores").fetchone()[0])


def cached(server: FakeServer, path: Path, **options: Any) -> Pool:
    given = {"cache": path / "scores", "cache_trusts_versions": True, **options}
    return Pool(Settings.make(server.url, **given))


def test_only_new_rows_are_sent(server: FakeServer, tmp_path: Path) -> None:
    with cached(server, tmp_path) as pool:
        MODEL(objects([[1, 2], [3]]), pool=pool)
        assert sent(server) == 3
    with cached(server, tmp_path) as pool:
        pending = MODEL.submit(objects([[2, 4], [], [3, 3]]), pool=pool)
        scores = pending.result()
        assert scores.twice.tolist() == [[4, 8], [], [6, 6]]
        assert sent(server) == 4
        assert (pending.statistics.cache_hits, pending.statistics.deduplicated) == (2, 1)
        MODEL(objects([[4]]), pool=pool)
        assert (pool.statistics.objects, pool.statistics.cache_hits) == (5, 3)
        assert scores.attrs["sonic"]["version"] == "2"
        assert str(scores.type) == "3 * var * {twice: float32}"
        again = MODEL.submit(objects([[1]]), pool=pool)
        assert again.result().twice.tolist() == [[2]]
        assert again.result().attrs["sonic"]["version"] == "2"
        assert sent(server) == 4
    assert stat.S_IMODE((tmp_path / "scores").stat().st_mode) == 0o600


def say_file(server: FakeServer, digest: str, function: Any = double) -> None:
    """Have it serve a file."""
    server.models["m"] = dataclasses.replace(server.models["m"], digest=digest, function=function)


def test_other_servers_versions_and_files_have_other_scores(
    server: FakeServer, tmp_path: Path
) -> None:
    """The same number elsewhere may be another model, where versions are trusted."""
    with cached(server, tmp_path) as pool:
        MODEL(objects([[1]]), pool=pool)
    other = {"m": dataclasses.replace(server.models["m"], function=triple)}
    with FakeServer(other) as elsewhere, cached(elsewhere, tmp_path) as pool:
        assert MODEL(objects([[1]]), pool=pool).twice.tolist() == [[3]]
    server.statistics.clear()
    say_file(server, "one")
    with cached(server, tmp_path, cache_trusts_versions=False) as pool:
        MODEL(objects([[1]]), pool=pool, version=1)
        MODEL(objects([[1]]), pool=pool, version=1)
        assert sent(server) == 1
        MODEL(objects([[1]]), pool=pool, version=2)
        assert sent(server) == 2
        # The file of version 1 is replaced while the pool is open, and comes back.
        say_file(server, "two", triple)
        assert MODEL(objects([[1]]), pool=pool, version=1).twice.tolist() == [[3]]
        say_file(server, "one")
        assert MODEL(objects([[1]]), pool=pool, version=1).twice.tolist() == [[2]]
        assert sent(server) == 3


def test_scores_are_not_kept_for_the_servers_of_before(server: FakeServer, tmp_path: Path) -> None:
    other = dataclasses.replace(server.models["m"], function=triple)
    server.refuse("ModelInfer", grpc.StatusCode.UNAVAILABLE)
    with FakeServer({"m": other}) as elsewhere, cached(server, tmp_path) as pool:
        pending = MODEL.submit(objects([[1]]), pool=pool)
        pool.set_servers(elsewhere.url)
        assert pending.result().twice.tolist() == [[3]]
    server.accept("ModelInfer")
    with cached(server, tmp_path) as pool:
        assert MODEL(objects([[1]]), pool=pool).twice.tolist() == [[2]]


@pytest.mark.parametrize(("digest", "first"), [("", 2.0001), ("one", 2.0)])
def test_scores_of_a_fallback_are_not_kept(
    server: FakeServer, tmp_path: Path, digest: str, first: float
) -> None:
    """It may have another file, of which it says nothing; or of the same, round differently."""
    say_file(server, "one")
    near = dataclasses.replace(
        server.models["m"], digest=digest, function=lambda i: {"y": 2.0001 * i["x"]}
    )
    options = {"fallback_after_s": 0.1, "retry_timeout_s": 30, "cache_trusts_versions": False}
    with (
        FakeServer({"m": near}) as local,
        cached(server, tmp_path, fallback=lambda: local.url, **options) as pool,
    ):
        MODEL(objects([[1]]), pool=pool)
        server.stop()
        scores = MODEL.submit(objects([[1, 5]]), pool=pool)
        # Both rows are the fallback's if nobody says that what is kept is of the same file.
        assert scores.result().twice.tolist() == [pytest.approx([first, 10.0005])]
        assert {one for (one, *_), _ in scores.statistics} == {local.url}
    assert kept(tmp_path) == 1


def test_scores_that_are_not_kept_are_logged(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say_file(server, "one")
    with cached(server, tmp_path) as pool:
        scores = MODEL.submit(objects([[1]]), pool=pool)
        server.refuse("ModelConfig", grpc.StatusCode.PERMISSION_DENIED, "not any more")
        assert scores.result().twice.tolist() == [[2.0]]
    record = caplog.records[-1]
    assert record.getMessage().startswith(f"scores are not kept in {tmp_path / 'scores'}: ")
    assert "not any more" in record.getMessage()
    assert kept(tmp_path) == 0


def test_versions_without_a_file_are_not_trusted(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # It is said once in a process of each model.
    model = sonic.Model("without a file", MODEL.inputs, MODEL.outputs)
    server.models[model.name] = FakeModel.of(model, double)
    with cached(server, tmp_path, cache_trusts_versions=False) as pool:
        for _ in range(2):
            assert model(objects([[1]]), pool=pool).twice.tolist() == [[2]]
    assert sent(server, model.name) == 2
    (said,) = [message for message in caplog.messages if model.name in message]
    assert "its servers do not all say what file version '1' is" in said


@pytest.mark.parametrize("model", [MODEL, ALONE], ids=["m", "alone"])
def test_arrays_that_are_changed_meanwhile_are_not_kept(
    server: FakeServer, tmp_path: Path, model: sonic.Model
) -> None:
    """Their rows would have the keys of what they were, and the scores of what they are."""
    before, buffer = np.arange(40, dtype=np.float32), np.arange(40, dtype=np.float32)
    server.hold()
    with cached(server, tmp_path, max_in_flight=1) as pool:
        pending = model.submit(_one(buffer), pool=pool)
        until(lambda: bool(server.requests))
        buffer += 100
        server.release()
        with pytest.raises(errors.InputError, match="changed after the call") as caught:
            pending.result()
        assert caught.value.model == model.name
    with cached(server, tmp_path) as pool:
        assert model(_one(before), pool=pool).twice.tolist() == [(2 * before).tolist()]


def _one(numbers: Any) -> ak.Array:
    """Return an event with these objects, which reads their numbers where they are."""
    contents = ak.contents.RecordArray([ak.contents.NumpyArray(numbers)], ["pt"])
    return ak.Array(ak.contents.RegularArray(contents, len(numbers)))


def widen(answer: Any) -> None:
    """Give two values a row, in place of one."""
    answer.outputs[0].shape[1] *= 2
    answer.raw_output_contents[0] *= 2


def garble(answer: Any) -> None:
    """Give strings that are no UTF-8."""
    answer.raw_output_contents[0] = answer.raw_output_contents[0].replace(b"n", b"\xff")


@pytest.mark.parametrize("on_error", ["raise", "mask"])
@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        (MODEL, widen, "expected 1 values"),
        (TEXT, garble, "'y' came back with .*, expected strings"),
    ],
    ids=["width", "text"],
)
def test_refused_responses_are_not_kept(
    server: FakeServer, tmp_path: Path, model: sonic.Model, how: Any, message: str, on_error: str
) -> None:
    array = objects([[1, 2], [3]])
    with cached(server, tmp_path) as pool:
        server.answer_wrongly(how)
        if on_error == "mask":
            assert model(array, pool=pool, on_error="mask").tolist() == [[None, None], [None]]
        else:
            with pytest.raises(errors.ResponseError, match=message) as caught:
                model(array, pool=pool)
            assert (caught.value.server, caught.value.model) == (server.url, model.name)
        assert not (tmp_path / "scores").exists() or kept(tmp_path) == 0
        for _ in range(2):
            scores = model(array, pool=pool, on_error=on_error)
            assert scores[scores.fields[0]].tolist() in ([[2, 4], [6]], [["n1", "n2"], ["n3"]])
    assert kept(tmp_path) == 3
    assert sent(server, model.name) == 6


def test_scores_of_another_declaration_are_asked_again(server: FakeServer, tmp_path: Path) -> None:
    """The server lists no tensors, so that it decides which declaration is right."""
    both = sonic.Model("m", MODEL.inputs, {"y": ["twice", "thrice"]})
    answers = {"y": lambda x: np.hstack([2 * x, 3 * x])}
    server.models["m"] = FakeModel.of(
        both, lambda i: {"y": answers["y"](i["x"])}, lists_tensors=False
    )
    with cached(server, tmp_path) as pool:
        assert both(objects([[1]]), pool=pool).tolist() == [[{"twice": 2, "thrice": 3}]]
        assert MODEL(objects([[1]]), pool=pool, on_error="mask").tolist() == [[None]]
        with pytest.raises(errors.ResponseError, match="expected 1 values") as caught:
            MODEL(objects([[1]]), pool=pool)
        assert (caught.value.server, caught.value.model) == (server.url, "m")
        answers["y"] = lambda x: 2 * x
        assert MODEL(objects([[1]]), pool=pool).twice.tolist() == [[2]]


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(100, len(data)) :]


def zero(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(PAGE, len(data), PAGE)
    data[start : start + PAGE] = bytes(PAGE)


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 20, 500))):
        data[rng.randrange(PAGE, len(data))] ^= 1 << rng.randrange(8)


def alter(data: bytearray, rng: random.Random) -> None:
    """Change a score, three times the last row's number, by one bit."""
    data[data.index(np.float32(3 * 299).tobytes()) + rng.randrange(2)] ^= 1


def rename(data: bytearray, rng: random.Random) -> None:
    """As what SQLite says of a damaged schema is no UTF-8, Python raises a UnicodeDecodeError."""
    place = data.index(b"CREATE TABLE")
    data[place : place + 8] = bytes(rng.randrange(0xC0, 0x100) for _ in range(8))


def outdate(data: bytearray, _: random.Random) -> None:
    """Change the number of the form, which SQLite keeps for the user."""
    data[63] ^= 1


PAGE = 4096


@pytest.mark.parametrize("damage", [cut, zero, flip, alter, rename, outdate])
def test_damaged_files_cost_rows_and_no_scores(
    shared: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    settings = shared.settings.with_options(cache=tmp_path / "scores", cache_trusts_versions=True)
    array = objects([[[number, 1]] for number in range(300)])
    with Pool(settings) as pool:
        expected = PADDED(array, pool=pool).tolist()
        data = bytearray((tmp_path / "scores").read_bytes())
        damage(data, random.Random(0))
        (tmp_path / "scores").write_bytes(data)
        said = False
        # Some damage shows only when the rows that it hides have been written anew.
        for _ in range(6):
            said, _ = "is broken" in caplog.text or said, caplog.clear()
            pending = PADDED.submit(array, pool=pool)
            assert pending.result().tolist() == expected
            if pending.statistics.cache_hits == 300:
                break
        assert pending.statistics.cache_hits == 300
        assert not caplog.records
        assert said or damage in (zero, flip)  # which may cost rows, and no more


def another_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE precious (x)")


@pytest.mark.parametrize(
    "make",
    [another_database, lambda path: path.write_bytes(b"root\0\0" + bytes(1000)), os.mkfifo],
    ids=["database", "file", "pipe"],
)
def test_other_files_are_left_as_they_are(server: FakeServer, tmp_path: Path, make: Any) -> None:
    path = tmp_path / "scores"
    make(path)

    def state() -> Any:
        status, content = path.lstat(), path.read_bytes() if path.is_file() else b""
        return status.st_ino, status.st_mode, status.st_mtime_ns, content

    before = state()
    with cached(server, tmp_path) as pool:
        for _ in range(2):
            with pytest.raises(errors.ConfigError, match="got something else, which is left as it"):
                MODEL(objects([[1]]), pool=pool)
    assert state() == before
    assert list(tmp_path.iterdir()) == [path]
    assert sent(server) == 0


@pytest.mark.parametrize(
    ("suffix", "how"), [("", "group"), ("", "owner"), ("-wal", "others"), ("-journal", "group")]
)
def test_caches_that_others_could_write_are_refused(
    server: FakeServer, tmp_path: Path, how: str, suffix: str
) -> None:
    """SQLite reads a log beside the file, too."""
    with cached(server, tmp_path) as pool:
        MODEL(objects([[1]]), pool=pool)
    file = tmp_path / f"scores{suffix}"
    file.touch()
    if how != "owner":
        file.chmod(0o620 if how == "group" else 0o602)
    elif os.geteuid() == 0:
        os.chown(file, 4321, -1)
    else:
        pytest.skip("only root can give a file away")
    with (
        cached(server, tmp_path) as pool,
        pytest.raises(errors.ConfigError, match="expected a cache that only you can write, got"),
    ):
        MODEL(objects([[1]]), pool=pool)


def test_the_size_is_bounded(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path / "scores", 200_000)
    for number in range(40):
        keys = [number.to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(200)]
        cache.put([(keys, {"y": np.full((200, 4), number, np.float32)})])
    assert (tmp_path / "scores").stat().st_size < 400_000
    assert 100 < kept(tmp_path) < 8000
    ((found, scores),) = cache.get(keys)
    assert set(found) == set(keys)
    assert scores["y"].tolist() == [[39.0] * 4] * 200


def test_files_that_cannot_be_made_leave_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with limited(resource.RLIMIT_FSIZE, 8192):
        ScoreCache(tmp_path / "scores", 10**6).put([([b"key"], {"y": np.ones((1, 2), np.float32)})])
    assert "scores is not used: " in caplog.text
    assert list(tmp_path.iterdir()) == []


def fill(path: str, number: int) -> int:
    cache = ScoreCache(path, 10**8)
    for i in range(20):
        keys = [bytes([number, i, j]) + bytes(13) for j in range(50)]
        cache.put([(keys, {"y": np.full((50, 2), number, np.float32)})])
    hits = cache.get([bytes([number, i, 7]) + bytes(13) for i in range(20)])
    return sum(len(keys) for keys, _ in hits)


def fill_in_threads(path: str, number: int) -> int:
    with ThreadPoolExecutor(3) as threads:
        return sum(threads.map(partial(fill, path), range(3 * number, 3 * number + 3)))


@pytest.mark.server
def test_many_processes_and_their_threads_share_a_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as processes:
        tasks = [(str(tmp_path / "scores"), number) for number in range(6)]
        assert processes.starmap(fill_in_threads, tasks) == [60] * 6
    assert kept(tmp_path) == 18 * 20 * 50
