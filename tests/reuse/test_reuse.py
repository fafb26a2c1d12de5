"""Rows that are not sent: duplicates, variations, and those whose scores are on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import sqlite3
import stat
import threading
from typing import TYPE_CHECKING, Any

import awkward as ak
import grpc
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.reuse import ScoreCache
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})
PADDED = sonic.Model(
    "p",
    {"x": sonic.Bucketed(["pt"], (2, 4)), "mask": sonic.Mask(None)},
    {"y": ["sum"], "each": sonic.Output(None, per="constituent")},
)


def double(inputs: Any) -> dict[str, Any]:
    return {"y": 2 * inputs["x"]}


def add(inputs: Any) -> dict[str, Any]:
    x = inputs["x"] * inputs["mask"]
    return {"y": x.sum(axis=2), "each": 3 * x.transpose(0, 2, 1)}


def triple(inputs: Any) -> dict[str, Any]:
    return {"y": 3 * inputs["x"]}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    models = {
        "m": FakeModel.of(MODEL, double, max_rows=4, versions=("1", "2")),
        "p": FakeModel.of(PADDED, add, max_rows=4),
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


def test_rows_that_are_the_same_are_sent_once(server: FakeServer, pool: Pool) -> None:
    numbers = [[1, 2, 1], [], [None, 2], [3, 1, 1]]
    pending = MODEL.submit(objects(numbers), pool=pool, deduplicate=True)
    assert pending.result().twice.tolist() == [[2, 4, 2], [], [None, 4], [6, 2, 2]]
    assert sent(server) == 3
    statistics = pending.statistics
    assert (statistics.objects, statistics.deduplicated) == (7, 4)
    assert "deduplicated" in sonic.report(pending)._repr_html_()


@given(st.lists(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=4), max_size=8))
@example([[[1, 2], [1, 2, 0]], [], [[1, 2]]])
def test_the_same_scores_as_without(shared: Any, numbers: Any) -> None:
    """In every output, also where rows are of several lengths and some are truncated."""
    array = objects(ak.Array([[[0]], *numbers])[1:])
    one = PADDED(array, pool=shared)
    pending = PADDED.submit(array, pool=shared, deduplicate=True)
    other = pending.result()
    assert one.tolist() == other.tolist()
    rows = [tuple(row[:4]) for event in numbers for row in event]
    assert pending.statistics.deduplicated == len(rows) - len(set(rows))
    assert one.type == other.type


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    models = {"p": FakeModel.of(PADDED, add, max_rows=4)}
    with FakeServer(models) as running, Pool(Settings.make(running.url)) as one:
        yield one


def test_rows_that_are_lost_are_lost_wherever_they_are(server: FakeServer, pool: Pool) -> None:
    server.fail(grpc.StatusCode.INVALID_ARGUMENT, "no luck")
    numbers = [[5, 6], [5, 7], [6]]
    pending = MODEL.submit(objects(numbers), pool=pool, deduplicate=True, on_error="mask")
    assert pending.result().twice.tolist() == [[None, None], [None, None], [None]]
    assert pending.statistics.masked == 5
    until(lambda: pool.statistics.masked == 5)


def test_variations_travel_together(server: FakeServer, pool: Pool) -> None:
    nominal = objects([[10, 20], [30], []])
    up = objects([[10, 21], [30], []])
    down = objects([[20], [], []])  # another cut
    pending = MODEL.submit(sonic.Variations(nominal=nominal, up=up, down=down), pool=pool)
    scores = pending.result()
    assert list(scores) == ["nominal", "up", "down"]
    assert scores["nominal"].twice.tolist() == [[20, 40], [60], []]
    assert scores["up"].twice.tolist() == [[20, 42], [60], []]
    assert scores["down"].twice.tolist() == [[40], [], []]
    assert sent(server) == 4
    assert pending.statistics.deduplicated == 3
    assert pending.provenance()["model"] == "m"
    inputs = {name: {"x": array} for name, array in {"nominal": nominal, "up": up}.items()}
    assert MODEL(sonic.Variations(inputs), pool=pool)["up"].twice.tolist() == [[20, 42], [60], []]


def test_variations_that_are_not(pool: Pool) -> None:
    one = objects([[1]])
    with pytest.raises(errors.InputError, match="at least one variation"):
        MODEL(sonic.Variations(), pool=pool)
    with pytest.raises(errors.InputError, match="variation 'up' has other fields .*: eta"):
        MODEL(sonic.Variations(nominal=one, up=ak.with_field(one, one.pt, "eta")), pool=pool)
    with pytest.raises(errors.InputError, match="variation 'up' has other inputs"):
        MODEL(sonic.Variations(nominal={"x": one}, up={"z": one}), pool=pool)


def test_graphs_are_not_told_apart() -> None:
    graph = sonic.Model("g", {"x": sonic.Flat(["pt"])}, {"y": ["a"]})
    with (
        FakeServer({"g": FakeModel.of(graph, lambda x: {"y": x["x"]})}) as server,
        Pool(Settings.make(server.url)) as pool,
        pytest.raises(errors.ConfigError, match="rows of 'x' are not told apart"),
    ):
        graph(objects([[[1, 2]]]), pool=pool, deduplicate=True)


def folded(server: FakeServer) -> None:
    """Version 1 doubles, version 2 triples."""
    one, received = server.models["m"], server.requests

    def by_version(inputs: Any) -> Any:
        (mine,) = (request for request in received if request.inputs is inputs)
        return (triple if mine.version == "2" else double)(inputs)

    server.models["m"] = dataclasses.replace(one, function=by_version)


def test_each_event_by_its_version(server: FakeServer) -> None:
    folded(server)
    event = ak.Array([10, 11, 12, 13, 15])
    numbers = [[1, 2], [1], [], [None, 4, 5], [6]]
    with Pool(Settings.make(server.url, max_in_flight=1)) as pool:
        pending = MODEL.submit(objects(numbers), pool=pool, version=event % 2 + 1)
        assert pending.result().twice.tolist() == [[2, 4], [3], [], [None, 12, 15], [18]]
        assert pending.provenance()["version"] == "1, 2"
        assert {version for (_, _, version), _ in pending.statistics} == {"1", "2"}
        # With the same rows sent once for each version.
        before = sent(server)
        scores = MODEL(objects(numbers), pool=pool, version=event % 2 + 1, deduplicate=True)
        assert scores.twice.tolist() == [[2, 4], [3], [], [None, 12, 15], [18]]
        assert sent(server) - before == 6
        varied = sonic.Variations(a=objects(numbers), b=objects(numbers))
        for versions in (event % 2 + 1, ak.to_numpy(event % 2 + 1), (event % 2 + 1).tolist()):
            both = MODEL(varied, pool=pool, version=versions)
            assert both["b"].twice.tolist() == [[2, 4], [3], [], [None, 12, 15], [18]]
        assert MODEL(objects([[1]]), pool=pool, version=np.int64(2)).twice.tolist() == [[3]]
        by_object = ak.Array([[1, 2], [1], [], [2, 1, 2], [2]])
        scores = MODEL(objects(numbers), pool=pool, version=by_object)
        assert scores.twice.tolist() == [[2, 6], [2], [], [None, 8, 15], [18]]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (ak.Array([1, 2]), "a version for each of 3 events, got 2"),
        (ak.Array([1.0, 2.0, 1.0]), "versions as whole numbers, got 3 . float64"),
        (ak.Array([1, None, 2]), "got None for some"),
    ],
)
def test_versions_that_cannot_be(pool: Pool, version: Any, message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        MODEL(objects([[1], [2], [3]]), pool=pool, version=version)


def test_each_variation_has_an_event_for_each_version(pool: Pool) -> None:
    """As many in total would be scored by those of others."""
    varied = sonic.Variations(nominal=objects([[1], [2]]), up=objects([[3], [4], [5], [6]]))
    with pytest.raises(errors.InputError, match="variation 'nominal' has 2 events, .* 3 versions"):
        MODEL(varied, pool=pool, version=ak.Array([1, 2, 1]))


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


def test_a_version_that_is_not_there(server: FakeServer, pool: Pool) -> None:
    with pytest.raises(errors.ModelNotFoundError, match="version 7"):
        MODEL(objects([[1], [2]]), pool=pool, version=ak.Array([1, 7]))
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
        assert scores.attrs["sonic"]["version"] == "2"
        assert str(scores.type) == "3 * var * {twice: float32}"
        again = MODEL.submit(objects([[1]]), pool=pool)
        assert again.result().twice.tolist() == [[2]]
        assert sent(server) == 4
    assert stat.S_IMODE((tmp_path / "scores").stat().st_mode) == 0o600


def test_every_output_is_kept(server: FakeServer, tmp_path: Path) -> None:
    array = objects([[[1, 2, 3], [1]], [[5, 5, 5, 5, 5, 5]]])
    with cached(server, tmp_path) as pool:
        first = PADDED(array, pool=pool)
        before = sent(server, "p")
        again = PADDED(array, pool=pool)
        assert sent(server, "p") == before == 3
    assert first.tolist() == again.tolist()
    assert first.type == again.type


def say_file(server: FakeServer, digest: str, function: Any = double) -> None:
    """Have it serve a file."""
    server.models["m"] = dataclasses.replace(server.models["m"], digest=digest, function=function)


def test_other_versions_and_files_have_other_scores(server: FakeServer, tmp_path: Path) -> None:
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


def test_the_same_number_elsewhere_may_be_another_model(server: FakeServer, tmp_path: Path) -> None:
    """Where servers do not say which file it is, and their numbers are trusted."""
    with cached(server, tmp_path) as pool:
        MODEL(objects([[1]]), pool=pool)
    other = dataclasses.replace(server.models["m"], function=triple)
    with FakeServer({"m": other}) as elsewhere, cached(elsewhere, tmp_path) as pool:
        assert MODEL(objects([[1]]), pool=pool).twice.tolist() == [[3]]


def test_what_a_fallback_gave_is_not_kept(server: FakeServer, tmp_path: Path) -> None:
    """It may have another file, of which it says nothing."""
    say_file(server, "one")
    near = dataclasses.replace(
        server.models["m"], digest="", function=lambda i: {"y": 2.0001 * i["x"]}
    )
    options = {"fallback_after_s": 0.1, "retry_timeout_s": 30, "cache_trusts_versions": False}
    with (
        FakeServer({"m": near}) as local,
        cached(server, tmp_path, fallback=lambda: local.url, **options) as pool,
    ):
        MODEL(objects([[1]]), pool=pool)
        server.stop()
        scores = MODEL.submit(objects([[1, 5]]), pool=pool)
        # Both rows are the fallback's: nobody says that what is kept is of the same file.
        assert scores.result().twice.tolist() == [pytest.approx([2.0001, 10.0005])]
        assert {one for (one, *_), _ in scores.statistics} == {local.url}
    assert kept(tmp_path) == 1


def test_a_warning_tells_of_scores_that_are_not_kept(
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


def test_scores_of_a_type_that_awkward_lacks(tmp_path: Path) -> None:
    """They are float32, which has the same numbers, also if they come from the cache."""
    output = sonic.Output(["twice"], dtype="bfloat16")
    model = sonic.Model("b", {"x": sonic.Row("pt")}, {"y": output})
    served = FakeModel.of(model, lambda x: {"y": (2 * x["x"]).astype(output.dtype)})
    with FakeServer({"b": served}) as server:
        for _ in range(2):
            with cached(server, tmp_path) as pool:
                scores = model(objects([[1.0, 3.0], []]), pool=pool)
                assert scores.twice.tolist() == [[2.0, 6.0], []]
                assert str(ak.type(scores.twice)) == "2 * var * float32"
        assert server.statistics["b", "rows"] == 2


def test_a_deadline_does_not_wait_for_the_cache(tmp_path: Path) -> None:
    """It asks the server for its digest once more, which answers late."""
    asked, go_on = threading.Event(), threading.Event()
    in_time: list[bool] = []

    class Hesitant(FakeServer):
        def enter(self, method: str, headers: Mapping[str, str], context: Any) -> None:
            super().enter(method, headers, context)
            if method == "ModelConfig" and self.statistics["m", "rows"]:
                asked.set()
                in_time.append(go_on.wait(60))

    served = dataclasses.replace(FakeModel.of(MODEL, double, max_rows=4), digest="one")
    with Hesitant({"m": served}) as server, cached(server, tmp_path, max_in_flight=1) as pool:
        pending = MODEL.submit(objects([list(range(400))]), pool=pool)
        until(lambda: server.statistics["m", "rows"] >= 8)
        server.hold()
        with pytest.raises(errors.DeadlineError):
            pending.result(timeout_s=0.1)
        assert asked.wait(60)
        go_on.set()
        until(lambda: bool(in_time))
        assert all(in_time)
        server.release()


def test_a_version_without_a_file_is_not_trusted(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # It is said once in a process of each model.
    model = sonic.Model("without a file", MODEL.inputs, MODEL.outputs)
    server.models[model.name] = FakeModel.of(model, double)
    with cached(server, tmp_path, cache_trusts_versions=False) as pool:
        for _ in range(2):
            assert model(objects([[1]]), pool=pool).twice.tolist() == [[2]]
    assert sent(server, model.name) == 2
    assert len(caplog.records) == 1
    assert "its servers do not all say what file version '1' is" in caplog.text


@pytest.mark.parametrize("one_request_per", [None, "row"])
def test_arrays_that_are_changed_meanwhile_are_not_kept(
    server: FakeServer, tmp_path: Path, one_request_per: str | None
) -> None:
    """Their rows would have the keys of what they were, and the scores of what they are."""
    model = sonic.Model("m", MODEL.inputs, MODEL.outputs, one_request_per=one_request_per)
    before, buffer = np.arange(40, dtype=np.float32), np.arange(40, dtype=np.float32)
    server.hold()
    with cached(server, tmp_path, max_in_flight=1) as pool:
        pending = model.submit(_one(buffer), pool=pool)
        until(lambda: bool(server.requests))
        buffer += 100
        server.release()
        with pytest.raises(errors.InputError, match="changed since it was submitted") as caught:
            pending.result()
        assert caught.value.model == "m"
    with cached(server, tmp_path) as pool:
        assert model(_one(before), pool=pool).twice.tolist() == [(2 * before).tolist()]


def _one(numbers: Any) -> ak.Array:
    """Return an event with these objects, which reads their numbers where they are."""
    contents = ak.contents.RecordArray([ak.contents.NumpyArray(numbers)], ["pt"])
    return ak.Array(ak.contents.RegularArray(contents, len(numbers)))


TEXT = sonic.Model("t", {"x": sonic.Row("pt")}, {"y": sonic.Output(["name"], dtype="string")})


def widen(answer: Any) -> None:
    """Give two values a row, in place of one."""
    answer.outputs[0].shape[1] *= 2
    answer.raw_output_contents[0] *= 2


def garble(answer: Any) -> None:
    """Give strings that are no UTF-8."""
    answer.raw_output_contents[0] = answer.raw_output_contents[0].replace(b"n", b"\xff")


@pytest.fixture
def wrongly(server: FakeServer) -> FakeServer:
    server.models["t"] = FakeModel.of(
        TEXT, lambda i: {"y": np.char.mod("n%d", i["x"]).astype(object)}, max_rows=4
    )
    return server


@pytest.mark.parametrize("on_error", ["raise", "mask"])
@pytest.mark.parametrize(("model", "how"), [(MODEL, widen), (TEXT, garble)], ids=["width", "text"])
def test_a_refused_response_is_not_kept(
    wrongly: FakeServer, tmp_path: Path, model: sonic.Model, how: Any, on_error: str
) -> None:
    array = objects([[1, 2], [3]])
    with cached(wrongly, tmp_path) as pool:
        wrongly.answer_wrongly(how)
        if on_error == "mask":
            assert model(array, pool=pool, on_error="mask").tolist() == [[None, None], [None]]
        else:
            with pytest.raises(errors.ResponseError) as caught:
                model(array, pool=pool)
            assert (caught.value.server, caught.value.model) == (wrongly.url, model.name)
        assert not (tmp_path / "scores").exists() or kept(tmp_path) == 0
        for _ in range(2):
            scores = model(array, pool=pool, on_error=on_error)
            assert scores[scores.fields[0]].tolist() in ([[2, 4], [6]], [["n1", "n2"], ["n3"]])
    assert kept(tmp_path) == 3
    assert sent(wrongly, model.name) == 6


@pytest.mark.parametrize(("model", "how"), [(MODEL, widen), (TEXT, garble)], ids=["width", "text"])
def test_a_wrong_response_that_is_first_costs_its_rows_alone(
    wrongly: FakeServer, model: sonic.Model, how: Any
) -> None:
    wrongly.answer_wrongly(how)
    with Pool(Settings.make(wrongly.url, max_in_flight=1)) as pool:
        scores = model(objects([list(range(12))]), pool=pool, on_error="mask")
    assert ak.is_none(scores, axis=1).tolist() == [[True] * 4 + [False] * 8]


def test_what_another_declaration_kept_is_asked_again(server: FakeServer, tmp_path: Path) -> None:
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


def test_a_broken_file_is_begun_anew(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cached(server, tmp_path) as pool:
        MODEL(objects([[1]]), pool=pool)
        data = (tmp_path / "scores").read_bytes()
        (tmp_path / "scores").write_bytes(data[:PAGE] + b"no database" * 1000)
        for _ in range(3):
            assert MODEL(objects([[1]]), pool=pool).twice.tolist() == [[2]]
        assert "is broken" in caplog.text
    assert kept(tmp_path) == 1
    assert sent(server) <= 3


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(100, len(data)) :]


def zero(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(PAGE, len(data), PAGE)
    data[start : start + PAGE] = bytes(PAGE)


def swap(data: bytearray, rng: random.Random) -> None:
    one, other = (rng.randrange(PAGE, len(data), PAGE) for _ in range(2))
    parts = data[one : one + PAGE], data[other : other + PAGE]
    data[one : one + PAGE], data[other : other + PAGE] = parts[::-1]


def shift(data: bytearray, rng: random.Random) -> None:
    data.insert(rng.randrange(100, len(data)), 0)


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 20, 500))):
        data[rng.randrange(PAGE, len(data))] ^= 1 << rng.randrange(8)


def rename(data: bytearray, rng: random.Random) -> None:
    """As what SQLite says of a damaged schema is no UTF-8, Python raises a UnicodeDecodeError."""
    place = data.index(b"CREATE TABLE")
    data[place : place + 8] = bytes(rng.randrange(0xC0, 0x100) for _ in range(8))


PAGE = 4096


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("damage", [cut, zero, swap, shift, flip, rename])
def test_a_damaged_file_is_a_miss(
    shared: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, seed: int
) -> None:
    settings = shared.settings.with_options(cache=tmp_path / "scores", cache_trusts_versions=True)
    array = objects([[[number, 1]] for number in range(300)])
    with Pool(settings) as pool:
        expected = PADDED(array, pool=pool).tolist()
        data = bytearray((tmp_path / "scores").read_bytes())
        damage(data, random.Random(seed))
        (tmp_path / "scores").write_bytes(data)
        # Some damage shows only when the rows that it hides have been written anew.
        for _ in range(6):
            caplog.clear()
            pending = PADDED.submit(array, pool=pool)
            assert pending.result().tolist() == expected
            if pending.statistics.cache_hits == 300:
                break
        if damage is not swap:  # which may hide rows from SQLite for good
            assert pending.statistics.cache_hits == 300
            assert not caplog.records


def another_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE precious (x)")


@pytest.mark.parametrize(
    "make",
    [
        another_database,
        lambda path: path.write_bytes(b"root\0\0" + bytes(1000)),
        lambda path: path.write_bytes(b""),
        lambda path: path.mkdir(),
        os.mkfifo,
    ],
    ids=["database", "file", "empty", "folder", "pipe"],
)
def test_what_is_no_cache_is_left_as_it_is(server: FakeServer, tmp_path: Path, make: Any) -> None:
    path = tmp_path / "scores"
    make(path)
    before = path.lstat(), path.read_bytes() if path.is_file() else b""
    with cached(server, tmp_path) as pool:
        for _ in range(2):
            with pytest.raises(errors.ConfigError, match="got something else, which is left as it"):
                MODEL(objects([[1]]), pool=pool)
    after = path.lstat(), path.read_bytes() if path.is_file() else b""
    assert [(s.st_ino, s.st_mode, s.st_mtime_ns, data) for s, data in (before, after)] == [
        (before[0].st_ino, before[0].st_mode, before[0].st_mtime_ns, before[1])
    ] * 2
    assert list(tmp_path.iterdir()) == [path]
    assert sent(server) == 0


@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
@pytest.mark.parametrize("how", ["group", "others", "owner"])
def test_a_cache_that_others_could_write_is_refused(
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
    assert cache.get(keys)[keys[0]]["y"].tolist() == [39.0] * 4


def write(path: str, number: int) -> int:
    cache = ScoreCache(path, 10**8)
    for i in range(5):
        keys = [bytes([number, i, j]) + bytes(13) for j in range(50)]
        cache.put([(keys, {"y": np.full((50, 2), number, np.float32)})])
    return len(cache.get([bytes([number, i, 7]) + bytes(13) for i in range(5)]))


@pytest.mark.server
def test_many_processes_share_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as processes:
        tasks = [(str(tmp_path / "scores"), number) for number in range(4)]
        assert processes.starmap(write, tasks) == [5] * 4
    assert kept(tmp_path) == 4 * 5 * 50


def test_servers_with_other_files_of_a_version_are_refused(server: FakeServer) -> None:
    say_file(server, "one")
    with FakeServer(server.models) as same, Pool(Settings.make([server.url, same.url])) as pool:
        MODEL(objects([[1]]), pool=pool)
    other = {"m": dataclasses.replace(server.models["m"], digest="two")}
    with (
        FakeServer(other) as elsewhere,
        Pool(Settings.make([server.url, elsewhere.url])) as pool,
        pytest.raises(errors.ContractError, match="different models of this name"),
    ):
        MODEL(objects([[1]]), pool=pool)


def test_a_model_that_is_replaced_in_between_is_an_error(
    server: FakeServer, tmp_path: Path
) -> None:
    def change(inputs: Any) -> Any:
        say_file(server, "two")
        return double(inputs)

    say_file(server, "one", change)
    with cached(server, tmp_path) as pool:
        with pytest.raises(errors.ContractError, match="digest one .* and has two now"):
            MODEL(objects([[1]]), pool=pool)
        assert kept(tmp_path) == 0
        assert MODEL(objects([[1]]), pool=pool).twice.tolist() == [[2]]
    assert kept(tmp_path) == 1


def test_damage_is_noticed(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cached(server, tmp_path) as pool:
        MODEL(objects([[1, 2]]), pool=pool)
        database = sqlite3.connect(tmp_path / "scores")
        ((key, scores),) = database.execute("SELECT key, scores FROM scores LIMIT 1").fetchall()
        with database:
            worse = scores[:-1] + bytes([scores[-1] ^ 1])
            database.execute("UPDATE scores SET scores = ? WHERE key = ?", (worse, key))
        database.close()
        assert MODEL(objects([[1, 2]]), pool=pool).twice.tolist() == [[2, 4]]
        assert sent(server) == 3
        assert "1 damaged scores" in caplog.text
        assert MODEL(objects([[1, 2]]), pool=pool).twice.tolist() == [[2, 4]]
        assert sent(server) == 3
