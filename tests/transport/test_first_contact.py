"""Servers that were never there, or that this process has stopped: errors that come soon."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.network.toxics import Forwarded, ToxicProxy
from tests.ports import held_port
from tests.transport.shared import SERVED, score

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeServer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers that were never there be given up soon."""
    monkeypatch.setattr("sonic_coffea.pool._tuning.SILENCE_S", 0.1)


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """If this is root, be nobody, as no folder is closed to root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("grpc://127.0.0.1:{port}", "nothing was ever reached"),
        # The folder of a local server that was stopped is gone, so that it cannot come back.
        ("unix:{folder}/stopped/grpc:1", "it has ended"),
        # A local server whose supervisor was killed leaves its folder.
        ("unix:{folder}/grpc:1", "it has ended"),
        ("unix:/", "nothing was ever reached"),
    ],
)
def test_servers_that_are_not_there_are_not_waited_for(
    url: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "server.json").write_text("{}")
    with (
        held_port() as port,
        sonic.connect(url.format(port=port, folder=tmp_path), retry_timeout_s=1000.0) as pool,
        pytest.raises(errors.ServerLostError, match=message),
    ):
        score(pool)


def test_a_server_in_a_folder_of_another_user_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o000)
    with (
        sonic.connect(f"unix:{tmp_path}/folder/grpc", retry_timeout_s=1000.0) as pool,
        as_another_user(),
        pytest.raises(errors.ServerLostError, match="the socket is another user's"),
    ):
        score(pool)


class Tunnel(Forwarded):
    """What a client asks a web proxy to lead to; it is led to the target."""

    async def serve(self, reader: asyncio.StreamReader) -> None:
        self.server.asked.append((await reader.readuntil(b"\r\n\r\n")).splitlines()[0])
        self.writers[0].write(b"HTTP/1.1 200 OK\r\n\r\n")
        await super().serve(reader)


class WebProxy(ToxicProxy):
    link = Tunnel

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.asked: list[bytes] = []


def test_a_proxy_leads_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the option names, and not that of the environment."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with FakeServer(SERVED) as server, WebProxy(server.url) as proxy:
        url = proxy.url.replace("grpc", "http")
        with sonic.connect("grpc://inside.example:8001", proxy=url) as pool:
            score(pool)
        with sonic.connect(server.url) as pool:
            score(pool)
    assert proxy.asked == [b"CONNECT inside.example:8001 HTTP/1.1"]
