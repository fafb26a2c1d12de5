"""Servers that come, leave and return while requests are in flight."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.pool.scripted import MODEL, ScriptedServer, connect, doubled, objects, pool_of
from tests.waiting import until

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.pool._pool import watch_servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_servers_are_changed_while_rows_are_out(servers: dict[str, ScriptedServer]) -> None:
    one, two = servers.values()
    one.gate.clear()
    with pool_of(str(one.address), max_in_flight=2) as pool:
        pending = MODEL.submit(objects(40), pool=pool)
        until(lambda: one.out == 2)
        pool.set_servers(str(two.address))
        until(lambda: len(two.requests) == 8)
        assert [s.url for s in pool.servers] == [str(two.address)]
        assert not one.closed
        one.gate.set()
        assert doubled(pending.result()) == list(range(40))
        until(lambda: one.closed)
        assert len(one.requests) == 2
        assert doubled(MODEL(objects(40), pool=pool)) == list(range(40))
        with pytest.raises(errors.ConfigError, match="did you mean 'grpc://s1:8001'"):
            pool.set_servers("s1:8001")


def test_servers_are_changed_before_the_first_call(servers: dict[str, ScriptedServer]) -> None:
    one, two = servers.values()
    with pool_of(str(one.address)) as pool:
        pool.set_servers(str(two.address))
        assert doubled(MODEL(objects(8), pool=pool)) == list(range(8))
        assert [s.url for s in pool.servers] == [str(two.address)]
    assert one.described == 0


def test_a_server_that_takes_long_to_let_go_holds_up_nobody(
    servers: dict[str, ScriptedServer],
) -> None:
    """It may be asked to give memory back, and be gone."""
    one, two = servers.values()
    answered, closed = threading.Event(), []
    one.close = lambda: closed.append(answered.wait(20))  # type: ignore[method-assign]
    with pool_of(*servers) as pool:
        MODEL.check(pool)
        pool.set_servers(str(two.address))
        assert doubled(MODEL(objects(40), pool=pool)) == list(range(40))
        assert not closed
        answered.set()


def written(path: Path, text: str | bytes) -> None:
    """Write a file at once, later than it was written before."""
    at = path.stat().st_mtime_ns if path.exists() else 0
    new = path.with_suffix(".new")
    new.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(new, ns=(at + 10**9, at + 10**9))
    new.replace(path)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "servers.txt"
    written(path, "grpc://s1:8001\n")
    return path


class Looks(threading.Event):
    """The end of a watch, which counts how often the watch looked at its file."""

    number = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.number += 1
        return super().wait(timeout)


@contextlib.contextmanager
def watched(path: Path, pool: Pool) -> Iterator[Looks]:
    """Have a pool follow a file of servers, which is looked at often."""
    looks = Looks()
    args = str(path), pool.settings.servers, pool.set_servers, looks, 0.001
    thread = threading.Thread(target=watch_servers, args=args)
    thread.start()
    try:
        yield looks
    finally:
        looks.set()
        thread.join()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"# caf\xe9\ngrpc://s2:8001\n", "got bytes that are not UTF-8"),
        ("s2:8001\n", "did you mean 'grpc://s2:8001'"),
        ("grpc://s2:8001\ngrpc://s3:8001\n", "certificate is gone"),
    ],
)
def test_a_file_of_servers_that_cannot_be_used_changes_nothing(
    servers: dict[str, ScriptedServer],
    listed: Path,
    text: str | bytes,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = servers.values()

    def connecting(url: str, **_: Any) -> ScriptedServer:
        if url not in servers:
            raise OSError("the certificate is gone")
        return servers[url]

    def scored() -> bool:
        return doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))

    with (
        Pool(Settings.make(str(one.address)), connect=connecting) as pool,
        watched(listed, pool) as looks,
    ):
        until(lambda: scored() and looks.number > 2)
        written(listed, text)
        before = looks.number
        until(lambda: scored() and looks.number > before + 4)
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


def test_a_file_of_servers_that_cannot_be_reached_holds_up_nobody(
    servers: dict[str, ScriptedServer], listed: Path
) -> None:
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
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))
        until(reading)
        assert pool.telemetry()[1] == {("m", None): 0}
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))
        written(listed, "grpc://s1:8001\n")
        os.close(pipes[0])
