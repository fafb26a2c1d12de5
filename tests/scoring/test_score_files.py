"""Files of events become one file of scores, whole or not at all, and what was scored is kept."""

from __future__ import annotations

import dataclasses
import importlib
import linecache
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from abc import ABC
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

import awkward as ak
import grpc
import numpy as np
import psutil
import pytest
import uproot
from tests.commands import json_of, run
from tests.dask.conftest import connected_cluster, local_cluster
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors, provenance
from sonic_coffea.demo.samples import DATA
from sonic_coffea.scoring._processor import Scoring
from sonic_coffea.testing import FakeModel, FakeServer

FILES = [DATA / "QCD_1.root", DATA / "TTbar_1.root"]
IDENTITY = ["run", "luminosityBlock", "event", "index"]
REFUSED = grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape"
# Of 64 rows a request, and some 700 jets a chunk.
IN_THE_SECOND_CHUNK = 18
SMALL: dict[str, Any] = {"collection": "FatJet", "chunksize": 400}
DECLARATION = """
model: mass
inputs:
  x:
    layout: Row
    fields: [pt, {name: mass, scale: 0.01}]
outputs:
  y: [qcd, top]
"""


MODEL = sonic.Model(
    "mass", {"x": sonic.Row(["pt", sonic.Feature("mass", scale=0.01)])}, {"y": ["qcd", "top"]}
)


def mass(inputs: dict[str, Any]) -> dict[str, Any]:
    """The scores are the numbers that were sent."""
    return {"y": inputs["x"]}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    tagger = sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")
    served = {"mass": FakeModel.of(MODEL, mass), "toptagger": FakeModel.of(tagger)}
    with (
        FakeServer(served) as fake,
        sonic.connect(fake.url, request_timeout_s=60, hedge_after_s=60),
    ):
        yield fake


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "jets.parquet"


@cache
def events() -> dict[str, Any]:
    names = ["run", "luminosityBlock", "event", "FatJet_pt", "FatJet_eta", "FatJet_mass"]
    parts = [uproot.open(path)["Events"].arrays(names) for path in FILES]
    return {name: ak.concatenate([part[name] for part in parts]) for name in names}


def is_right(scores: Any) -> None:
    """Compare with the files: each jet has the row of its run, block, event and index."""
    counts = ak.num(events()["FatJet_pt"])
    for name in IDENTITY[:3]:
        assert scores[name].tolist() == np.repeat(events()[name], counts).tolist()
    assert scores["index"].tolist() == ak.flatten(ak.local_index(events()["FatJet_pt"])).tolist()
    assert scores["qcd"].tolist() == ak.flatten(events()["FatJet_pt"]).tolist()
    expected = ak.flatten(events()["FatJet_mass"]) * 0.01
    np.testing.assert_allclose(scores["top"].tolist(), expected, rtol=1e-6)


def interrupt(
    server: FakeServer, model: Any, out: Path, every: int = IN_THE_SECOND_CHUNK, **options: Any
) -> None:
    """Score the first file until a request of the second chunk is refused."""
    server.fail(*REFUSED, every=every)
    with pytest.raises(errors.RequestError, match="unexpected shape"):
        sonic.score_files(model, FILES[0], out, **SMALL, **options)
    assert not out.exists()


def test_interrupted_runs_go_on(server: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "scores" / "jets.parquet"
    interrupt(server, MODEL, out)
    before = len(server.requests)
    written = sonic.score_files(MODEL, FILES, out, **SMALL)
    assert 0 < written.resumed < written.events
    assert len(server.requests) > before
    assert written.rows == written.scored == ak.count(events()["FatJet_pt"])
    is_right(ak.from_parquet(out))
    assert provenance.read(out)["models"][0]["model"] == "mass"
    assert [path.name for path in out.parent.iterdir()] == ["jets.parquet"]


def interrupted(out: Path, **served: Any) -> FakeModel:
    """Score the first chunk on a server with a model of its own, and fail in the second one."""
    served_model = dataclasses.replace(FakeModel.of(MODEL, mass), **served)
    # A request that is sent again would take the failure on itself.
    with FakeServer({"mass": served_model}) as server, sonic.connect(server.url, hedge_after_s=60):
        interrupt(server, MODEL, out)
    return served_model


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"versions": ("1",)}, {"versions": ("2",)}, "version 1 and version 2 of model mass"),
        ({"digest": "one"}, {"digest": "two"}, r"version 1 \(one\) and version 1 \(two\)"),
    ],
)
def test_scores_of_two_models_do_not_mix(first: Any, second: Any, message: str, out: Path) -> None:
    served = dataclasses.replace(interrupted(out, **first), **second)
    with FakeServer({"mass": served}) as server, sonic.connect(server.url):
        with pytest.raises(errors.ConfigError, match=message):
            sonic.score_files(MODEL, FILES[0], out, **SMALL)
        assert not out.exists()
        sonic.score_files(MODEL, FILES[0], out, resume=False, **SMALL)
    assert len(provenance.read(out)["models"]) == 1


def test_unknown_digests_of_a_chunk_are_in_the_file(out: Path) -> None:
    """A server that did not tell it for a moment makes no run start anew."""
    interrupted(out, digest="one")
    with FakeServer({"mass": FakeModel.of(MODEL, mass)}) as server, sonic.connect(server.url):
        sonic.score_files(MODEL, FILES[0], out, **SMALL)
    digests = {record["digest"] for record in provenance.read(out)["models"]}
    assert digests == {"one", None}


def test_workers_of_dask_write_root_files(server: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "jets.root"
    with connected_cluster(server.url, request_timeout_s=60) as (_, client, _):
        sonic.score_files(MODEL, FILES, out, collection="FatJet", client=client)
    with uproot.open(out) as file:
        is_right(file["Scores"].arrays())
    assert provenance.read(out)["models"][0]["model"] == "mass"


def test_trees_lack_no_row_that_has_a_score(sonic_server: Any, tmp_path: Path) -> None:
    """ROOT knows no None, such as the choice where the model leaves nothing to choose."""
    leading = sonic.Output(per="constituent", choose="argmax")
    inputs = {"x": sonic.Padded("constituents.pt", 4)}
    model = sonic.Model("leading", inputs, {"y": ["pt"], "leading": leading})

    def function(inputs: Any) -> Any:
        pt = inputs["x"][:, 0]
        return {"y": pt[:, :1], "leading": np.where(pt[:, :1] > 100.0, pt, -np.inf)}

    sonic_server(model, functions={"leading": function})
    table = tmp_path / "jets.parquet"
    everything = sonic.score_files(model, FILES[0], table, collection="FatJet")
    assert everything.scored == everything.rows
    assert ak.any(ak.is_none(ak.from_parquet(table).leading))
    with pytest.raises(errors.ConfigError, match="'leading' is None for objects that have a score"):
        sonic.score_files(model, FILES[0], tmp_path / "jets.root", collection="FatJet")


@pytest.mark.parametrize("suffix", [".parquet", ".root"])
def test_only_a_later_chunk_has_a_masked_row(
    server: FakeServer, suffix: str, tmp_path: Path
) -> None:
    out = tmp_path / f"jets{suffix}"
    server.fail(*REFUSED, every=IN_THE_SECOND_CHUNK)
    options = {**SMALL, "on_error": "mask"}
    written = sonic.score_files(MODEL, FILES[0], out, **options)
    assert 0 < written.rows - written.scored < 100
    if suffix == ".parquet":
        assert ak.sum(ak.is_none(ak.from_parquet(out).top)) == written.rows - written.scored


@pytest.mark.parametrize("least", [400.0, 1e6], ids=["some", "none"])
@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (sonic.Output(shape=(2,)), lambda x: x),
        (sonic.Output(dtype="string"), lambda x: x[:, :1].astype(int).astype("S")),
        (sonic.Output(shape=(), splits="ends"), lambda x: x[:, 0]),
    ],
    ids=["arrays", "strings", "lists"],
)
def test_chunks_have_none_in_place_of_any_score(
    output: sonic.Output, answer: Any, least: float, sonic_server: Any, out: Path
) -> None:
    """Neither chunks where all scores are None, nor those where some are, stop a run."""
    model = sonic.Model("any", MODEL.inputs, {"y": output})

    def function(inputs: Any) -> Any:
        return {"y": answer(inputs["x"]), "ends": np.arange(len(inputs["x"]) + 1)}

    def hard(events: Any) -> Any:
        return ak.mask(events.FatJet, events.FatJet.pt > least)

    sonic_server(model, functions={"any": function})
    options = {"collection": "FatJet", "features": hard, "keep": ["pt"], "chunksize": 100}
    written = sonic.score_files(model, FILES[0], out, **options)
    table = ak.from_parquet(out)
    assert len(table) == written.rows > written.scored
    assert (written.scored > 0) == (least < 1000)
    assert ak.all(ak.is_none(table.score) == (table.pt <= least))
    if output.shape == (2,):
        assert ak.all(ak.drop_none(table.score)[:, 0] == table.pt[table.pt > least])


def test_masked_chunks_of_an_unknown_form_go_with_others(tmp_path: Path, out: Path) -> None:
    """Where no server is, nobody says that each score is a list."""

    def jets(events: Any) -> Any:
        if not (tmp_path / "served").exists() and events.metadata["entrystart"]:
            raise KeyboardInterrupt
        return events.FatJet

    options = {**SMALL, "features": jets, "on_error": "mask"}
    with FakeServer({"mass": FakeModel.of(MODEL, mass)}) as server:
        server.stop()
        with sonic.connect(server.url, retry_timeout_s=0.01), pytest.raises(KeyboardInterrupt):
            sonic.score_files(LISTS, FILES[0], out, **options)
        server.start()
        (tmp_path / "served").touch()
        with sonic.connect(server.url):
            written = sonic.score_files(LISTS, FILES[0], out, **options)
    assert 0 < written.resumed < written.events
    scores = ak.from_parquet(out).score
    assert ak.sum(ak.is_none(scores)) == written.rows - written.scored > 0
    assert ak.all(ak.num(ak.drop_none(scores)) == 2)


OFFSET = 0.0


def shifted(by: float, events: Any) -> Any:
    return ak.with_field(events.FatJet, events.FatJet.mass + by, "mass")


def by_global(events: Any) -> Any:
    def nested() -> Any:
        return shifted(OFFSET, events)

    return nested()


def arrays(by: float) -> Any:
    """Where the array of another function was in memory, there is the next one's."""
    by_event = {"shift": [ak.Array([by])]}
    return lambda events: shifted(by_event["shift"][0][0], events)


def write_module(by: float) -> None:
    """Write a file as a user edits it, somewhere beside the function."""
    Path("shifts_by_day.py").write_text(
        f"# {by}\nfrom functools import wraps\n\n"
        "def shift(events): return events.FatJet.mass\n\n"
        "def shifting(function): return wraps(function)(lambda events: function(events))\n"
    )
    importlib.invalidate_caches()
    linecache.checkcache()


def by_imported(by: float) -> Any:
    """A function that imports another when it is called."""

    def imported(events: Any) -> Any:
        from shifts_by_day import shift  # type: ignore[import-not-found]

        return shift(events)

    write_module(by)
    return imported


def edited(by: float) -> Any:
    write_module(by)
    sys.modules.pop("shifts_by_day", None)
    return importlib.import_module("shifts_by_day")


@cache
def offset() -> float:
    return OFFSET


def by_cached(events: Any) -> Any:
    return shifted(offset(), events)


class Shifting(ABC):  # noqa: B024  of which dask cannot hash an attribute
    by = 0.0

    def __call__(self, events: Any) -> Any:
        return self.own(events)

    def own(self, events: Any) -> Any:
        return by_global(events)


def by_class(events: Any) -> Any:
    return shifted(Shifting.by, events)


def with_attribute(by: float, function: Any) -> Any:
    Shifting.by = by
    return function


def with_layout(by: float) -> sonic.Model:
    class Own(sonic.Row):
        shift = by

    return sonic.Model("mass", {"x": Own(["pt", "mass"])}, {"y": ["qcd", "top"]})


def with_global(by: float, function: Any) -> Any:
    globals()["OFFSET"] = by
    return function


@pytest.mark.parametrize(
    "options",
    [
        lambda by: {"features": lambda events: shifted(by, events)},
        lambda by: {"features": partial(shifted, by)},
        lambda by: {"features": with_global(by, by_global)},
        lambda by: {"features": with_global(by, by_cached)},
        lambda by: {"features": with_attribute(by, by_class)},
        lambda by: {"features": with_global(by, Shifting())},
        lambda by: {"features": with_global(by, Shifting().own)},
        lambda by: {"features": arrays(by)},
        lambda by: {"features": lambda events, own=(by,): shifted(own[0], events)},
        lambda by: {"features": by_imported(by)},
        lambda by: {"features": edited(by).shift},
        lambda by: {"features": edited(by).shifting(by_global)},
        lambda by: {"features": MethodType(shifted, by)},
        lambda by: {"features": None, "model": with_layout(by)},
        lambda by: {"features": None, "on_error": "mask" if by else "raise"},
        lambda by: {"features": None, "keep": iter(["eta"] if by else [])},
    ],
    ids=[
        *("closure", "partial", "global", "cached", "class", "object", "own method", "arrays"),
        *("numbers", "imported", "edited", "decorated", "method", "layout", "on_error", "keep"),
    ],
)
def test_chunks_of_other_options_have_other_files(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is resumed with chunks of the same declaration, function and options alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    first, same, other = (
        Scoring(**{"model": MODEL, "parts": tmp_path, "collection": "FatJet"} | options(by)).digest
        for by in (0.0, 0.0, 1.0)
    )
    assert first == same != other


def test_chunks_without_objects_have_no_version(server: FakeServer, out: Path) -> None:
    """A run that is resumed does not take them for another version's."""

    def features(events: Any) -> Any:
        wanted = 0.0 if events.metadata["entrystart"] else 1e9
        jets = events.FatJet
        return ak.mask(jets, jets.pt > wanted)

    interrupt(server, MODEL, out, every=3, features=features)
    written = sonic.score_files(MODEL, FILES[0], out, features=features, **SMALL)
    assert written.resumed > 0


def test_interrupted_runs_of_folds_that_are_versions_of_one_model_go_on(out: Path) -> None:
    pinned = [sonic.Model("mass", MODEL.inputs, MODEL.outputs, version=v) for v in (1, 2)]
    fake = FakeModel.of(MODEL, mass, versions=("1", "2"))
    with FakeServer({"mass": fake}) as server, sonic.connect(server.url, hedge_after_s=60):
        folds = sonic.Folds(pinned, fold="event % 2")
        interrupt(server, folds, out)
        assert sonic.score_files(folds, FILES, out, **SMALL).resumed > 0
    is_right(ak.from_parquet(out))


def test_models_of_pickles_have_their_own_servers(out: Path) -> None:
    with FakeServer({"mass": FakeModel.of(MODEL, mass)}) as server:
        with sonic.connect(server.url):
            model = pickle.loads(pickle.dumps(MODEL))
        for declared in (model, sonic.Folds([model, model], fold="event % 2")):
            assert sonic.score_files(declared, FILES, out, **SMALL).scored > 0
            is_right(ak.from_parquet(out))


@pytest.mark.usefixtures("server")
def test_functions_that_cannot_be_pickled_are_called_in_this_process(out: Path) -> None:
    lock = threading.Lock()

    def locked(events: Any) -> Any:
        with lock:
            return events.FatJet

    sonic.score_files(MODEL, FILES, out, features=locked, **SMALL)
    is_right(ak.from_parquet(out))


def of_fields(*fields: str) -> sonic.Model:
    return sonic.Model("mass", {"x": sonic.Padded(fields, 2)}, {"y": ["a", "b"]})


def by_mass(events: Any) -> Any:
    """Jets whose numbers are others than those of the file, in their order."""
    jets = shifted(1.0, events)
    return jets[ak.argsort(jets.mass, ascending=False)]


def of_event(events: Any) -> Any:
    return ak.zip({"pt": events.genWeight, "mass": events.genWeight})


def without_index(events: Any) -> Any:
    """Some of the jets, which do not say their place in the event."""
    jets = events.FatJet[events.FatJet.pt > 300]
    return ak.zip({"pt": jets.pt, "mass": jets.mass})


def swapped(events: Any) -> Any:
    """Jets of events of which two, with as many jets, are in each other's place."""
    order = np.arange(len(events))
    one, other = np.flatnonzero(ak.num(events.FatJet) == 2)[:2]
    order[[one, other]] = other, one
    return events[order].FatJet


LISTS = sonic.Model("mass", MODEL.inputs, {"y": None})
OF_EVENTS = sonic.Model("mass", {"x": sonic.Row(["genWeight", "run"])}, {"y": ["a", "b"]})
MISFIT = "expected a score for each FatJet"


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": of_event}, MISFIT),
        ({"features": lambda e: e.FatJet[e.FatJet.pt > 300]}, MISFIT),
        ({"features": lambda e: ak.mask(e.FatJet, e.event % 2 == 0)}, MISFIT),
        ({"features": without_index, "keep": ["pt"], "output": "jets.root"}, MISFIT),
        # awkward repeats the one of a list of length 1, and of an array of one event.
        ({"features": lambda e: of_event(e)[:, np.newaxis]}, MISFIT),
        ({"features": lambda e: of_event(e)[:1], "collection": None}, "a score for each event"),
        ({"features": lambda e: e.FatJet[:, ::-1]}, f"{MISFIT} in its place"),
        ({"features": lambda e: sonic.Request({"x": by_mass(e)})}, f"{MISFIT} in its place"),
        ({"features": swapped}, f"{MISFIT} in its place"),
        ({"features": lambda e: e[::-1], "collection": None}, "each event in its place"),
        ({"model": of_fields("part_deta")}, r"no field 'part_deta'; .* features= makes other"),
        ({"model": of_fields("pdgId")}, r"no field 'pdgId'; .*constituents.NAME is a field"),
        ({"model": of_fields("msoftdop")}, "did you mean 'msoftdrop'"),
        ({"collection": "FatJett"}, "no collection 'FatJett'; did you mean 'FatJet'"),
        ({"keep": ["pt", "msoftdop"]}, "keep: there is no field 'msoftdop'; did you mean 'msoftdr"),
        ({"features": "jets"}, "features: expected a function, got 'jets'"),
        ({"model": LISTS, "output": "jets.root"}, "'score' is no plain number.*write a .parq"),
        (
            {"model": OF_EVENTS, "collection": None, "keep": ["FatJet"], "output": "jets.root"},
            "'FatJet' is no plain number",
        ),
        ({"model": "mass"}, "expected a Model, Folds or Choice, got 'mass'"),
        # This counts within a chunk.
        (
            {"collection": "GenPart", "keep": ["genPartIdxMotherG"]},
            "no field 'genPartIdxMotherG'; did you mean 'genPartIdxMother'",
        ),
        ({"keep": ["pt", "pt"]}, "two columns are called 'pt'; .* or leave the field out of keep"),
        *(({"chunksize": n}, "expected at least 1 event, got") for n in (0, -1, np.nan, "400")),
    ],
)
def test_rows_that_cannot_be_scored_or_written_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    out = tmp_path / options.get("output", "jets.parquet")
    with pytest.raises(errors.SonicError, match=message):
        sonic.score_files(**{"model": MODEL, "files": FILES[0], **SMALL, **options, "output": out})
    assert not out.exists()


@pytest.mark.usefixtures("server")
def test_events_without_numbers_are_refused_in_one_line(tmp_path: Path) -> None:
    with uproot.recreate(tmp_path / "flat.root") as file:
        file.mktree("Events", {"run": "i4", "pt": "f4", "mass": "f4"})
        file["Events"].extend(
            {"run": np.ones(3, "i4"), **dict.fromkeys(("pt", "mass"), np.ones(3))}
        )
    with pytest.raises(errors.FieldError, match=r"^flat.root has no luminosityBlock, event, which"):
        sonic.score_files(MODEL, tmp_path / "flat.root", tmp_path / "scores.parquet")


FOLDED = [
    sonic.Model(f"fold_{k}", {"x": sonic.Row(["pt", "mass"])}, {"y": ["qcd", "top"]})
    for k in range(3)
]


@pytest.fixture
def folded(sonic_server: Any) -> Any:
    """Fold k gives pt + 1000 k."""
    functions = {
        fold.name: lambda inputs, k=k: {"y": inputs["x"] + np.float32(1000 * k)}
        for k, fold in enumerate(FOLDED)
    }
    return sonic_server(*FOLDED, functions=functions)


def test_folds_score_files(folded: FakeServer, out: Path) -> None:
    counts = ak.num(events()["FatJet_pt"])
    pt = ak.flatten(events()["FatJet_pt"])
    number = np.repeat(events()["event"], counts) % 3
    by_field = sonic.Folds(FOLDED, fold="event % 3")
    interrupt(folded, by_field, out)
    written = sonic.score_files(by_field, FILES, out, **SMALL)
    assert written.resumed > 0
    assert written.scored == len(pt)
    np.testing.assert_allclose(ak.from_parquet(out).qcd, pt + 1000 * number, rtol=1e-6)
    models = {(record["model"], record["version"]) for record in provenance.read(out)["models"]}
    assert models == {(f"fold_{k}", "1") for k in range(3)}

    def later(events: Any) -> Any:
        return sonic.Request(events.FatJet, fold=ak.mask(events.event % 3, events.event > 3))

    some = sonic.score_files(sonic.Folds(FOLDED), FILES, out, features=later, **SMALL)
    assert some.rows == len(pt)
    scores = ak.from_parquet(out)
    assert ak.is_none(scores.qcd).tolist() == (scores.event <= 3).tolist()


CHOICE = """
import sonic_coffea as sonic

def model(name):
    return sonic.Model(name, {"x": sonic.Row(["pt", "mass"])}, {"y": ["qcd", "top"]})

CHOICE = sonic.Choice({0: model("fold_0"), 1: model("fold_2")}, by="event % 2")
"""


def test_command_takes_choices(folded: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "analysis.py").write_text(CHOICE)
    arguments = ["score", FILES[0], "--collection", "FatJet", "--server", folded.url]
    arguments += ["-o", "jets.parquet", "--declare", "analysis.py:CHOICE"]
    json_of(*arguments, cwd=tmp_path)
    scores = ak.from_parquet(tmp_path / "jets.parquet")
    pt = ak.flatten(uproot.open(FILES[0])["Events"]["FatJet_pt"].array())
    np.testing.assert_allclose(scores.qcd, pt + 2000 * (scores.event % 2), rtol=1e-6)
    done = run(*arguments, "--model", "m", cwd=tmp_path)
    assert done.returncode == 2
    assert "--model and --version are of one Model" in done.stderr


# Each chunk waits until another process has one, too.
MEETING = """
import os, time
from pathlib import Path

def jets(events):
    Path(f"{os.getpid()}.worker").touch()
    while len(list(Path().glob("*.worker"))) < 2:
        time.sleep(0.01)
    return events.FatJet
"""


@pytest.fixture
def arguments(server: FakeServer, tmp_path: Path) -> list[Any]:
    """Of the command, which scores both files with a declaration beside them."""
    (tmp_path / "mass.yaml").write_text(DECLARATION)
    given = ["score", *FILES, "--declare", "mass.yaml", "--collection", "FatJet"]
    return [*given, "--server", server.url, "-o", "jets.parquet"]


@pytest.mark.server
def test_the_command_has_workers(arguments: list[Any], tmp_path: Path) -> None:
    (tmp_path / "analysis.py").write_text(MEETING)
    json_of(*arguments, "--features", "analysis:jets", "--workers", "2", cwd=tmp_path)
    workers = {path.stem for path in tmp_path.glob("*.worker")}
    assert len(workers - {str(os.getpid())}) == 2
    is_right(ak.from_parquet(tmp_path / "jets.parquet"))


def test_the_command_masks_keeps_and_restarts(
    server: FakeServer, arguments: list[Any], tmp_path: Path
) -> None:
    server.fail(*REFUSED, times=2)
    said = json_of(*arguments, "--mask", "--keep", "eta", "--keep", "phi", cwd=tmp_path)
    scores = ak.from_parquet(tmp_path / "jets.parquet")
    assert scores.fields == [*IDENTITY, "eta", "phi", "qcd", "top"]
    assert scores.eta.tolist() == ak.flatten(events()["FatJet_eta"]).tolist()
    assert said["rows"] == len(scores) > said["scored"] > 0
    assert said["scored"] == len(scores) - ak.sum(ak.is_none(scores.top))
    arguments += ["--chunksize", "400", "--json"]
    server.fail(*REFUSED, every=IN_THE_SECOND_CHUNK)
    kept, error = run(*arguments, cwd=tmp_path).stderr.splitlines()
    assert kept == "WARNING: scored chunks are kept (1); the same call scores the rest"
    assert "unexpected shape" in error
    assert json_of(*arguments, "--restart", cwd=tmp_path)["resumed"] == 0


def test_the_command_scores_constituents(server: FakeServer, tmp_path: Path) -> None:
    arguments = ["--model", "toptagger", "--collection", "FatJet", FILES[0]]
    arguments += ["--weaver", DATA / "toptagger.preprocess.json", "--server", server.url]
    arguments += ["--features", "sonic_coffea.demo.analysis:toptagger_inputs"]
    said = json_of("score", *arguments, "-o", tmp_path / "jets.parquet")
    scores = ak.from_parquet(tmp_path / "jets.parquet")
    assert scores.fields == [*IDENTITY, "QCD", "Top"]
    assert said["rows"] == len(scores)
    assert said["scored"] == len(scores) - ak.sum(ak.is_none(scores.Top)) > 500


@pytest.mark.server
def test_killed_commands_go_on(server: FakeServer, arguments: list[Any], tmp_path: Path) -> None:
    arguments += ["--chunksize", "400"]
    release = threading.Event()
    server.inject(lambda *_: release.wait(100), every=IN_THE_SECOND_CHUNK, times=100)
    process = subprocess.Popen(
        [sys.executable, "-m", "sonic_coffea", *map(str, arguments)], cwd=tmp_path
    )
    try:
        done = tmp_path.joinpath(".jets.parquet.parts").glob
        until(lambda: any(done("*.parquet")) or process.poll() is not None)
    finally:
        process.kill()
        release.set()
    assert process.wait() == -signal.SIGKILL
    assert 0 < json_of(*arguments, cwd=tmp_path)["resumed"] < len(events()["run"])
    is_right(ak.from_parquet(tmp_path / "jets.parquet"))


@pytest.mark.server
def test_interrupts_end_commands_whose_workers_start(arguments: list[Any], tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to all processes; only that of the command takes it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sonic_coffea", *map(str, [*arguments, "--workers", "2"])],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def has_worker() -> bool:
        children = (p.info for p in psutil.process_iter(["cmdline", "ppid"]))
        return any(p["ppid"] == process.pid and "spawn_main" in str(p["cmdline"]) for p in children)

    until(has_worker)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")


FEATURES = """
def jets(events):
    return events.FatJet

def lost(events):
    import nowhere
"""


@pytest.mark.server
def test_workers_elsewhere_have_no_module_of_the_user(arguments: list[Any], tmp_path: Path) -> None:
    with local_cluster(1, local_directory=tmp_path) as cluster:
        arguments += ["--scheduler", cluster.scheduler_address]
        # Written after the workers have begun: these cannot import it.
        (tmp_path / "analysis.py").write_text(FEATURES)
        json_of(*arguments, "--features", "analysis:jets", cwd=tmp_path)
        arguments += ["--json", "--features"]  # without coffea's progress
        lost = run(*arguments, "analysis:lost", cwd=tmp_path)
        wrong = run(*arguments, "analysis:jets", "--keep", "mas", cwd=tmp_path)
    is_right(ak.from_parquet(tmp_path / "jets.parquet"))
    assert lost.returncode == 2
    assert "error: workers have no module 'nowhere': pip install nowhere" in lost.stderr
    assert "Traceback" not in lost.stderr
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[-1].startswith("error: keep: there is no field 'mas'; did you")


@pytest.mark.parametrize("how", ["group", "others", "owner"])
def test_chunks_that_others_could_write_are_not_taken(
    server: FakeServer, tmp_path: Path, how: str
) -> None:
    parts = tmp_path / ".jets.parquet.parts"
    parts.mkdir()
    (parts / "chunk.parquet").touch()
    parts.chmod({"group": 0o770, "others": 0o707, "owner": 0o700}[how])
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    if how == "owner":
        os.chown(parts, 4321, -1)
    score = partial(
        sonic.score_files, MODEL, FILES[0], tmp_path / "jets.parquet", collection="FatJet"
    )
    with pytest.raises(errors.ConfigError, match="may be of other users"):
        score()
    assert [path.name for path in parts.iterdir()] == ["chunk.parquet"]
    assert score(resume=False).resumed == 0


def test_chunks_are_kept_where_others_cannot_write(server: FakeServer, out: Path) -> None:
    modes = []
    parts = out.with_name(".jets.parquet.parts")
    server.inject(lambda *_: modes.append(parts.stat().st_mode & 0o777))
    before = os.umask(0)
    try:
        sonic.score_files(MODEL, FILES[0], out, collection="FatJet")
    finally:
        os.umask(before)
    assert modes == [0o755]


def test_folders_that_workers_do_not_see_are_named(server: FakeServer, tmp_path: Path) -> None:
    def elsewhere(events: Any) -> Any:
        shutil.rmtree(tmp_path / ".jets.parquet.parts", ignore_errors=True)
        return events.FatJet

    with pytest.raises(errors.ConfigError, match="all workers have to see the folder"):
        sonic.score_files(MODEL, FILES[0], tmp_path / "jets.parquet", features=elsewhere)


def test_what_is_read_is_not_written_to(server: FakeServer, tmp_path: Path) -> None:
    file, link = tmp_path / "events.root", tmp_path / "link.root"
    shutil.copy(FILES[0], file)
    link.symlink_to(file)
    for read, output in ((file, file), (file, link), (file.as_uri(), file)):
        with pytest.raises(errors.ConfigError, match="is a file that is read"):
            sonic.score_files(MODEL, read, output, **SMALL)
    with pytest.raises(errors.ConfigError, match="was not written by this package"):
        sonic.score_files(MODEL, FILES[1], file, **SMALL)  # a file that is meant to be read
    assert file.read_bytes() == FILES[0].read_bytes()
    assert sorted(tmp_path.iterdir()) == [file, link]
    own = tmp_path / "histograms.root"  # of a user, with the provenance of its scores
    with uproot.recreate(own) as histograms:
        histograms["top"] = np.histogram([1.0])
        provenance.to_root(histograms, MODEL(ak.Array([{"pt": 1.0, "mass": 1.0}])))
    with pytest.raises(errors.ConfigError, match="was not written by this package"):
        sonic.score_files(MODEL, FILES[1], own, **SMALL)


@pytest.mark.usefixtures("server")
def test_files_that_come_meanwhile_are_not_written_to(out: Path) -> None:
    def others(events: Any) -> Any:
        out.write_text("of another program")
        return events.FatJet

    options = {"collection": "FatJet", "features": others}
    with pytest.raises(errors.ConfigError, match="was not written by this package"):
        sonic.score_files(MODEL, FILES[0], out, **options)
    assert out.read_text() == "of another program"


@pytest.mark.parametrize("damage", ["cut off", "other bits"])
def test_broken_chunks_are_scored_anew_on_demand(out: Path, damage: str) -> None:
    interrupted(out)
    (chunk,) = out.with_name(f".{out.name}.parts").iterdir()
    content = bytearray(chunk.read_bytes())
    if damage == "cut off":
        del content[-100:]
    else:
        content[len(content) // 4] ^= 1
    chunk.write_bytes(content)
    with FakeServer({"mass": FakeModel.of(MODEL, mass)}) as server, sonic.connect(server.url):
        with pytest.raises(errors.ConfigError, match=r"cannot read .* use --restart"):
            sonic.score_files(MODEL, FILES[0], out, **SMALL)
        written = sonic.score_files(MODEL, FILES[0], out, **SMALL, resume=False)
    assert (written.resumed, written.scored) == (0, written.rows)


def test_chunks_that_cannot_be_removed_are_refused(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were taken for those of a run that scores all anew."""
    parts = out.with_name(f".{out.name}.parts")
    parts.symlink_to(tmp_path)
    with FakeServer({"mass": FakeModel.of(MODEL, mass)}) as server, sonic.connect(server.url):
        for resume in (True, False):
            with pytest.raises(errors.ConfigError, match="can be removed"):
                sonic.score_files(MODEL, FILES[0], out, **SMALL, resume=resume)
        parts.unlink()
        parts.mkdir()
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as of another user's files
        with pytest.raises(errors.ConfigError, match="can be removed"):
            sonic.score_files(MODEL, FILES[0], out, **SMALL, resume=False)


@pytest.mark.usefixtures("server")
def test_files_that_were_replaced_are_scored_whole(tmp_path: Path, out: Path) -> None:
    """Though coffea has read another file at the same path."""
    for replaced in FILES:  # the second has more events
        shutil.copy(replaced, tmp_path / "events.root")
        written = sonic.score_files(MODEL, tmp_path / "events.root", out, collection="FatJet")
        with uproot.open(replaced) as file:
            assert written.events == file["Events"].num_entries


def read_whole(events: Any) -> None:
    """Read all that is needed of a chunk."""
    ak.materialize(ak.zip({name: events[name] for name in IDENTITY[:3]}))
    ak.materialize(events.FatJet[["pt", "mass"]])


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("write", [sonic.score_files, sonic.scoring.export_files])
@pytest.mark.parametrize("when", ["between chunks", "within a chunk"])
def test_files_that_change_while_they_are_read_are_refused(
    tmp_path: Path, out: Path, write: Any, when: str
) -> None:
    """Their chunks would be of two files, and one of them may come back."""
    path, new = tmp_path / "events.root", tmp_path / "new.root"
    shutil.copy(FILES[0], path)
    shutil.copy(FILES[1], new)

    def jets(events: Any) -> Any:
        if new.exists():
            if when == "between chunks":
                read_whole(events)
            new.replace(path)
        return events.FatJet

    with pytest.raises(errors.ConfigError, match="changed while they were read, .*events.root"):
        write(MODEL, [path], out, features=jets, **SMALL)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.usefixtures("server")
def test_chunks_of_files_that_changed_are_not_resumed(tmp_path: Path, out: Path) -> None:
    """They are named after the first file, which may come back."""
    path, old, new = (tmp_path / f"{name}.root" for name in ("events", "old", "new"))
    shutil.copy(FILES[0], path)
    shutil.copy(FILES[1], new)

    def jets(events: Any) -> Any:
        if new.exists():
            read_whole(events)
            path.rename(old)
            new.rename(path)
        elif old.exists() and events.metadata["entrystart"] > 300:
            raise KeyboardInterrupt
        return events.FatJet

    how: dict[str, Any] = {"features": jets, "collection": "FatJet", "chunksize": 200}
    with pytest.raises(KeyboardInterrupt):
        sonic.score_files(MODEL, path, out, **how)
    old.rename(path)
    sonic.score_files(MODEL, path, out, **how)
    with uproot.open(FILES[0]) as file:
        expected = ak.flatten(file["Events"]["FatJet_pt"].array())
    assert ak.from_parquet(out).qcd.tolist() == expected.tolist()


def test_chunks_of_files_that_were_updated_are_not_resumed(
    server: FakeServer, tmp_path: Path, out: Path
) -> None:
    """An update leaves a file its uuid."""
    path = shutil.copy(FILES[0], tmp_path / "events.root")
    server.fail(*REFUSED, every=IN_THE_SECOND_CHUNK)
    with pytest.raises(errors.RequestError, match="unexpected shape"):
        sonic.score_files(MODEL, path, out, **SMALL)
    with uproot.update(path) as file:
        file["note"] = "updated"
    assert sonic.score_files(MODEL, path, out, **SMALL).resumed == 0


@pytest.mark.usefixtures("server")
def test_files_of_another_inode_are_the_same_if_as_old(tmp_path: Path, out: Path) -> None:
    """File systems such as sshfs forget the inodes of files, and give them others."""
    path, copied = tmp_path / "events.root", tmp_path / "copy.root"
    shutil.copy(FILES[0], path)
    shutil.copy2(path, copied)

    def jets(events: Any) -> Any:
        if copied.exists():
            copied.replace(path)
        return events.FatJet

    assert sonic.score_files(MODEL, path, out, features=jets, **SMALL).rows


@pytest.mark.usefixtures("server")
def test_paths_that_coffea_does_not_take_are_named(tmp_path: Path, out: Path) -> None:
    shutil.copy(FILES[0], tmp_path / "müon.root")
    with pytest.raises(errors.ConfigError, match="only files whose path is ASCII, got .*müon.root"):
        sonic.score_files(MODEL, tmp_path / "müon.root", out, **SMALL)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["-o", "jets.csv"], 2, "ends in .parquet or .root, got 'jets.csv'"),
        (["--collection", "FatJets"], 1, "no collection 'FatJets'; did you mean 'FatJet'"),
        (["nowhere.root"], 2, "no file"),
        (["--weaver", DATA / "toptagger.preprocess.json"], 2, "either --weaver or --declare"),
        (["--labels", FILES[0]], 2, "--labels belongs to --weaver"),
        (["--server", "http://server"], 2, "Triton's HTTP endpoint"),
        (["--features", "nowhere.py:jets"], 2, "--features: no file 'nowhere.py'"),
    ],
)
def test_bad_commands_are_refused_in_one_line(
    options: list[Any], code: int, message: str, arguments: list[Any], tmp_path: Path
) -> None:
    done = run(*arguments, *options, "--json", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mass.yaml"]


def test_threads_that_score_at_the_same_time_give_standard_output_back(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that began first ends first."""
    first_began, second_began, first_ended = (threading.Event() for _ in range(3))

    def first(events: Any) -> Any:
        first_began.set()
        assert second_began.wait(60)
        return events.FatJet

    def second(events: Any) -> Any:
        second_began.set()
        assert first_ended.wait(60)
        return events.FatJet

    def score(features: Any) -> None:
        path = tmp_path / f"{features.__name__}.parquet"
        sonic.score_files(MODEL, FILES, path, collection="FatJet", features=features)

    before = sys.stdout
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(score, first)
        assert first_began.wait(60)
        last = threads.submit(score, second)
        running.result()
        first_ended.set()
        last.result()
    assert sys.stdout is before
    assert capsys.readouterr().out == ""
    for name in ("first", "second"):
        is_right(ak.from_parquet(tmp_path / f"{name}.parquet"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inputs: [", "cannot read .*model.yaml as YAML: while parsing"),
        ("model: m\ninput: {}", "no key 'input'; did you mean 'inputs'"),
        (DECLARATION.replace("scale", "scale: 1, scale"), "key 'scale' is given twice.* line 6"),
        (DECLARATION.replace("  y:", "  y: [a]\n  y:"), "as YAML: key 'y' is given twice"),
        (DECLARATION.replace("Row", "Rows"), "input 'x': no layout 'Rows'; did you mean 'Row'"),
        (DECLARATION.replace("fields", "field"), "input 'x': Row got an unexpected keyword"),
        (DECLARATION.replace("scale", "scales"), "input 'x': Feature got an unexpected keyword"),
        (DECLARATION.replace("model: mass", ""), "expected the model's name"),
        (DECLARATION.replace("  y:", "  0:"), "model 'mass': expected names as str, got 0"),
        (
            DECLARATION.partition("  y:")[0] + "  y: [yes, no]",
            "yaml, output 'y': Output: expected l",
        ),
        ("model: m\ninputs: 3", "inputs: expected keys and values, got 3"),
    ],
)
def test_bad_declarations_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match=message):
        sonic.Model.from_yaml(path)
    with pytest.raises(errors.ConfigError, match=r"cannot read .*nowhere as YAML: .*No such file"):
        sonic.Model.from_yaml(tmp_path / "nowhere")


def test_declarations_nest(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        """
        inputs:
          tokens:
            layout: Tokens
            parts:
              Jet: {layout: Padded, fields: [pt, {name: flavour, values: [1, 2]}], length: 4}
              MET: {layout: Row, fields: [pt, 0, 0]}
          mask: {layout: Mask, length: 3, of: Jet.pt}
        outputs:
          y: {labels: [a, b], per: row}
          z:
        version: 2
        priority: 1
        server_timeout_s: 0.5
        """
    )
    declared = sonic.Model.from_yaml(path, "m")
    met, flavour = sonic.Row(["pt", 0, 0]), sonic.OneHot("flavour", (1, 2))
    tokens = sonic.Tokens({"Jet": sonic.Padded(["pt", flavour], 4), "MET": met})
    inputs = {"tokens": tokens, "mask": sonic.Mask(3, of="Jet.pt")}
    outputs = {"y": sonic.Output(["a", "b"]), "z": None}
    by_hand = sonic.Model("m", inputs, outputs, version=2, priority=1, server_timeout_s=0.5)
    assert declared.config_hash == by_hand.config_hash
