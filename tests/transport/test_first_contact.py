"""Servers that were never there, or that this process has stopped: errors that come soon."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import awkward as ak
import pytest
from tests.ports import held_port
from tests.transport.shared import forward

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from pathlib import Path

MODEL = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
EVENTS = ak.Array([[{"pt": 0.0}], []])


def test_a_port_where_nothing_listens_is_not_waited_for() -> None:
    with (
        held_port() as port,
        sonic.connect(f"grpc://127.0.0.1:{port}", retry_timeout_s=1000.0) as pool,
        pytest.raises(errors.ServerLostError, match="nothing was ever reached"),
    ):
        MODEL(EVENTS, pool=pool)


def test_a_local_server_that_was_stopped_is_an_error_at_once(tmp_path: Path) -> None:
    """Its folder is gone, so that it cannot come back."""
    with (
        sonic.connect(f"unix:{tmp_path}/stopped/grpc:1", retry_timeout_s=1000.0) as pool,
        pytest.raises(errors.ServerLostError, match="it has ended"),
    ):
        MODEL(EVENTS, pool=pool)


def test_a_proxy_leads_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the option names, and not that of the environment."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    asked: list[bytes] = []
    with (
        FakeServer({"m": FakeModel.of(MODEL)}) as server,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):

        def accept(client: socket.socket) -> socket.socket:
            asked.append(client.recv(65536).splitlines()[0])
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            return client

        forward(listener, server.url, accept)
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with sonic.connect("grpc://inside.example:8001", proxy=proxy) as pool:
            assert MODEL(EVENTS, pool=pool).top.tolist() == [[0.5], []]
        with sonic.connect(server.url) as pool:
            assert MODEL(EVENTS, pool=pool).top.tolist() == [[0.5], []]
    assert asked == [b"CONNECT inside.example:8001 HTTP/1.1"]


@pytest.mark.parametrize("proxy", ["proxy:3128", "https://proxy:1", "http://me:hush@proxy:1", 5])
def test_a_proxy_is_a_url_without_a_secret(proxy: object) -> None:
    with pytest.raises(errors.ConfigError, match=r"proxy: expected a URL such") as caught:
        sonic.connect("grpc://inside.example:8001", proxy=proxy)
    assert "hush" not in str(caught.value)
