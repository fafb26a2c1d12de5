"""Servers may change, lose rows or sleep, and what they have is asked once, for a limited time."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest
from tests.doubling import MODEL, Doubling, jets, served, twice
from tests.pool.scripted import LOST, ONE, TWO, ScriptedServer, connect, pool_of, refuses
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import Contract


def test_servers_are_changed_while_rows_are_out(one: ScriptedServer, two: ScriptedServer) -> None:
    one.gate.clear()
    with pool_of(ONE, max_in_flight=2) as pool:
        pending = MODEL.submit(jets(*range(40)), pool=pool)
        until(lambda: one.out == 2)
        pool.set_servers(TWO)
        until(lambda: len(two.requests) == 8)
        assert [s.url for s in pool.servers] == [TWO]
        assert not one.closed
        one.gate.set()
        assert twice(pending.result()) == list(range(40))
        until(lambda: one.closed)
        assert len(one.requests) == 2
        assert twice(MODEL(jets(*range(40)), pool=pool)) == list(range(40))
        with pytest.raises(errors.ConfigError, match="did you mean 'grpc://s1:8001'"):
            pool.set_servers("s1:8001")
    with pytest.raises(errors.ConfigError, match="the pool has been closed"):
        pool.set_servers(ONE)


class HeldLog(logging.Handler):
    """Holds whoever logs the first message."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.holds, self.released = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.holds.set()
        self.released.wait(60)


def test_servers_are_named_again_while_they_drain(one: ScriptedServer, two: ScriptedServer) -> None:
    """The last response comes while the pool takes the new list."""
    two.gate.clear()
    named, held, log = threading.Event(), HeldLog(), logging.getLogger("sonic_coffea.pool")
    with pool_of(ONE, TWO, max_in_flight=1) as pool, ThreadPoolExecutor(1) as threads:
        pending = MODEL.submit(jets(*range(40)), pool=pool)
        until(lambda: two.out == 1)
        pool.set_servers(ONE)
        log.addHandler(held)
        try:
            one.behaviour = lambda _: LOST
            until(held.holds.is_set)
            one.behaviour = lambda x: 2 * x
            again = threads.submit(lambda: named.set() or pool.set_servers([ONE, TWO]))
            named.wait(60)
            two.gate.set()
            until(lambda: two.out == 0)
        finally:
            held.released.set()
            log.removeHandler(held)
        again.result()
        assert twice(pending.result()) == list(range(40))
        assert twice(MODEL(jets(*range(40)), pool=pool)) == list(range(40))
    assert len(two.requests) > 1


def written(path: Path, text: str | bytes, later_s: int = 1) -> None:
    """Write a file at once, by the clock some time after it was written before."""
    at = path.stat().st_mtime_ns + later_s * 10**9 if path.exists() else 0
    new = path.with_suffix(".new")
    new.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(new, ns=(at, at))
    new.replace(path)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of servers, which is looked at all the time."""
    monkeypatch.setattr("sonic_coffea.pool._engine.WATCH_INTERVAL_S", 0.001)
    path = tmp_path / "servers.txt"
    written(path, "grpc://s1:8001\n")
    return path


def test_servers_set_before_the_first_call_stay_until_the_file_changes(
    one: ScriptedServer, two: ScriptedServer, listed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Pool(Settings.make(listed), connect=connect) as pool:
        pool.set_servers("grpc://s2:8001")
        for _ in range(20):
            assert twice(MODEL(jets(1.0), pool=pool, timeout_s=20)) == [1.0]
        written(listed, "s1:8001\n")
        until(lambda: "stay as they are" in caplog.text)  # so it has been read
        assert pool.settings.servers == ("grpc://s2:8001",)
        assert two.requests
        assert not one.requests
        written(listed, "grpc://s1:8001 # again\ngrpc://s2:8001\n")
        until(lambda: len(pool.settings.servers) == 2)
        # Another file is read though it is as old.
        written(listed, "grpc://s1:8001\n", later_s=0)
        until(lambda: pool.settings.servers == ("grpc://s1:8001",), 10)


def test_files_of_servers_are_watched_after_a_moment_without_threads(
    one: ScriptedServer, two: ScriptedServer, listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
        if thread.name == "sonic-servers":
            raise RuntimeError("can't start new thread")
        start(thread)

    with Pool(Settings.make(listed), connect=connect) as pool:
        with monkeypatch.context() as limits:
            limits.setattr(threading.Thread, "start", limited)
            with pytest.raises(RuntimeError, match="new thread"):
                MODEL(jets(1.0), pool=pool)
        assert twice(MODEL(jets(1.0), pool=pool, timeout_s=20)) == [1.0]
        written(listed, "grpc://s2:8001\n")
        until(lambda: pool.settings.servers == ("grpc://s2:8001",), 10)
        assert twice(MODEL(jets(1.0), pool=pool, timeout_s=20)) == [1.0]
    assert [len(server.requests) for server in (one, two)] == [1, 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"# caf\xe9\ngrpc://s2:8001\n", "got bytes that are not UTF-8"),
        ("s2:8001\n", "did you mean 'grpc://s2:8001'"),
        ("grpc://s2:8001\ngrpc://s3:8001\n", "certificate is gone"),
    ],
)
def test_unusable_files_of_servers_change_nothing(
    one: ScriptedServer,
    two: ScriptedServer,
    listed: Path,
    text: str | bytes,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def connecting(url: str, **_: Any) -> ScriptedServer:
        if url not in (ONE, TWO):
            raise OSError("the certificate is gone")
        return one if url == ONE else two

    def scored() -> bool:
        return twice(MODEL(jets(*range(4)), pool=pool, timeout_s=20)) == list(range(4))

    with Pool(Settings.make(listed), connect=connecting) as pool:
        assert scored()
        written(listed, text)
        until(lambda: "stay as they are" in caplog.text)
        assert all(scored() for _ in range(20))  # the file is looked at in between
        problems = [r.getMessage() for r in caplog.records if "stay as they are" in r.getMessage()]
        assert len(problems) == 1
        assert str(listed) in problems[0]
        assert reason in problems[0]
        assert pool.settings.servers == ("grpc://s1:8001",)
        assert [s.url for s in pool.servers] == ["grpc://s1:8001"]
        assert not two.requests
        written(listed, "grpc://s2:8001\n")
        until(lambda: scored() and bool(two.requests))
        assert pool.settings.servers == ("grpc://s2:8001",)


def test_unreachable_files_of_servers_hold_up_nobody(one: ScriptedServer, listed: Path) -> None:
    """To read a pipe blocks, as on a file system that hangs."""

    def reading() -> bool:
        with contextlib.suppress(OSError):  # until there is a reader
            pipes.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(pipes)

    pipes: list[int] = []
    pipe = listed.with_suffix(".pipe")
    os.mkfifo(pipe)
    with Pool(Settings.make(listed), connect=connect) as pool:
        listed.unlink()
        listed.symlink_to(pipe)
        assert twice(MODEL(jets(*range(4)), pool=pool, timeout_s=20)) == list(range(4))
        until(reading)
        assert [told.waiting for told in pool.telemetry().values()] == [0]
        assert twice(MODEL(jets(*range(4)), pool=pool, timeout_s=20)) == list(range(4))
        written(listed, "grpc://s1:8001\n")
        os.close(pipes[0])


SLOW = sonic.Model("slow", MODEL.inputs, MODEL.outputs)


def test_questions_about_a_model_are_asked_once_and_hold_up_no_other_model(
    one: ScriptedServer,
) -> None:
    """Deadlines are those of the whole call, also of one that waits for what another asks."""
    third = sonic.Model("third", MODEL.inputs, MODEL.outputs)
    with pool_of(ONE) as pool, ThreadPoolExecutor(4) as threads:
        MODEL.check(pool)
        one.blocks = "metadata"
        for _ in range(2):
            with pytest.raises(errors.DeadlineError, match=r"within 0.05 s.*model slow"):
                SLOW(jets(*range(4)), pool=pool, timeout_s=0.05)
            checks = [threads.submit(SLOW.check, pool) for _ in range(2)]
        assert one.blocked.wait(60)
        one.blocks = ""
        for model in (MODEL, third):
            assert twice(model(jets(*range(4)), pool=pool, timeout_s=60)) == [0, 1, 2, 3]
        one.released.set()
        for check in checks:
            check.result(60)
        assert one.described.count("slow") == 1
        assert twice(SLOW(jets(*range(4)), pool=pool, timeout_s=20)) == list(range(4))


def test_who_waits_for_a_contract_hears_that_the_pool_is_closed(one: ScriptedServer) -> None:
    with ThreadPoolExecutor(1) as thread:
        pool = pool_of(ONE)
        pool.join_cluster(3600, 1, 0.0)
        waiting = thread.submit(MODEL.check, pool)
        until(lambda: bool(pool.servers))
        pool.close()
        with pytest.raises(errors.ConfigError, match="closed"):
            waiting.result(60)


def test_lost_rows_are_none_if_asked(one: ScriptedServer) -> None:
    one.outputs = ("y", "z")
    one.behaviour = lambda x: refuses(5, 18)(x) if {5, 18} & {*x.flat} else {"y": 2 * x, "z": 3 * x}
    model = sonic.Model("m", MODEL.inputs, {**MODEL.outputs, "z": None})
    array = ak.unflatten(jets(*range(20)), [3, 0, 10, 7])
    array = ak.mask(array, array.pt != 2)
    with pool_of(ONE) as pool:
        pending = model.submit(array, pool=pool, on_error="mask")
        scores = pending.result()
        # Nineteen rows in requests of four: the None is not sent.
        assert ak.flatten(scores).tolist() == [
            None if n == 2 or 5 <= n <= 8 or n >= 17 else {"y": {"twice": 2.0 * n}, "z": 3.0 * n}
            for n in range(20)
        ]
        assert ak.num(scores).tolist() == [3, 0, 10, 7]
        assert pending.statistics.masked == 7
        until(lambda: pool.statistics.masked == 7)
        with pytest.raises(errors.RequestError, match="rows 4..7") as caught:
            model(array, pool=pool)
        assert (caught.value.server, caught.value.model) == (ONE, "m")
        assert (caught.value.rows, caught.value.events) == ((4, 8), (2, 3))


def test_without_any_server_all_is_none(one: ScriptedServer) -> None:

    def metadata(model: str, version: str | None) -> Contract:
        raise LOST

    one.metadata = metadata  # type: ignore[method-assign]
    with pool_of(ONE, retry_timeout_s=0.1) as pool:
        pending = MODEL.submit(jets(*range(8)), pool=pool, on_error="mask")
        assert pending.result().tolist() == [None] * 8
        assert str(pending.result().type) == "8 * ?{twice: float32}"
        for statistics in (pending.statistics, pool.statistics):
            assert (statistics.objects, statistics.masked) == (8, 8)
        hint = r"\(sonic-coffea check grpc://s1:8001 m tries it step by step\)"
        with pytest.raises(errors.ServerLostError, match=hint) as caught:
            MODEL(ak.unflatten(jets(*range(8)), [2, 0, 6]), pool=pool)
        assert caught.value.model == "m"
        assert caught.value.events == (0, 3)


def test_wrong_rows_are_not_masked(one: ScriptedServer) -> None:
    array = ak.zip({"pt": np.array([1, np.nan], np.float32)})
    with pool_of(ONE) as pool:
        with pytest.raises(errors.InputError, match="NaN"):
            MODEL(array, pool=pool, on_error="mask")
        with pytest.raises(errors.ConfigError, match="did you mean 'mask'"):
            MODEL(array, pool=pool, on_error="masked")
        one.behaviour = lambda _: errors.AccessError("no")
        with pytest.raises(errors.AccessError):
            MODEL(jets(*range(3)), pool=pool, on_error="mask")
        one.lacks, loaded = True, list[str]()
        one.load = loaded.append  # type: ignore[method-assign]
        with pytest.raises(errors.ModelNotFoundError):
            sonic.Model("other", MODEL.inputs, MODEL.outputs)(
                jets(*range(3)), pool=pool, on_error="mask"
            )
        assert loaded == []  # only fallbacks are asked to load models


class Masking(Doubling):
    on_error = "mask"

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        return {"scores": scores["m"].twice}


def test_processors_go_on_with_none_for_lost_rows(one: ScriptedServer) -> None:
    one.behaviour = refuses(5)
    events = ak.unflatten(jets(*range(10)), [3, 0, 7])
    with pool_of(ONE):
        out = Masking().process(events)
    assert out["scores"].tolist() == [[0, 2, 4], [], [6, None, None, None, None, 16, 18]]
    statistics = sonic.report(out).statistics
    assert (statistics.masked, statistics.total().rows) == (4, 6)


def test_rows_fail_that_a_server_never_answers_though_it_lives() -> None:
    """However often they are sent a second time."""
    options = {"request_timeout_s": 1, "retry_timeout_s": 0.5, "hedge_after_s": 0.05}
    with FakeServer({"m": FakeModel.of(MODEL)}) as server, sonic.connect(server.url, **options):
        MODEL(jets(*range(4)))
        server.hold()
        with pytest.raises(errors.DeadlineError, match="server did not answer in time"):
            MODEL(jets(*range(4)), timeout_s=5)
        assert len(server.requests) > 2


METHODS = ("RepositoryIndex", "ServerReady", "ModelMetadata", "ModelInfer")


def fall_asleep(server: FakeServer) -> None:
    """Answer as a proxy without a server behind it."""
    for method in METHODS:
        server.refuse(method, grpc.StatusCode.UNAVAILABLE, "no healthy upstream")


def index_requests(server: FakeServer) -> int:
    return sum(method == "RepositoryIndex" for method, _ in server.calls)


@pytest.mark.parametrize("used", [False, True])
def test_calls_wake_a_service_that_sleeps_before_or_between_them(used: bool) -> None:
    with FakeServer(served()) as server, sonic.connect(server.url), ThreadPoolExecutor(1) as thread:
        if used:
            MODEL(jets(1.0))
        fall_asleep(server)
        asked = index_requests(server)
        scores = thread.submit(MODEL, jets(1.0))
        until(lambda: index_requests(server) > asked)
        assert not scores.done()
        for method in METHODS:
            server.accept(method)
        assert scores.result().twice.tolist() == [2.0]
