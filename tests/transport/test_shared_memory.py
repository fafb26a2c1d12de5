"""Shared memory with a real Triton: the same scores, and nothing is left behind."""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from tests.limits import without_room
from tests.ports import held_port
from tests.waiting import until
from tritonclient.grpc import InferenceServerClient, service_pb2
from tritonclient.utils import InferenceServerException

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import Address, _regions, local_state
from sonic_coffea.transport import _shared_memory as shm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Two inputs of different types and widths; answers after 10 ms.
_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.01)
        answers = []
        for request in requests:
            x, n = (pb_utils.get_input_tensor_by_name(request, k).as_numpy() for k in "xn")
            y = np.stack([x.sum(axis=1), x[:, 0] * n[:, 0]], axis=1).astype(np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 2048
input {{ name: "x" data_type: TYPE_FP32 dims: [ 256 ] }}
input {{ name: "n" data_type: TYPE_INT64 dims: [ 3 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}
"""


def model(name: str = "one") -> sonic.Model:
    return sonic.Model(
        name,
        {"x": sonic.Dense("x", (256,)), "n": sonic.Dense("n", (3,), dtype="int64")},
        {"y": ["total", "product"]},
    )


def objects(rows: int, seed: int = 1) -> ak.Array:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 100, (rows, 256)).astype(np.float32)
    return ak.zip({"x": x, "n": rng.integers(0, 100, (rows, 3))}, depth_limit=1)


def check(scores: ak.Array, sent: ak.Array) -> None:
    x, n = ak.to_numpy(sent.x), ak.to_numpy(sent.n)
    np.testing.assert_array_equal(scores.total, x.sum(axis=1))
    np.testing.assert_array_equal(scores["product"], x[:, 0] * n[:, 0])


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    for name in ("one", "two"):
        (path / name / "1").mkdir(parents=True)
        (path / name / "1" / "model.py").write_text(_MODEL)
        (path / name / "config.pbtxt").write_text(_CONFIG.format(name=name))
    return path


@pytest.fixture(scope="module")
def wide_server(wide: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    with sonic.LocalServer(wide, stop_timeout_s=0.1) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert ours() == []


def ours(pid: int | None = None) -> list[str]:
    """Return the regions of a process, by default this one: others may run tests, too."""
    made = f"{_regions.PREFIX}-{os.getuid()}-*-{os.getpid() if pid is None else pid}-*"
    return [p.name for p in local_state.SHARED_MEMORY.glob(made)]


def pool_of(server: Any, **options: Any) -> Pool:
    return Pool(Settings.make(server, **options))


@pytest.mark.parametrize("shared", ["auto", True, False])
def test_scores_are_the_same(wide_server: sonic.LocalServer, shared: Any) -> None:
    sent = {rows: objects(rows, rows) for rows in (0, 1, 100, 2000, 2048, 9001)}
    with pool_of(wide_server, shared_memory=shared) as pool:
        pendings = [
            (model(name).submit(one, pool=pool), one)
            for name in ("one", "two")
            for one in sent.values()
        ]
        for pending, one in pendings:
            check(pending.result(), one)
        assert bool(ours()) == bool(shared)


def test_regions_are_packed_into_and_used_again(
    wide_server: sonic.LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, filled, there = objects(2000), _regions.Region.fill, []

    def fill(region: _regions.Region, inputs: Any, tensors: Any) -> bool:
        there.extend(region.offset_of(tensor) is not None for tensor in tensors.values())
        return filled(region, inputs, tensors)

    monkeypatch.setattr(_regions.Region, "fill", fill)
    with pool_of(wide_server, max_in_flight=2) as pool:
        for _ in range(20):
            check(model()(sent, pool=pool), sent)
        assert pool.statistics.total().requests >= 20
        assert pool.statistics.total().sent_bytes > 20 * 2000 * 256 * 4
        assert 0 < len(ours()) <= 3
    assert there
    assert all(there)


def test_small_requests_travel_in_messages(wide_server: sonic.LocalServer) -> None:
    with pool_of(wide_server, shared_memory=True) as pool:
        check(model()(objects(50), pool=pool), objects(50))
        assert ours() == []


def test_what_was_abandoned_is_not_used_again(held: Held, held_server: sonic.LocalServer) -> None:
    with pool_of(held_server) as pool, registered(held_server) as regions:
        pending = worked_on(held, pool)
        (abandoned,) = regions()
        pending.cancel()
        # Else the server might answer before it hears of it, which frees the region.
        until(lambda: abandoned not in ours())
        held.release()
        assert len(model()(objects(2000), pool=pool)) == 2000
        assert len(ours()) == 1


def killed(server: sonic.LocalServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)


@pytest.mark.server
def test_a_server_that_is_started_anew_knows_no_regions(wide: Path) -> None:
    """And to unregister them with a server that is dead is no error."""
    sent = objects(12_000)
    with held_port() as port, contextlib.ExitStack() as stack:
        options = {"port": port, "stop_timeout_s": 0.1, "restart": False}
        first, second = (sonic.LocalServer(wide, **options) for _ in range(2))
        stack.callback(first.stop)
        with pool_of(first.start(), retry_timeout_s=60) as pool:
            check(model()(sent[:4000], pool=pool), sent[:4000])
            pending = model().submit(sent, pool=pool)
            killed(first)
            stack.callback(second.stop)
            second.start()
            check(pending.result(timeout_s=100), sent)
            check(model()(sent[:4000], pool=pool), sent[:4000])
        with pool_of(second, retry_timeout_s=0.2) as pool:
            check(model()(sent[:4000], pool=pool), sent[:4000])
            killed(second)
            with pytest.raises(errors.ServerLostError):
                model()(sent[:4000], pool=pool)


def test_only_the_regions_are_gone(wide_server: sonic.LocalServer) -> None:
    """As if the server had been started anew between two requests, and nobody noticed."""
    sent = objects(4000)
    with pool_of(wide_server) as pool:
        check(model()(sent, pool=pool), sent)
        with client_of(wide_server) as (client, headers):

            def unregistered() -> bool:
                """Whether it is done; Triton refuses for a moment after it has responded."""
                with contextlib.suppress(InferenceServerException):
                    client.unregister_system_shared_memory(headers=headers)
                return not client.get_system_shared_memory_status(headers=headers).regions

            until(unregistered)
        check(model()(sent, pool=pool), sent)
        total = pool.statistics.total()
        assert total.rows == 8000
        assert total.retries >= 1


@pytest.mark.server
def test_letting_go_of_a_dead_server_is_no_error(wide: Path) -> None:
    server = sonic.LocalServer(wide, stop_timeout_s=0.1, restart=False).start()
    with pool_of(server, retry_timeout_s=0.2) as pool:
        check(model()(objects(4000), pool=pool), objects(4000))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(errors.ServerLostError):
            model()(objects(4000), pool=pool)
    server.stop()


def test_nothing_is_registered_after_closing(wide_server: sonic.LocalServer) -> None:
    with pool_of(wide_server) as pool, registered(wide_server) as regions:
        check(model()(objects(4000), pool=pool), objects(4000))
        assert regions()
        pool.close()
        until(lambda: regions() == [])


@contextlib.contextmanager
def client_of(server: sonic.LocalServer) -> Iterator[tuple[InferenceServerClient, Any]]:
    """Return a bare client of a local server, and the headers that each of its calls needs."""
    record = local_state.lookup(server.url)
    assert record is not None
    with InferenceServerClient(server.url.removeprefix("grpc://")) as client:
        yield client, record.headers


@contextlib.contextmanager
def registered(server: sonic.LocalServer) -> Iterator[Callable[..., list[str]]]:
    """Say which regions of a process the server has."""
    with client_of(server) as (client, headers):

        def regions(pid: int | None = None) -> list[str]:
            told = client.get_system_shared_memory_status(headers=headers).regions
            mine = f"{_regions.PREFIX}-{os.getuid()}-*-{os.getpid() if pid is None else pid}-*"
            return fnmatch.filter(told, mine)

        yield regions


# It works on a request until a file is removed, and makes another to say so.
_HELD = """
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        open("{folder}/begun", "w").close()
        while os.path.exists("{folder}/held"):
            time.sleep(0.002)
        rows = [len(pb_utils.get_input_tensor_by_name(r, "x").as_numpy()) for r in requests]
        answers = [np.zeros((n, 2), np.float32) for n in rows]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for y in answers]
"""


class Held:
    """A server whose model works on a request for as long as one wants."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "repository"
        self._begun, self._held = folder / "begun", folder / "held"
        (self.repository / "one" / "1").mkdir(parents=True)
        model_file = self.repository / "one" / "1" / "model.py"
        model_file.write_text(_HELD.format(folder=folder))
        (self.repository / "one" / "config.pbtxt").write_text(_CONFIG.format(name="one"))

    def hold(self) -> None:
        self._begun.unlink(missing_ok=True)
        self._held.touch()

    def release(self) -> None:
        self._held.unlink()

    def wait(self) -> None:
        until(self._begun.exists)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    return Held(tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def held_server(held: Held, installation: Any) -> Iterator[sonic.LocalServer]:
    with sonic.LocalServer(held.repository, stop_timeout_s=0.1) as running:
        yield running


def worked_on(held: Held, pool: Pool) -> sonic.Pending:
    """Return a call whose one request the server works on until `held` is released."""
    model()(objects(1), pool=pool)
    held.hold()
    pending = model().submit(objects(2000), pool=pool)
    held.wait()
    return pending


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return each time that the server refused to let go of a region."""
    return [r.getMessage() for r in caplog.records if "currently in use" in r.getMessage()]


def test_the_server_lets_go_of_what_was_abandoned(
    held: Held, held_server: sonic.LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that is cancelled while it runs; nothing else is asked of the pool then."""
    caplog.set_level(logging.DEBUG, logger=shm.__name__)
    with pool_of(held_server) as pool, registered(held_server) as regions:
        pending = worked_on(held, pool)
        (region,) = regions()
        pending.cancel()
        until(lambda: len(refusals(caplog)) > 1)
        assert regions() == [region]
        assert ours() == []
        held.release()
        until(lambda: regions() == [])
        assert all(region in refusal for refusal in refusals(caplog))
        assert len(model()(objects(2000), pool=pool)) == 2000


@pytest.mark.parametrize("within_s", [0.05, 20.0])
def test_closing_lets_go_of_what_is_out(
    held: Held,
    held_server: sonic.LocalServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    within_s: float,
) -> None:
    """It waits for the server for a moment; then a thread does, and the channel is open for it."""
    caplog.set_level(logging.DEBUG, logger=shm.__name__)
    monkeypatch.setattr(shm, "_CLOSES_WITHIN_S", within_s)
    with pool_of(held_server) as pool, registered(held_server) as regions:
        pending = worked_on(held, pool)
        closing = threading.Thread(target=pool.close)
        closing.start()
        until(lambda: len(refusals(caplog)) > 0)
        if within_s < 1:
            closing.join()
            assert regions()
        with pytest.raises(errors.CancelledError):
            pending.result()
        held.release()
        closing.join()
        until(lambda: regions() == [])


def test_a_pool_that_was_closed_too_soon_leaves_it_to_the_next(
    held: Held, held_server: sonic.LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "_CLOSES_WITHIN_S", 0.01)
    monkeypatch.setattr(shm, "_LINGERS_S", 0.0)
    with registered(held_server) as regions:
        with pool_of(held_server) as pool:
            pending = worked_on(held, pool)
        pending.cancel()
        (left,) = regions()
        held.release()
        with pool_of(held_server) as pool:
            model()(objects(2000), pool=pool)
            until(lambda: left not in regions())
            assert regions()


def test_a_request_that_cannot_be_sent_leaves_its_region(wide_server: sonic.LocalServer) -> None:
    fails = threading.Event()

    def token() -> str:
        if fails.is_set():
            raise RuntimeError("no token")
        return "any"

    with pool_of(wide_server, token=token) as pool:
        check(model()(objects(2000), pool=pool), objects(2000))
        regions = ours()
        fails.set()
        for _ in range(3):
            with pytest.raises(errors.ConfigError, match="token= names failed"):
                model()(objects(2000), pool=pool)
        fails.clear()
        check(model()(objects(2000), pool=pool), objects(2000))
        assert ours() == regions


_KILLED = """
import os, signal, sys
import sonic_coffea as sonic
from sonic_coffea.transport import _regions, local_state
from tests.transport.test_shared_memory import model, objects
_regions.PREFIX = sys.argv[2]
with sonic.connect(sys.argv[1]):
    model()(objects(4000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_client_left_is_removed(
    wide_server: sonic.LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With names of its own: tests beside this one remove what was left, too.
    monkeypatch.setattr(_regions, "PREFIX", f"{_regions.PREFIX}-{os.getpid()}")
    command = [sys.executable, "-c", _KILLED, wide_server.url, _regions.PREFIX]
    client = subprocess.Popen(command)
    assert client.wait(100) == -signal.SIGKILL
    assert ours(client.pid)
    mine = _regions.create(1000)
    foreign = local_state.SHARED_MEMORY / f"{_regions.PREFIX}-{os.getuid() + 1}-1-1-1-1"
    foreign.touch()
    try:
        with pool_of(wide_server) as pool, registered(wide_server) as regions:
            assert regions(client.pid)
            check(model()(objects(4000), pool=pool), objects(4000))
            assert ours(client.pid) == []
            assert mine.path.exists()
            assert foreign.exists()
            until(lambda: regions(client.pid) == [])
            assert regions()
    finally:
        foreign.unlink()
        mine.remove()


_ENDS = """
import sys
import sonic_coffea as sonic
from tests.transport.test_shared_memory import check, model, objects
sonic.connect(sys.argv[1])
check(model()(objects(4000)), objects(4000))
"""


def test_a_client_that_ends_leaves_nothing(wide_server: sonic.LocalServer) -> None:
    client = subprocess.Popen([sys.executable, "-c", _ENDS, wide_server.url])
    assert client.wait(100) == 0
    assert ours(client.pid) == []


_FORKS = """
import os, sys
import sonic_coffea as sonic
from tests.transport.test_shared_memory import check, model, objects, ours
with sonic.connect(sys.argv[1]) as pool:
    check(model()(objects(4000)), objects(4000))
    regions = ours()
    assert regions
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ours() == regions
    check(model()(objects(4000)), objects(4000))
    assert pool.statistics.total().retries == 0
"""


def test_a_forked_child_that_closes_leaves_its_parents_regions(
    wide_server: sonic.LocalServer,
) -> None:
    client = subprocess.Popen([sys.executable, "-c", _FORKS, wide_server.url])
    assert client.wait(100) == 0
    assert ours(client.pid) == []


def served(inputs: Any) -> dict[str, Any]:
    x, n = inputs["x"], inputs["n"]
    y = np.stack([x.sum(axis=1), x[:, 0] * n[:, 0]], axis=1)
    return {"y": y.astype(np.float32)}


def test_a_server_that_cannot_use_it(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeServer({"one": FakeModel.of(model(), served, max_rows=2048)})
    with fake, caplog.at_level(logging.INFO):
        with pool_of(fake.url) as pool:
            check(model()(objects(9000), pool=pool), objects(9000))
        said = [r for r in caplog.records if "cannot use shared memory" in r.message]
        assert len(said) == 1
        with (
            pool_of(fake.url, shared_memory=True) as pool,
            pytest.raises(errors.ConfigError, match="does not have the extension"),
        ):
            model()(objects(9000), pool=pool)
    with (
        pytest.raises(errors.ConfigError, match="is not on this machine"),
        pool_of("grpc://far.example:1", shared_memory=True) as pool,
    ):
        model()(objects(9000), pool=pool)


def test_a_server_that_does_not_see_this_memory(
    wide_server: sonic.LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one in a container: the names are not there."""
    monkeypatch.setattr(_regions, "FOLDER", tmp_path)
    with pool_of(wide_server) as pool:
        check(model()(objects(4000), pool=pool), objects(4000))
    with (
        pool_of(wide_server, shared_memory=True) as pool,
        pytest.raises(errors.ConfigError, match="shared_memory=True, but .* cannot use"),
    ):
        model()(objects(4000), pool=pool)
    assert list(tmp_path.iterdir()) == []


def test_no_room(wide_server: sonic.LocalServer) -> None:
    with without_room(), pool_of(wide_server) as pool:
        check(model()(objects(4000), pool=pool), objects(4000))


def test_many_threads_at_a_time(wide_server: sonic.LocalServer) -> None:
    failures: list[Any] = []

    def score(seed: int) -> None:
        try:
            check(model()(objects(3000, seed), pool=pool), objects(3000, seed))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    with pool_of(wide_server) as pool:
        threads = [threading.Thread(target=score, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


class Balanced:
    """Two servers behind one address: calls go to the first, or to each in turn, or one is lost."""

    def __init__(self) -> None:
        self.registered: tuple[set[str], set[str]] = (set(), set())
        self.turns: Iterator[set[str] | None] = itertools.repeat(self.registered[0])
        self.lock = threading.Lock()

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        with self.lock:
            server = next(self.turns)
            if server is None:
                raise errors.ServerLostError("upstream connect error")
            if method == "SystemSharedMemoryRegister":
                server.add(request.name)
            elif method == "SystemSharedMemoryUnregister":
                server.discard(request.name)
            regions = dict.fromkeys(server, True)
            return SimpleNamespace(extensions=[shm.EXTENSION], regions=regions)


def memory_of(balanced: Balanced, **options: Any) -> shm.SharedMemory:
    address = Address.parse("grpc://127.0.0.1:1")
    return shm.SharedMemory(balanced.call, address, shm.Usability(), demanded=False, **options)


@pytest.mark.parametrize("lost", [False, True])
def test_each_server_behind_an_address_unregisters_its_regions(lost: bool) -> None:
    """While one was alone, all regions were registered there; later calls go to both in turn."""
    balanced = Balanced()
    memory = memory_of(balanced)
    inputs = service_pb2.ModelInferRequest(inputs=[{}]).inputs
    tensors = {"x": np.zeros(shm.WORTH_BYTES, np.uint8)}
    regions = [memory.place(tensors, inputs, None) for _ in range(8)]
    assert len(balanced.registered[0]) == 8
    balanced.turns = itertools.cycle(balanced.registered)
    if lost:
        # It is known that there are two, and that one of them does not answer for a while.
        memory.unknown("")
        for_a_while = [None, balanced.registered[1]] * 20
        balanced.turns = itertools.chain(for_a_while, itertools.cycle(balanced.registered))
    for region in regions:
        assert region is not None
        (memory.discard if lost else memory.release)(region)
    if lost:
        until(lambda: not balanced.registered[0])
    over = threading.Event()
    memory.close(over.set)
    assert over.wait(30)
    assert balanced.registered == (set(), set())


def test_tensors_are_packed_where_the_server_reads_them() -> None:
    balanced = Balanced()
    memory = memory_of(balanced)
    inputs = service_pb2.ModelInferRequest(inputs=[{}, {}, {}]).inputs
    kind = np.dtype(np.float32)
    room = memory.room(shm.WORTH_BYTES, 3)
    assert room is not None
    there, wide = room.lend((100_000,), kind), room.lend((3, 4), kind)
    assert there is not None
    assert wide is not None
    there[:], wide[:] = 1, np.arange(12).reshape(3, 4)
    tensors = {"x": there, "t": wide.T, "y": np.full(5, 2, np.uint8)}
    assert memory.place(tensors, inputs, room) is room
    for entry, (name, tensor) in zip(inputs, tensors.items(), strict=True):
        offset = entry.parameters["shared_memory_offset"].int64_param
        read = np.ndarray(tensor.shape, tensor.dtype, room.memory, offset)
        np.testing.assert_array_equal(read, tensor)
        assert (read.__array_interface__["data"][0] == room.address) == (name == "x")
    # More than was said to come: all of it moves to another region, and that one is free again.
    tensors["y"] = np.full(room.nbytes, 3, np.uint8)
    larger = memory.place(tensors, inputs, room)
    assert larger is not None
    assert memory.room(shm.WORTH_BYTES, 3) is room
    offsets = [entry.parameters["shared_memory_offset"].int64_param for entry in inputs]
    for offset, tensor in zip(offsets, tensors.values(), strict=True):
        read = np.ndarray(tensor.shape, tensor.dtype, larger.memory, offset)
        np.testing.assert_array_equal(read, tensor)
    memory.release(larger)
    memory.discard(room)
    del there, wide, read, tensor, tensors
    over = threading.Event()
    memory.close(over.set)
    assert over.wait(30)
