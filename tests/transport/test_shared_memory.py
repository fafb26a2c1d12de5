"""Shared memory where it is asked for: scores by a real Triton, and what is left afterwards."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from tests.limits import without_room
from tests.transport.shared import check, model, objects, write_models
from tests.waiting import until
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.server import Served
from sonic_coffea.testing import FakeModel, FakeServer

# The model works on a request until a file is removed, and creates another when it begins.
_HELD = """open("{folder}/begun", "w").close()
    while os.path.exists("{folder}/held"):
        time.sleep(0.002)
"""
_FLAT = """
import numpy as np

def flat(hits, row_splits, x):
    return {"y": (x.sum(axis=1) + np.diff(row_splits)).astype("float32")}
"""
_FLAT_TENSORS: dict[str, Any] = {
    "inputs": {
        "hits": ("float32", ["hits", 1]),
        "row_splits": ("int64", ["splits"]),
        "x": ("float32", ["rows", 256]),
    },
    "outputs": {"y": ("float32", ["rows"])},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wide")


@pytest.fixture(scope="module")
def wide_server(folder: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    repository, code = folder / "repository", folder / "flat.py"
    write_models(repository, "one", "two")
    write_models(repository, "held", work=_HELD.format(folder=folder))
    code.write_text(_FLAT)
    sonic.build_repository(repository, {"flat": Served(f"{code}:flat", **_FLAT_TENSORS)})
    with sonic.LocalServer(repository, stop_timeout_s=0.1) as running:
        yield running


def pool_of(server: Any, **options: Any) -> Pool:
    return Pool(Settings.make(server, **{"shared_memory": True, **options}))


def _names(pid: int | str | None) -> str:
    """Return the pattern of the names of a process's regions; by default, of this one."""
    return f"sonic-coffea-client-{os.getpid() if pid is None else pid}-*"


@contextlib.contextmanager
def registered(server: sonic.LocalServer) -> Iterator[Callable[..., list[str]]]:
    """Return a function that asks the server for the regions of a process."""
    with InferenceServerClient(server.url) as client:

        def regions(pid: int | str | None = None) -> list[str]:
            return fnmatch.filter(client.get_system_shared_memory_status().regions, _names(pid))

        yield regions


def files() -> list[str]:
    """Return the files of this process's regions: other processes may run tests, too."""
    # The servers of other tests may go meanwhile, at which a path of pathlib would raise.
    return [
        path
        for folder in (".", "sonic-coffea-*")  # a local server has a folder of its own
        for path in glob.glob(f"/dev/shm/{folder}/{_names(None)}")  # noqa: PTH207, S108
    ]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert files() == []


@pytest.mark.parametrize("shared", [True, False])
def test_scores_are_the_same(wide_server: sonic.LocalServer, shared: Any) -> None:
    sent = {rows: objects(rows, rows) for rows in (0, 1, 100, 2000, 2048, 9001)}
    with pool_of(wide_server, shared_memory=shared) as pool, registered(wide_server) as regions:
        pendings = [
            (model(name).submit(rows, pool=pool), rows)
            for name in ("one", "two")
            for rows in sent.values()
        ]
        for pending, rows in pendings:
            check(pending.result(), rows)
        assert bool(regions()) == bool(shared)
        pool.close()
        until(lambda: regions() == [])


def test_rows_without_elements_travel_with_large_ones(wide_server: sonic.LocalServer) -> None:
    inputs = {"hits": sonic.Flat("hits"), "x": sonic.Dense("x", (256,))}
    flat = sonic.Model("flat", inputs, {"y": None})
    sent = objects(1000)
    sent = ak.with_field(sent, sent.n[:, :0], "hits")
    with pool_of(wide_server) as pool:
        np.testing.assert_array_equal(flat(sent, pool=pool), ak.to_numpy(sent.x).sum(axis=1))


def test_regions_are_used_again(wide_server: sonic.LocalServer) -> None:
    sent, options = objects(2000), {"max_in_flight": 2, "channels": 1}
    with pool_of(wide_server, **options) as pool, registered(wide_server) as regions:
        check(model()(sent[:50], pool=pool), sent[:50])
        assert regions() == []  # small requests travel in messages
        for _ in range(20):
            check(model()(sent, pool=pool), sent)
        assert pool.statistics.total().requests >= 20
        assert pool.statistics.total().sent_bytes > 20 * 2000 * 256 * 4
        assert 0 < len(regions()) <= 3


def test_only_the_regions_are_gone(wide_server: sonic.LocalServer) -> None:
    """As if the server had been started anew between two requests, and nobody noticed."""
    sent = objects(4000)
    with pool_of(wide_server) as pool:
        check(model()(sent, pool=pool), sent)
        with InferenceServerClient(wide_server.url) as client:

            def unregistered() -> bool:
                """Whether it is done; Triton refuses for a moment after it has responded."""
                with contextlib.suppress(InferenceServerException):
                    client.unregister_system_shared_memory()
                return not client.get_system_shared_memory_status().regions

            until(unregistered)
        check(model()(sent, pool=pool), sent)
        total = pool.statistics.total()
        assert total.rows == 8000
        assert total.retries >= 1


def served(inputs: Any) -> dict[str, Any]:
    x, n = inputs["x"], inputs["n"]
    y = np.stack([x.sum(axis=1), x[:, 0] * n[:, 0]], axis=1)
    return {"y": y.astype(np.float32)}


def test_a_server_that_cannot_use_it_is_an_error() -> None:
    fake = FakeServer({"one": FakeModel.of(model(), served, max_rows=2048)})
    with fake:
        with (
            pool_of(fake.url) as pool,
            pytest.raises(errors.ConfigError, match=r"shared_memory=True, but .*leave it out"),
        ):
            model()(objects(9000), pool=pool)
        assert any("SharedMemory" in method for method, _ in fake.calls)
        with pool_of(fake.url, shared_memory=False) as pool:
            before = len(fake.calls)
            check(model()(objects(9000), pool=pool), objects(9000))
        assert not any("SharedMemory" in method for method, _ in fake.calls[before:])
    with (
        pytest.raises(errors.ConfigError, match="is not on this machine"),
        pool_of("grpc://far.example:1") as pool,
    ):
        model()(objects(9000), pool=pool)


@contextlib.contextmanager
def without_files(server: sonic.LocalServer) -> Iterator[None]:
    """Let a running server open no more files."""
    assert server.pid is not None
    before, most = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (0, most))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.parametrize("lacking", ["files of the server", "room"])
def test_memory_that_cannot_be_used_is_an_error(
    wide_server: sonic.LocalServer, lacking: str
) -> None:
    """As for a server in a container, where the names are not there."""
    with pool_of(wide_server, channels=1) as pool:
        check(model()(objects(1), pool=pool), objects(1))
        with (
            without_room() if lacking == "room" else without_files(wide_server),
            pytest.raises(errors.ConfigError, match="True, but .* cannot use"),
        ):
            model()(objects(4000), pool=pool)
    assert files() == []


def test_what_was_abandoned_is_not_used_again(wide_server: sonic.LocalServer, folder: Path) -> None:
    """While the server may read it."""
    held, begun, slow = folder / "held", folder / "begun", model("held")
    with pool_of(wide_server) as pool, registered(wide_server) as regions:
        slow(objects(1), pool=pool)
        begun.unlink()
        held.touch()
        pending = slow.submit(objects(2000), pool=pool)
        until(begun.exists)
        (abandoned,) = regions()
        pending.cancel()
        until(lambda: not any(state.in_flight for state in pool.servers))

        def another() -> bool:
            """Whether a request has a region of its own; on a busy machine, some take messages."""
            assert len(model("one")(objects(2000), pool=pool)) == 2000
            return bool(set(regions()) - {abandoned})

        until(another)
        held.unlink()
        # The server refuses to let go of it until the request is over.
        pool.close()
        assert regions() == []


@pytest.mark.server
def test_a_server_that_is_started_anew_knows_no_regions(tmp_path: Path) -> None:
    """Even if it crashes twice in a minute."""
    write_models(tmp_path / "repository", "one")
    sent = objects(12_000)
    with (
        sonic.LocalServer(tmp_path / "repository", stop_timeout_s=0.1) as server,
        pool_of(server, retry_timeout_s=60) as pool,
    ):
        for _ in range(2):
            check(model()(sent[:4000], pool=pool), sent[:4000])
            pending = model().submit(sent, pool=pool)
            crashed = server.pid
            assert crashed is not None
            os.kill(crashed, signal.SIGKILL)
            check(pending.result(timeout_s=100), sent)
            until(lambda crashed=crashed: server.pid not in (None, crashed))
        check(model()(sent[:4000], pool=pool), sent[:4000])


_ENDS = """
import os, signal, sys
import sonic_coffea as sonic
from tests.transport.shared import model, objects
sonic.connect(sys.argv[1], shared_memory=True)
model()(objects(4000))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "over"])
def test_what_a_client_left_is_removed(wide_server: sonic.LocalServer, how: str) -> None:
    command = [sys.executable, "-c", _ENDS, wide_server.url, how]
    client = subprocess.Popen(command)
    client.wait(100)
    with pool_of(wide_server) as pool, registered(wide_server) as regions:
        # One that was killed leaves it to the next.
        assert bool(regions(client.pid)) == (how == "killed")
        check(model()(objects(4000), pool=pool), objects(4000))
        assert regions(client.pid) == []
        assert regions()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_that_closes_leaves_its_parents_regions(
    wide_server: sonic.LocalServer,
) -> None:
    with pool_of(wide_server) as pool:
        check(model()(objects(4000), pool=pool), objects(4000))
        child = multiprocessing.get_context("fork").Process(target=pool.close)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        check(model()(objects(4000), pool=pool), objects(4000))
        assert pool.statistics.total().retries == 0
