"""A processor scores every jet once under every executor, in blocks, or names what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import textwrap
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import ANY, Mock

import awkward as ak
import cloudpickle
import pytest
from coffea import processor
from coffea.nanoevents.methods import vector
from distributed import Client
from tests.dask.conftest import local_cluster
from tests.doubling import Doubling, multiplier
from tests.nanoaod import Schema
from tests.scripts import python

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.demo.samples import DATA
from sonic_coffea.reporting import STATISTICS_KEY, Statistics

FILES = {
    name: {"treename": "Events", "files": [str(DATA / f"{name}_1.root")]}
    for name in ("TTbar", "QCD")
}
MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["gev"]})


class Echo(sonic.SonicProcessor, processor.ProcessorABC):
    """Compares scores with what acquire sent, which they equal, and says where in a file it was."""

    models = MappingProxyType({"m": MODEL})

    def __init__(self, block_size: int | None = None) -> None:
        self.block_size = block_size

    def acquire(self, events: Any) -> dict[str, Any]:
        self.jets = events.FatJet if "FatJet" in events.fields else events
        return {"m": self.jets}

    def overlap(self, events: Any) -> int:
        return len(events)

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        assert scores.overlap == len(events)
        assert ak.array_equal(ak.without_parameters(self.jets.pt), scores["m"].gev)
        metadata = getattr(events, "metadata", {})
        where = metadata.get("dataset"), metadata.get("entrystart")
        return {where: [metadata.get("entrystop"), len(events)]}


@pytest.fixture
def same(sonic_server: Any) -> Any:
    """A server that answers with what is sent."""
    return sonic_server(MODEL, functions={"m": lambda inputs: {"y": inputs["x"]}})


def of_the_user(out: dict[Any, Any]) -> dict[Any, Any]:
    """Return an output without its statistics."""
    return {key: value for key, value in out.items() if key != STATISTICS_KEY}


def counts(out: Any) -> tuple[int, int, int]:
    statistics = sonic.report(out).statistics
    return statistics.chunks, statistics.events, statistics.objects


def run_blocks(analysis: Any) -> Any:
    """Run an analysis in this process, on one file of 1000 events, of which each chunk has 500."""
    executor = processor.IterativeExecutor(status=False)
    run = processor.Runner(executor=executor, schema=Schema, chunksize=500)
    return run({"TTbar": FILES["TTbar"]}, analysis)


@pytest.mark.usefixtures("same")
@pytest.mark.parametrize(
    ("block_size", "expected"),
    [
        (None, {0: [500, 500], 500: [1000, 500]}),
        (300, {0: [300, 300], 300: [500, 200], 500: [800, 300], 800: [1000, 200]}),
    ],
)
def test_blocks_know_where_they_are(block_size: int | None, expected: dict[int, list[int]]) -> None:
    out = of_the_user(run_blocks(Echo(block_size)))
    assert out == {("TTbar", start): stop for start, stop in expected.items()}


class Stumbling(Echo):
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


@pytest.mark.server  # workers are processes
def test_chunks_that_workers_of_dask_run_again_count_once(same: Any, tmp_path: Any) -> None:
    """A chunk counts once: the statistics come with the outputs that are kept."""
    with (
        local_cluster(1) as cluster,
        Client(cluster) as workers,
        sonic.connect(same.url, client=workers) as pool,
    ):
        executor = processor.DaskExecutor(client=workers, status=False, treereduction=2, retries=3)
        run = processor.Runner(executor, schema=Schema, chunksize=200, savemetrics=True)
        out, metrics = run(FILES, Stumbling(str(tmp_path)))
        assert pool.statistics.total().rows == 0  # the workers did it
    assert sum(events for _, events in of_the_user(out).values()) == 1750
    made = json.loads((DATA / "sample.json").read_text(encoding="utf-8"))["files"]
    statistics = sonic.report(out).statistics
    jets = sum(made[f"{name}_1.root"]["fatjets"] for name in FILES)
    assert statistics.total().rows == statistics.objects == jets
    assert statistics.datasets == {"TTbar": 1000, "QCD": 750}
    assert statistics.chunks == len(list(tmp_path.iterdir())) == 9
    assert (metrics["entries"], metrics["chunks"]) == (1750, 9)


RUNNING: list[Any] = []


class Stopping(Echo):
    """Stops the server after the first chunk; a processor that holds it could not be pickled."""

    def overlap(self, events: Any) -> int:
        if events.metadata["entrystart"]:
            RUNNING[0].stop()
        return len(events)


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
        run({"TTbar": FILES["TTbar"]}, Stopping())
    cause = errors.find(caught.value)
    assert isinstance(cause, errors.ServerLostError)
    assert (cause.server, cause.model) == (same.url, "m")
    assert cause.events is not None


@pytest.mark.usefixtures("same")
def test_saved_outputs_need_no_package_of_ours() -> None:
    """A pickle names the module of each class that it needs."""
    out = run_blocks(Echo(300))
    assert counts(out)[:2] == (2, 1000)
    assert b"sonic_coffea" not in pickle.dumps(out)


def stand_in(**submit: Any) -> Any:
    """Return a model of another package; `submit` says what its method does."""
    pending = Mock(statistics=Statistics(objects=1))
    return Mock(spec=["submit"], submit=Mock(return_value=pending, **submit))


class Two(sonic.SonicProcessor):
    own: Exception | None = None

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
    models = MappingProxyType({"a": stand_in(), "b": stand_in()})

    def __init__(self) -> None:
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
    blocks.models["a"].submit.assert_called_with(ANY, on_error="raise")
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
        ({"acquire": lambda *_: [1]}, r"what Wrong.acquire sends: expected a dict .* got \[1\]"),
        ({"models": None}, "Wrong.models: expected a dict, such as .*, got None"),
        ({"models": MODEL}, "such as models = {'m': model}, got Model"),
        ({"models": {"a": "m", "b": "m"}}, "Wrong.models: expected a sonic.Model as 'a', got 'm'"),
        ({"models": {1: MODEL}}, "names model 'a'; there are: 1"),
        ({"block_size": 0}, "block_size: expected at least 1 event"),
        ({"block_size": True}, "block_size: expected at least 1 event"),
        ({"produce": lambda _, e, s: s["aa"]}, "sent nothing to a model 'aa'; did you mean 'a'"),
        ({"produce": lambda *_: {STATISTICS_KEY: 1}}, "produce returns 'sonic_statistics', which"),
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


def test_outputs_are_postprocessed_by_the_class_after_the_mixin() -> None:
    class Weighted(processor.ProcessorABC):
        def process(self, events: Any) -> Any:
            raise NotImplementedError

        def postprocess(self, accumulator: Any) -> Any:
            return {name: 0.5 * number for name, number in accumulator.items()}

    class Own(sonic.SonicProcessor, Weighted):
        pass

    assert Own().postprocess({"n": 4}) == {"n": 2.0}
    assert Echo().postprocess({"n": 4}) == {"n": 4}
    assert Two().postprocess({"n": 4}) == {"n": 4}


def test_errors_of_users_show_their_lines() -> None:
    class Own(Two):
        def acquire(self, events: Any) -> Any:
            return self.nothing  # type: ignore[attr-defined]

    class Misspelt(Two):
        def acquire(self, events: Any) -> Any:
            return {"a": events.Jett}

    class Unreadable(Two):
        def acquire(self, events: Any) -> Any:
            return {"a": events.Jet}

    jets = ak.zip({"pt": [1.0]}, with_name="PtEtaPhiMLorentzVector")
    vectors = ak.Array(ak.zip({"Jet": jets}, depth_limit=1), behavior=vector.behavior)
    with pytest.raises(AttributeError, match="missing azimuthal coordinates"):
        Unreadable().process(vectors)
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'nothing'"):
        Own().process(ak.Array([1]))
    with pytest.raises(errors.FieldError, match="did you mean 'Jet'") as caught:
        Misspelt().process(ak.Array([{"Jet": 1.0}]))
    modules = [frame.frame.f_globals["__name__"] for frame in caught.traceback]
    assert __name__ in modules[2:]
    assert [m for m in modules if m.startswith("sonic_coffea")] == ["sonic_coffea.errors"]


JETS = ak.Array([{"pt": 1.0}])


def of_notebook(**attributes: Any) -> Any:
    """Return a class that coffea pickles by value, as those of notebooks."""

    def produce(_: Any, events: Any, scores: Any) -> Any:
        return scores["m"].twice

    return type("Local", (Doubling,), {"produce": produce, **attributes})


def run(made: Any) -> Any:
    return made.process(JETS).tolist()


def run_pickled(made: Any) -> Any:
    """Run what a pickle brings, as coffea does."""
    return run(cloudpickle.loads(cloudpickle.dumps(made)))


@pytest.mark.parametrize("folds", [False, True], ids=["model", "folds"])
def test_classes_of_notebooks_use_the_servers_of_each_run(*, folds: bool) -> None:
    """coffea pickles them by value, and what is unpickled here takes the place of the class's."""
    model = Doubling.models["m"]
    kind = of_notebook(models={"m": sonic.Folds([model, model], fold=None) if folds else model})
    for factor in (2, 3, 2):
        with multiplier(factor) as server, sonic.connect(server.url):
            assert run_pickled(kind()) == [factor]
            assert run(kind()) == [factor]
    traced = kind().process(ak.Array(JETS.layout.to_typetracer()))
    assert str(traced.type.content) == "float32"  # though no server is connected any more

    class Extended(kind):  # type: ignore[misc]
        models = {**kind.models, "other": model}  # noqa: RUF012

    with multiplier(5) as server, sonic.connect(server.url):
        assert run(Extended()) == [5]


@pytest.fixture
def notebook() -> dict[str, Any]:
    """Return the names of a notebook, one of which is a model that its classes use."""
    return {"__name__": "__main__", "Doubling": Doubling, "model": Doubling.models["m"]}


PRODUCE = "    def produce(self, events, scores): return "
CALLED = f"class Local(Doubling):\n{PRODUCE}model(events).twice"
OF_THE_INSTANCE = f"""
class Local(Doubling):
    def __init__(self): self.models = {{"m": model}}
{PRODUCE}scores["m"].twice
"""


@pytest.mark.parametrize("cell", [CALLED, OF_THE_INSTANCE], ids=["called", "of the instance"])
def test_global_models_of_notebooks_are_not_scored_by_the_servers_of_an_earlier_run(
    cell: str, notebook: dict[str, Any], tmp_path: Path
) -> None:
    """Methods of a class that was unpickled here name copies of the notebook's globals."""
    exec(cell, notebook)  # noqa: S102
    with multiplier(2) as one, multiplier(3) as other:
        with sonic.connect(one.url):
            assert run_pickled(notebook["Local"]()) == [2]
        with sonic.connect(other.url):
            message = rf"{one.url}, and .* with {other.url}: let acquire"
            with pytest.raises(errors.ConfigError, match=message):
                run_pickled(notebook["Local"]())
            # Nor by a worker, to which the next run goes.
            (tmp_path / "sent").write_bytes(cloudpickle.dumps((notebook["Local"](), JETS)))
            script = "import pickle, sys; p, x = pickle.load(open(sys.argv[1], 'rb')); p.process(x)"
            folders = os.pathsep.join(sys.path)
            done = python("-c", script, tmp_path / "sent", check=False, PYTHONPATH=folders)
            assert re.search(message, done.stderr)
            exec(cell, notebook)  # noqa: S102
            assert run_pickled(notebook["Local"]()) == [3]


def test_global_models_of_notebooks_follow_the_options_of_their_servers(
    notebook: dict[str, Any],
) -> None:
    """Such as a new token, after a run that was refused."""
    exec(OF_THE_INSTANCE, notebook)  # noqa: S102
    with multiplier(2, headers={"authorization": "Bearer new"}) as server:
        with sonic.connect(server.url, token="old"), pytest.raises(errors.AccessError):
            run_pickled(notebook["Local"]())
        with sonic.connect(server.url, token="new"):
            assert run_pickled(notebook["Local"]()) == [2]


@pytest.mark.parametrize("has_mixin", [True, False])
def test_models_that_stay_with_the_servers_of_an_earlier_run_warn_once(
    notebook: dict[str, Any], caplog: pytest.LogCaptureFixture, *, has_mixin: bool
) -> None:
    """Without the mixin, nobody can tell global models from pickles that are to keep servers."""

    class Plain:
        model = Doubling.models["m"]

        def process(self, events: Any) -> Any:
            return self.model(events).twice

    exec(OF_THE_INSTANCE, notebook)  # noqa: S102
    kind, again = (notebook["Local"], run) if has_mixin else (Plain, run_pickled)
    with multiplier(2) as one, multiplier(3) as other:
        for server, how, is_warned in ((one, run_pickled, False), (other, again, True)):
            with sonic.connect(server.url):
                assert how(kind()) == how(kind()) == [2]
            assert caplog.text.count(f"model m is scored by {one.url}, as its") == is_warned


def test_models_have_the_same_tokens_in_all_processes(tmp_path: Path) -> None:
    """Else dask would compute persisted scores anew, and `score_files` resume nothing."""
    script = """
        import sonic_coffea as sonic
        from dask.base import tokenize
        from tests.doubling import MODEL, Doubling

        sonic.connect("grpc://127.0.0.1:1")
        print(*map(tokenize, [MODEL, sonic.Folds([MODEL, MODEL], fold="event % 2"), Doubling()]))
    """
    path = tmp_path / "tokens.py"
    path.write_text(textwrap.dedent(script))
    first, second = (python(path, PYTHONPATH=os.pathsep.join(sys.path)).stdout for _ in range(2))
    assert first == second


def test_unpickled_models_of_a_class_keep_their_servers() -> None:
    """Also after coffea has pickled the class."""
    with multiplier(2) as one, multiplier(3) as other:
        with sonic.connect(one.url):
            unpickled = pickle.loads(pickle.dumps(Doubling.models["m"]))
        local = of_notebook(models={"m": unpickled})
        with sonic.connect(other.url):
            derived = (type("Derived", (local,), own) for own in ({}, {"models": {**local.models}}))
            for kind in (local, *derived):
                assert run(kind()) == [2]
                assert run_pickled(kind()) == [2]
                assert run(kind()) == [2]
