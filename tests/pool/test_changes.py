"""Servers may change while rows are out, and what they have is asked once, for a limited time."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.doubling import MODEL, jets, twice
from tests.pool.scripted import LOST, ONE, TWO, ScriptedServer, connect, pool_of
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings


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


def test_models_do_not_wait_for_questions_about_others(one: ScriptedServer) -> None:
    third = sonic.Model("third", MODEL.inputs, MODEL.outputs)
    with pool_of(ONE) as pool, ThreadPoolExecutor(4) as threads:
        MODEL.check(pool)
        one.blocks = "metadata"
        checks = [threads.submit(SLOW.check, pool) for _ in range(4)]
        assert one.blocked.wait(60)
        one.blocks = ""
        for model in (MODEL, third):
            assert twice(model(jets(*range(4)), pool=pool, timeout_s=60)) == [0, 1, 2, 3]
        one.released.set()
        for check in checks:
            check.result(60)
        assert one.described.count("slow") == 1


def test_deadlines_are_those_of_the_whole_call(one: ScriptedServer) -> None:
    """Also of one who waits for what another asks: the server is asked once."""
    one.blocks = "metadata"
    with pool_of(ONE) as pool, ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            with pytest.raises(errors.DeadlineError, match=r"within 0.05 s.*model slow"):
                SLOW(jets(*range(4)), pool=pool, timeout_s=0.05)
            waiting = thread.submit(SLOW.check, pool)
        assert one.blocked.wait(60)
        assert one.described == ["slow"]
        one.released.set()
        waiting.result(60)
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
