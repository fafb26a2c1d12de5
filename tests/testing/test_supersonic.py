"""What SuperSONIC's proxy answers: a refused index, limited connections, routes that are cut."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import awkward as ak
import grpc
import numpy as np
import pytest
from tests.commands import run
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})
CUT = "upstream request timeout"


def double(inputs: Any) -> dict[str, Any]:
    return {"y": 2 * inputs["x"]}


def objects(n: int) -> ak.Array:
    return ak.zip({"pt": np.arange(n, dtype=np.float32)})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({"m": FakeModel.of(MODEL, double, max_rows=4)}) as running:
        yield running


@pytest.fixture
def saturated(server: FakeServer) -> FakeServer:
    """Its proxy refuses the index: status CANCELLED, no words."""
    server.refuse("RepositoryIndex", grpc.StatusCode.CANCELLED)
    return server


def test_inference_goes_on_while_the_index_is_refused(saturated: FakeServer) -> None:
    with Pool(Settings.make(saturated.url)) as pool:
        assert MODEL(objects(40), pool=pool).twice.tolist() == [2.0 * n for n in range(40)]
        assert pool.statistics.total().retries == 0


def test_a_model_that_is_not_there_is_known_without_the_index(saturated: FakeServer) -> None:
    saturated.unload("m")
    with (
        Pool(Settings.make(saturated.url)) as pool,
        pytest.raises(errors.ModelNotFoundError, match="does not have"),
    ):
        MODEL(objects(4), pool=pool)


def test_what_a_refused_index_means_is_said(saturated: FakeServer) -> None:
    connection = connect_transport(saturated.url)
    with pytest.raises(errors.OverloadError, match=r"no new clients .* SuperSONIC .* saturated"):
        connection.models()
    connection.close()
    listed = run("models", saturated.url)
    assert listed.returncode == 1
    assert "admits no new clients at the moment" in listed.stderr.replace("\n", " ")
    checked = run("check", saturated.url, "m", "--json")
    assert checked.returncode == 0
    assert all(step["ok"] for step in json.loads(checked.stdout)["steps"])


class Listener:
    """Forwards connections to a server, but only so many new ones, as a proxy with a limit."""

    def __init__(self, port: int, most: int) -> None:
        self.accepted = self.refused = 0
        self._port, self._most = port, most
        self._pairs: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"grpc://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if self.accepted == self._most:
                self.refused += 1
                client.close()
                continue
            self.accepted += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            self._pairs += [client, server]
            for here, there in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(here, there), daemon=True).start()

    @staticmethod
    def _pass(here: socket.socket, there: socket.socket) -> None:
        try:
            while block := here.recv(65536):
                there.sendall(block)
            there.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for endpoint in (self._socket, *self._pairs):
            endpoint.close()


@pytest.mark.parametrize("channels", [1, 3])
def test_few_connections_that_last(server: FakeServer, channels: int) -> None:
    """However many calls, threads and pools' looks at the server there are."""
    listener = Listener(int(server.url.rpartition(":")[2]), most=channels)
    with Pool(Settings.make(listener.url, channels=channels)) as pool:
        for _ in range(3):
            pendings = [MODEL.submit(objects(40), pool=pool) for _ in range(10)]
            for pending in pendings:
                assert len(pending.result(timeout_s=60)) == 40
    assert (listener.accepted, listener.refused) == (channels, 0)
    listener.close()


def test_a_connection_that_is_refused_for_a_while(server: FakeServer) -> None:
    """The rows wait for the listener to accept it."""
    listener = Listener(int(server.url.rpartition(":")[2]), most=0)
    with Pool(Settings.make(listener.url, retry_timeout_s=60)) as pool:
        pending = MODEL.submit
        scores: list[Any] = []
        thread = threading.Thread(
            target=lambda: scores.append(pending(objects(8), pool=pool).result(timeout_s=60))
        )
        thread.start()
        until(lambda: listener.refused >= 2, 30)
        listener._most = 1
        thread.join(60)
        assert scores[0].twice.tolist() == [2.0 * n for n in range(8)]
    listener.close()


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED], ids=str
)
def test_routes_that_are_cut_slow_the_sender_down(server: FakeServer, code: Any) -> None:
    with Pool(Settings.make(server.url)) as pool:
        MODEL(objects(400), pool=pool)
        server.fail(code, CUT, times=3, every=5)
        assert MODEL(objects(400), pool=pool).twice.tolist() == [2.0 * n for n in range(400)]
        assert pool.statistics.total().retries == 3
        assert pool.statistics.masked == 0


def test_a_request_that_is_always_cut(server: FakeServer) -> None:
    server.fail(grpc.StatusCode.UNAVAILABLE, CUT, times=1000)
    with (
        Pool(Settings.make(server.url, request_timeout_s=1.0)) as pool,
        pytest.raises(errors.OverloadError, match=r"upstream request timeout; .*max_request_bytes"),
    ):
        MODEL(objects(4), pool=pool)
