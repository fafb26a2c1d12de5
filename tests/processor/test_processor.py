"""A processor scores every jet as direct inference does, under every executor."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import awkward as ak
import numpy as np
import pytest
from coffea import processor
from coffea.util import save
from distributed import Client
from tests.dask.conftest import local_cluster
from tests.direct import direct_scores
from tests.nanoaod import Schema

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.demo import features
from sonic_coffea.demo.analysis import toptagger
from sonic_coffea.demo.samples import DATA
from sonic_coffea.reporting import STATISTICS_KEY, Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = {
    name: {"treename": "Events", "files": [str(DATA / f"{name}_1.root")]}
    for name in ("TTbar", "QCD")
}


class Tagging(sonic.SonicProcessor, processor.ProcessorABC):
    """Returns the scores themselves, by event."""

    def __init__(self) -> None:
        self.models = {"toptagger": toptagger()}

    def acquire(self, events: Any) -> dict[str, Any]:
        constituents = sonic.constituents(events)
        return {"toptagger": features.constituent_features(events.FatJet, constituents)}

    def overlap(self, events: Any) -> int:
        return len(events)

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        assert scores.overlap == len(events)
        (tops,) = (s.Top for s in scores.values())
        where = zip(events.luminosityBlock.tolist(), events.event.tolist(), strict=True)
        return {
            "scores": dict(zip(where, map(tuple, tops.tolist()), strict=True)),
            "n": {events.metadata["dataset"]: len(events)},
        }


@pytest.fixture(scope="module")
def top_server(
    tmp_path_factory: pytest.TempPathFactory, installation: Any
) -> Iterator[sonic.LocalServer]:
    repository = tmp_path_factory.mktemp("top") / "repository"
    sonic.build_repository(repository, {"toptagger": DATA / "toptagger.onnx"})
    with sonic.LocalServer(repository, stop_timeout_s=0.0) as running:
        yield running


@cache
def expected() -> dict[Any, tuple[float, ...]]:
    """The scores of both files by onnxruntime, jet by jet."""
    first, second = (direct_scores(dataset["files"][0]) for dataset in FILES.values())
    return first | second


def of_the_user(out: dict[Any, Any]) -> dict[Any, Any]:
    """Return an output without its statistics."""
    return {key: value for key, value in out.items() if key != STATISTICS_KEY}


def counts(out: Any) -> tuple[int, int, int]:
    statistics = sonic.report(out).statistics
    return statistics.chunks, statistics.events, statistics.objects


def runner(executor: Any, chunksize: int) -> processor.Runner:
    return processor.Runner(executor=executor, schema=Schema, chunksize=chunksize)


def run_blocks(analysis: Any) -> Any:
    """Run an analysis in this process, on one file of 1000 events, of which each chunk has 500."""
    executor = processor.IterativeExecutor(status=False)
    return runner(executor, 500)({"TTbar": FILES["TTbar"]}, analysis)


def check(out: Any) -> None:
    found, known = out["scores"], expected()
    assert found.keys() == known.keys()
    for where, tops in known.items():
        assert found[where] == pytest.approx(tops, abs=1e-6), where
    statistics = sonic.report(out).statistics
    assert statistics.total().rows == sum(map(len, known.values())) == statistics.objects
    assert statistics.events == len(known)
    assert statistics.datasets == out["n"]
    assert statistics.chunks >= 2
    assert set(out) == {"scores", "n", STATISTICS_KEY}
    assert out["n"] == {"TTbar": 1000, "QCD": 750}


EXECUTORS = {
    "whole files": (processor.IterativeExecutor(status=False), 100_000),
    "chunks": (processor.IterativeExecutor(status=False), 130),
    "processes": (processor.FuturesExecutor(workers=2, status=False), 400),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("executor", "chunksize"), EXECUTORS.values(), ids=EXECUTORS)
def test_chunks_are_scored_by_each_executor(top_server: Any, executor: Any, chunksize: int) -> None:
    with sonic.connect(top_server):
        check(runner(executor, chunksize)(FILES, Tagging()))


class InBlocks(sonic.SonicProcessor, processor.ProcessorABC):
    """Remembers in acquire what it compares in produce, and says where in the file it was."""

    models = MappingProxyType({"m": sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["gev"]})})

    def __init__(self, block_size: int | None) -> None:
        self.block_size = block_size

    def acquire(self, events: Any) -> dict[str, Any]:
        self.jets = events.FatJet if "FatJet" in events.fields else events
        return {"m": self.jets}

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        sent, found = ak.ravel(self.jets.pt), ak.ravel(scores["m"].gev)
        assert np.allclose(sent, found)
        metadata = getattr(events, "metadata", {})
        return {metadata.get("entrystart"): [metadata.get("entrystop"), len(events)]}


@pytest.fixture
def same(sonic_server: Any) -> Any:
    """A server that answers with what is sent."""
    return sonic_server(InBlocks.models["m"], functions={"m": lambda inputs: {"y": inputs["x"]}})


@pytest.mark.usefixtures("same")
@pytest.mark.parametrize(
    ("block_size", "expected"),
    [
        (None, {0: [500, 500], 500: [1000, 500]}),
        (300, {0: [300, 300], 300: [500, 200], 500: [800, 300], 800: [1000, 200]}),
    ],
)
def test_blocks_know_where_they_are(block_size: int | None, expected: dict[int, list[int]]) -> None:
    assert of_the_user(run_blocks(InBlocks(block_size))) == expected


@pytest.mark.usefixtures("same")
def test_blocks_do_not_share_what_is_set_on_the_processor() -> None:
    analysis = InBlocks(2)
    out = analysis.process(ak.Array({"pt": [1.0, 2.0, 3.0, 4.0, 5.0]}))
    assert of_the_user(out) == {None: [None, 2, None, 2, None, 1]}
    assert vars(analysis) == {"block_size": 2}


class Stumbling(Tagging):
    """Fails the first time on each chunk, after its jets were scored."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        first = f"{self.folder}/{events.metadata['dataset']}-{events.metadata['entrystart']}"
        try:
            os.close(os.open(first, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().produce(events, scores)
        raise ZeroDivisionError


def test_chunks_that_workers_of_dask_run_again_count_once(top_server: Any, tmp_path: Any) -> None:
    """A chunk counts once: the statistics come with the outputs that are kept."""
    with (
        local_cluster(2) as cluster,
        Client(cluster) as workers,
        sonic.connect(top_server, client=workers) as pool,
    ):
        executor = processor.DaskExecutor(client=workers, status=False, treereduction=2, retries=3)
        run = processor.Runner(executor, schema=Schema, chunksize=200, savemetrics=True)
        out, metrics = run(FILES, Stumbling(str(tmp_path)))
        assert pool.statistics.total().rows == 0  # the workers did it
    check(out)
    assert sonic.report(out).statistics.chunks == len(list(tmp_path.iterdir())) == 9
    assert metrics["entries"] == 1750
    assert metrics["chunks"] == 9


RUNNING: list[Any] = []


class Stopping(InBlocks):
    """Stops the server after the first chunk; a processor that holds it could not be pickled."""

    def overlap(self, events: Any) -> None:
        if events.metadata["entrystart"]:
            RUNNING[0].stop()


def test_lost_servers_leave_no_output(same: Any) -> None:
    """Not even where coffea skips bad files, for which it takes any OSError."""
    RUNNING[:] = [same]
    executor = processor.IterativeExecutor(status=False, retries=1)
    run = processor.Runner(executor=executor, schema=Schema, chunksize=100, skipbadfiles=True)
    with (
        sonic.connect(same.url, retry_timeout_s=0.5),
        pytest.warns(UserWarning, match="Performed attempt"),
        pytest.raises(Exception, match="ServerLostError") as caught,
    ):
        run({"TTbar": FILES["TTbar"]}, Stopping(None))
    cause = errors.find(caught.value)
    assert isinstance(cause, errors.ServerLostError)
    assert (cause.server, cause.model) == (same.url, "m")
    assert cause.events is not None


@pytest.mark.usefixtures("same")
def test_saved_outputs_need_no_package_of_ours(tmp_path: Any) -> None:
    out = run_blocks(InBlocks(300))
    save(out, tmp_path / "out.coffea")
    reader = """
        import sys

        sys.modules["sonic_coffea"] = None
        from coffea.util import load

        out = load(sys.argv[1])
        statistics = out.pop("sonic_statistics")
        print(out, statistics["chunks"], statistics["events"])
    """
    command = [sys.executable, "-c", textwrap.dedent(reader), str(tmp_path / "out.coffea")]
    found = subprocess.check_output(command, text=True, timeout=100)
    assert found.strip() == f"{of_the_user(out)} 2 1000"


def stand_in(**submit: Any) -> Any:
    """Return a model of another package; `submit` says what its method does."""
    pending = Mock(statistics=Statistics(objects=1))
    return Mock(spec=["submit"], submit=Mock(return_value=pending, **submit))


class Two(sonic.SonicProcessor):
    def __init__(self, *, second: Exception | None = None, own: Exception | None = None) -> None:
        self.models = {"a": stand_in(), "b": stand_in(side_effect=second)}
        self.own = own

    def acquire(self, events: Any) -> dict[str, Any]:
        return {"a": events, "b": events}

    def overlap(self, events: Any) -> None:
        if self.own is not None:
            raise self.own

    def produce(self, events: Any, scores: Any) -> Any:
        return {"n": dict(scores)}


class Blocks(Two):
    block_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def acquire(self, events: Any) -> dict[str, Any]:
        self.order.append(f"send {events.tolist()}")
        return super().acquire(events)

    def produce(self, events: Any, scores: Any) -> Any:
        self.order.append(f"use {events.tolist()}")
        return {"n": len(events)}


def test_the_next_block_is_sent_before_the_scores_of_one_are_waited_for() -> None:
    blocks = Blocks()
    out = blocks.process(ak.Array([1, 2, 3, 4, 5]))
    assert out["n"] == 5
    expected = ["send [1, 2]", "send [3, 4]", "use [1, 2]", "send [5]", "use [3, 4]", "use [5]"]
    assert blocks.order == expected
    assert counts(out) == (1, 5, 6)


@pytest.mark.parametrize("where", ["second", "own"])
def test_calls_are_cancelled_when_something_else_fails(where: str) -> None:
    failing = Two(**{where: ZeroDivisionError("mine")})  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError, match="mine"):
        failing.process(ak.Array([1, 2, 3]))
    pending: Any = failing.models["a"].submit(None)
    pending.cancel.assert_called_once_with()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"acquire": lambda *_: [1]}, "Wrong.acquire must return a dict .* got list"),
        ({"models": None}, "Wrong.models must be a dict, such as .*, got NoneType"),
        ({"models": InBlocks.models["m"]}, "such as models = {'m': model}, got Model"),
        ({"models": {"a": "m", "b": "m"}}, "Wrong.models: expected a sonic.Model as 'a', got str"),
        ({"models": {1: InBlocks.models["m"]}}, "names model 'a'; there are: 1"),
        ({"block_size": 0}, "block_size: expected at least 1 event"),
        ({"block_size": 2.5}, "block_size: expected at least 1 event"),
        ({"block_size": True}, "block_size: expected at least 1 event"),
        ({"produce": lambda _, e, s: s["aa"]}, "sent nothing to a model 'aa'; did you mean 'a'"),
        ({"produce": lambda _, e, s: s.a}, r"expected scores\['a'\], got scores.a"),
    ],
)
def test_mistakes_of_a_processor_are_explained(wrong: dict[str, Any], message: str) -> None:
    def init(self: Any) -> None:
        Two.__init__(self)
        vars(self).update({k: v for k, v in wrong.items() if k not in methods})

    methods = {k: v for k, v in wrong.items() if k in ("acquire", "produce")}
    kind: Any = type("Wrong", (Two,), {"__init__": init, **methods})
    kinds = errors.ConfigError, errors.FieldError, AttributeError
    with pytest.raises(kinds, match=message):
        kind().process(ak.Array([1]))


def test_process_calls_the_methods_of_the_mixin() -> None:
    """If it was overridden, the hooks would not be called, without a word."""
    with pytest.raises(errors.ConfigError, match="Own overrides process, which calls acquire"):

        class Own(Two):
            def process(self, events: Any) -> Any:
                return {"n": len(events)}

    with pytest.raises(errors.ConfigError, match=r"class Later\(sonic.SonicProcessor, "):

        class Later(processor.ProcessorABC, sonic.SonicProcessor):
            pass

    class Selecting(Two):
        def process(self, events: Any) -> Any:
            return super().process(events[events > 1])

    assert counts(Selecting().process(ak.Array([1, 2, 3]))) == (1, 2, 2)


def test_errors_of_users_show_their_lines() -> None:
    class Own(Two):
        def acquire(self, events: Any) -> Any:
            return self.nothing  # type: ignore[attr-defined]

    class Misspelt(Two):
        def acquire(self, events: Any) -> Any:
            return {"a": events.Jett}

    with pytest.raises(AttributeError, match="'Own' object has no attribute 'nothing'"):
        Own().process(ak.Array([1]))
    with pytest.raises(errors.FieldError, match="did you mean 'Jet'") as caught:
        Misspelt().process(ak.Array([{"Jet": 1.0}]))
    modules = [frame.frame.f_globals["__name__"] for frame in caught.traceback]
    assert __name__ in modules[2:]
    assert [m for m in modules if m.startswith("sonic_coffea")] == ["sonic_coffea.errors"]
