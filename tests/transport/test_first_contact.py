"""Servers that were never there, or that this process has stopped: errors that come soon."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from tests.ports import held_port
from tests.transport.shared import SERVED, forward, score

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeServer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("grpc://127.0.0.1:{port}", "nothing was ever reached"),
        # The folder of a local server that was stopped is gone, so that it cannot come back.
        ("unix:{folder}/stopped/grpc:1", "it has ended"),
    ],
)
def test_servers_that_are_not_there_are_not_waited_for(
    url: str, message: str, tmp_path: Path
) -> None:
    with (
        held_port() as port,
        sonic.connect(url.format(port=port, folder=tmp_path), retry_timeout_s=1000.0) as pool,
        pytest.raises(errors.ServerLostError, match=message),
    ):
        score(pool)


def test_a_proxy_leads_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the option names, and not that of the environment."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    asked: list[bytes] = []
    with (
        FakeServer(SERVED) as server,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):

        def accept(client: socket.socket) -> socket.socket:
            asked.append(client.recv(65536).splitlines()[0])
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            return client

        forward(listener, server.url, accept)
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with sonic.connect("grpc://inside.example:8001", proxy=proxy) as pool:
            score(pool)
        with sonic.connect(server.url) as pool:
            score(pool)
    assert asked == [b"CONNECT inside.example:8001 HTTP/1.1"]
