from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import awkward as ak
import grpc
import ml_dtypes
import numpy as np
import pytest
from tests.network.tritons import Triton
from tests.ports import held_port
from tests.waiting import until
from tritonclient.grpc import service_pb2

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import Address, ConnectionOptions, Tls, connect_transport
from sonic_coffea.transport._failures import translate
from sonic_coffea.transport._tensors import with_contents

if TYPE_CHECKING:
    from pathlib import Path

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("url", "target", "tls", "model"),
    [
        ("grpc://triton.example:8001", "triton.example:8001", False, None),
        ("grpc://triton.example", "triton.example:8001", False, None),
        ("grpcs://triton.example", "triton.example:443", True, None),
        ("grpc://[::1]:9000", "[::1]:9000", False, None),
        ("triton+grpc://host:1/model/2", "host:1", False, ("model", "2")),
        ("triton+grpcs://host/model", "host:443", True, ("model", None)),
        # Whom port 443 belongs to, coffea's form does not say, nor does a bare name.
        ("triton+grpc://host:443/model", "host:443", True, ("model", None)),
        ("triton.example:443", "triton.example:443", True, None),
        ("[::1]:443", "[::1]:443", True, None),
        ("grpc://host:443", "host:443", False, None),
        ("unix:/run/user/1/grpc:1", "unix:/run/user/1/grpc:1", False, None),
        ("unix:///run/user/1/grpc", "unix:/run/user/1/grpc", False, None),
    ],
)
def test_addresses(url: str, target: str, tls: bool, model: Any) -> None:
    address = Address.parse(url)
    assert address.target == target
    assert address.tls is tls
    assert (address.model, address.version) == (model or (None, None))
    assert Address.parse(address.url).target == target


def test_a_port_that_is_taken_for_tls_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert Address.parse("triton+grpc://once.example:443/m/1").url == "grpcs://once.example:443"
    (message,) = caplog.messages
    assert "is taken for 'triton+grpcs://once.example/m/1', as port 443" in message


@pytest.mark.parametrize(
    "url",
    [
        *("grpc://me:hush@h:1", "me:hush@h:1", "http://me:hush@h", "grpc://me:hu/sh@h:1"),
        *("grpcc://me:hush@h", "grpc://hush@h:1", "grpc://me:hush@h:1/m", "me:hush@h:443"),
        *("grpc://h:1?token=hush", "grpc://h:1/?hush", "h:443?token=hush", "grpc://h:1#hush"),
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_shown(url: str, caplog: Any) -> None:
    with pytest.raises(errors.ConfigError, match="token= or headers=") as caught:
        sonic.connect(url)
    assert "hu" not in f"{caught.value!r}{caplog.text}"


@pytest.mark.parametrize(
    "url",
    [
        "host:1",
        "http://host",
        "grpc://",
        "grpc://h:port",
        "grpc://h/model",
        "grpc://u:p@h",
        "grpc://::1:8001",
        "grpc://[::1:8001",
        "unix:",
        "unix:grpc",
        "unix://host/grpc",
        "unix:/a\n",
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(errors.ConfigError):
        Address.parse(url)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("grpc://h:0", "expected a port from 1 to 65535, got 0"),
        ("grpc://h:70000", "Port out of range"),
        ("unix:/" + 107 * "x", "at most 107 bytes"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(url: str, problem: str) -> None:
    with pytest.raises(errors.ConfigError, match=problem):
        sonic.connect(url)


@pytest.mark.parametrize("url", ["http://triton.example:8000", "triton+http://h:8000/m/1"])
def test_the_port_of_http_is_named(url: str) -> None:
    with pytest.raises(errors.ConfigError, match="HTTP endpoint; expected its gRPC endpoint"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("grpc://127.0.0.1:1", True),
        ("grpc://localhost:1", True),
        ("grpc://[::1]:1", True),
        ("unix:/run/user/1/grpc", True),
        ("grpc://10.0.0.1:1", False),
        ("grpc://triton.example:1", False),
    ],
)
def test_loopback(url: str, loopback: bool) -> None:
    assert Address.parse(url).loopback is loopback


EXPECTED = {
    Code.CANCELLED: errors.ServerLostError,  # by the server; by us it is a CancelledError
    Code.UNKNOWN: errors.InferenceError,
    Code.INVALID_ARGUMENT: errors.RequestError,
    Code.DEADLINE_EXCEEDED: errors.DeadlineError,
    Code.NOT_FOUND: errors.ModelNotFoundError,
    Code.ALREADY_EXISTS: errors.RequestError,
    Code.PERMISSION_DENIED: errors.AccessError,
    Code.RESOURCE_EXHAUSTED: errors.OverloadError,
    Code.FAILED_PRECONDITION: errors.RequestError,
    Code.ABORTED: errors.ServerLostError,
    Code.OUT_OF_RANGE: errors.RequestError,
    Code.UNIMPLEMENTED: errors.RequestError,
    Code.INTERNAL: errors.InferenceError,
    Code.UNAVAILABLE: errors.ServerLostError,
    Code.DATA_LOSS: errors.ServerLostError,
    Code.UNAUTHENTICATED: errors.AccessError,
}


@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK])
def test_every_status_has_a_meaning(code: Any) -> None:
    error = translate(code, "what the server said", server="grpc://s:1", model="m")
    assert type(error) is EXPECTED[code]
    assert "what the server said" in str(error)
    assert error.server == "grpc://s:1"


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (Code.UNAVAILABLE, "This protocol is restricted, expecting header", errors.AccessError),
        (Code.UNAVAILABLE, "request 3 exceeds maximum queue size", errors.OverloadError),
        (
            Code.UNAVAILABLE,
            "Request for unknown model: 'x' is not found",
            errors.ModelNotFoundError,
        ),
        (Code.INVALID_ARGUMENT, "requested model 'x' is not available", errors.ModelNotFoundError),
        (Code.RESOURCE_EXHAUSTED, "Received message larger than max", errors.RequestTooLargeError),
    ],
)
def test_words_that_tell_one_status_apart(code: Any, details: str, kind: Any) -> None:
    assert type(translate(code, details)) is kind


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ("errors resolving nowhere:1: [Domain name not found]", "no address is known"),
        ("connections to all backends failing; UNKNOWN: No route to host", "no route leads"),
        ("connections to all backends failing; something new", "something new"),
    ],
)
def test_why_there_is_no_connection(details: str, reason: str) -> None:
    error = translate(Code.UNAVAILABLE, details)
    assert str(error).startswith("no connection to the server could be made: ")
    assert reason in str(error)
    assert "sonic-coffea check" in str(error)


def test_cancelled_by_us() -> None:
    assert type(translate(Code.CANCELLED, "", closing=True)) is errors.CancelledError


def test_a_server_is_asked(server: sonic.LocalServer) -> None:
    connection = connect_transport(server.url)
    assert connection.ready()
    assert connection.info().name == "triton"
    assert [(m.name, m.state) for m in connection.models()] == [("tagger", "READY")]
    contract = connection.contract("tagger", None)
    assert contract.max_rows == 64
    assert {t.name: (t.datatype, t.shape) for t in contract.inputs} == {
        "features": ("FP32", (2, -1)),
        "mask": ("FP32", (1, -1)),
    }
    before = connection.statistics("tagger", None)
    with sonic.connect(server) as pool:
        model = sonic.Model(
            "tagger",
            {"features": sonic.Padded(["x", "x"], 2), "mask": sonic.Mask(2)},
            {"scores": ["a", "b"]},
        )
        model(ak.Array([{"x": [1.0]}] * 3), pool=pool)
    # The server counts a request when it has been answered.
    deadline = time.monotonic() + 20
    while (after := connection.statistics("tagger", None)).rows - before.rows < 3:
        assert time.monotonic() < deadline
    assert after.rows - before.rows == 3
    assert after.compute_s > before.compute_s
    connection.close()
    connection.close()
    with pytest.raises(errors.CancelledError):
        connection.info()
    assert not connection.ready()


@pytest.mark.server
def test_a_header_that_a_server_demands(repository: Path, tmp_path: Path) -> None:
    demanded = "--grpc-restricted-protocol=health,metadata:key=secret"
    with held_port() as port:
        triton = Triton(repository, tmp_path, port, arguments=[demanded])
        triton.launch()
        try:
            name = "triton-grpc-protocol-key"
            options = ConnectionOptions(headers={name: "secret"})
            with connect_transport(triton.url, options=options) as connection:
                until(connection.ready, what="the server")
            options = ConnectionOptions(headers={name: "guess"})
            with connect_transport(triton.url, options=options) as connection:
                with pytest.raises(errors.AccessError, match="restricted"):
                    connection.info()
                assert not connection.ready()
        finally:
            triton.end()


@pytest.mark.server
def test_a_connection_outlives_its_server(repository: Path) -> None:
    server = sonic.LocalServer(repository, restart=False)
    with server:
        connection = connect_transport(server.url)
        before = connection.info()
    with pytest.raises(errors.ServerLostError, match="or is on another machine") as caught:
        connection.info()
    assert caught.value.server == server.url
    with server:
        until(connection.ready, what="the connection to the second")
        assert connection.info() == before
        connection.close()


def test_a_wrong_shape_is_the_request_s_fault(server: sonic.LocalServer) -> None:
    connection = connect_transport(server.url)
    contract = connection.contract("tagger", None)
    answered, outcomes = threading.Event(), []

    def done(outcome: Any) -> None:
        outcomes.append(outcome)
        answered.set()

    inputs = {"features": np.zeros((2, 3, 4), np.float32), "mask": np.zeros((2, 1, 4), np.float32)}
    connection.infer(
        contract, lambda _: inputs, ["scores"], version=None, request_id="r7", done=done
    )
    assert answered.wait(30)
    (error,) = outcomes
    assert type(error) is errors.RequestError
    assert (error.server, error.model, error.request) == (server.url, "tagger", "r7")
    connection.close()


@pytest.mark.parametrize(
    "tensors",
    [
        [np.arange(6, dtype=np.float32).reshape(1, 2, 3)],
        [np.arange(100_000.0), np.ones((0, 3), np.int64), np.arange(4, dtype=np.uint8)],
        [np.asfortranarray(np.arange(6.0).reshape(2, 3))],
        [np.ones(3, np.float16), np.ones(3, ml_dtypes.bfloat16), np.ones(3, np.bool_)],
    ],
)
def test_messages_are_protobuf_s(tensors: list[np.ndarray]) -> None:
    request = service_pb2.ModelInferRequest(model_name="m", id="7")
    expected = service_pb2.ModelInferRequest(model_name="m", id="7")
    expected.raw_input_contents.extend(t.tobytes() for t in tensors)
    assert service_pb2.ModelInferRequest.FromString(with_contents(request, tensors)) == expected


def test_nobody_there() -> None:
    connection = connect_transport("grpc://127.0.0.1:9")
    assert not connection.ready()
    with pytest.raises(errors.ServerLostError):
        connection.contract("m", None)
    connection.close()


@pytest.mark.server
def test_a_server_may_be_far_away(repository: Path) -> None:
    """A connection takes several trips; each has to wait for its turn."""
    with (
        sonic.LocalServer(repository, port=0, stop_timeout_s=0.0) as server,
        SlowProxy(Address.parse(server.url).port, delay_s=0.3) as proxy,
    ):
        # 0.0.0.0 leads to this machine, and is no loopback address.
        for host, far in (("0.0.0.0", True), ("127.0.0.1", False)):  # noqa: S104
            connection = connect_transport(f"grpc://{host}:{proxy.port}")
            assert connection.info().name == "triton"
            assert (connection.round_trip_s >= proxy.delay_s) is far
            assert (connection.round_trip_s > 0.0) is far
            connection.close()


class Resolved(Address):
    """An address whose name the system resolves to two servers."""

    @property
    def target(self) -> str:
        return self.host


def test_a_name_with_several_addresses() -> None:
    """Requests take turns among the servers that it leads to."""
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["top"]})
    served = {"m": FakeModel.of(model)}
    with FakeServer(served) as first, FakeServer(served) as second:
        ports = [Address.parse(server.url).port for server in (first, second)]
        name = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        with connect_transport(Resolved(host=name, port=1)) as connection:
            contract = connection.contract("m", None)

            def numbers(requests: int) -> list[int]:
                connection.ask(contract, None, contract.zeros(1), requests=requests)
                return [server.statistics["m", "rows"] for server in (first, second)]

            # At first, those that are connected already take turns.
            until(lambda: min(numbers(2)) > 0)
            before = numbers(1)
            after = numbers(100)
            assert all(now - then > 20 for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", ["unix", "ipv6"])
def test_scores_through_a_unix_socket_and_ipv6(tmp_path: Path, kind: str) -> None:
    if kind == "ipv6" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["top"]})
    path = tmp_path / "grpc:1"
    with (
        FakeServer({"m": FakeModel.of(model)}) as server,
        SlowProxy(Address.parse(server.url).port, path if kind == "unix" else "::1") as proxy,
    ):
        url = f"unix:{path}" if kind == "unix" else f"grpc://[::1]:{proxy.port}"
        with sonic.connect(url) as pool:
            assert model(ak.Array([[{"pt": 0.0}], []])).top.tolist() == [[0.5], []]
            assert [s.url for s in pool.servers] == [url]
            assert pool.check().ok


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class SlowProxy:
    """Passes bytes on to a port of this machine, each with a delay."""

    def __init__(self, port: int, at: str | Path = "127.0.0.1", *, delay_s: float = 0.0) -> None:
        self._to, self._at = port, at
        self.delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> SlowProxy:
        self._thread.start()
        starting = self._listen()
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _listen(self) -> asyncio.Server:
        if isinstance(self._at, str):
            return await asyncio.start_server(self._serve, self._at, 0)
        return await asyncio.start_unix_server(self._serve, self._at)

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, to = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            await asyncio.gather(self._pass_on(reader, to), self._pass_on(back, writer))
        finally:
            writer.close()
            to.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(self.delay_s)
            writer.write(data)
        writer.close()


def test_a_call_does_not_begin_on_a_channel_that_was_closed() -> None:
    """A channel that was replaced is closed when the next is replaced, too."""
    with FakeServer({}) as server, connect_transport(server.url) as connection:
        first = connection._open()
        connection._replace(first)
        connection._replace(connection._open())
        call, channel, _ = connection._begin(
            "ServerReady", service_pb2.ServerReadyRequest(), 20, first
        )
        assert channel is not first
        assert call.result().ready


def test_unknown_models_and_versions(server: sonic.LocalServer) -> None:
    connection = connect_transport(server.url)
    with pytest.raises(errors.ModelNotFoundError, match="did you mean 'tagger'") as caught:
        connection.contract("taggr", None)
    assert (caught.value.server, caught.value.model) == (server.url, "taggr")
    with pytest.raises(errors.ModelNotFoundError, match=r"version 9; it has version 1"):
        connection.contract("tagger", "9")
    with pytest.raises(errors.ModelNotFoundError):
        connection.statistics("taggr", None)
    connection.close()


def test_a_token_is_asked_for_once_and_never_shown(server: sonic.LocalServer) -> None:
    tokens: list[str] = []

    def token() -> str:
        tokens.append(f"hush-{len(tokens)}")
        return tokens[-1]

    options = ConnectionOptions(token=token, headers={"X-Key": "hush"})
    assert "hush" not in repr(options)
    connection = connect_transport(server.url, options=options)
    assert connection.ready()
    assert connection.ready()
    assert tokens == ["hush-0"]
    connection.close()


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """By the first call: a connection is made without reading files."""
    path = tmp_path / "none.pem"
    options = ConnectionOptions(tls=Tls(root=str(path)))
    connection = connect_transport("grpcs://127.0.0.1:9", options=options)
    for message in ("none.pem.*No such file", "begins with -----BEGIN"):
        with pytest.raises(errors.ConfigError, match=message) as caught:
            connection.contract("m", None)
        assert caught.value.__cause__ is None
        path.write_text("nothing")
    connection.close()
    with pytest.raises(errors.CancelledError, match="closed"):
        connection.info()


def test_a_server_without_tls_is_lost_to_a_client_with_it() -> None:
    with FakeServer({}) as server:
        connection = connect_transport(server.url.replace("grpc://", "grpcs://"))
        with pytest.raises(errors.ServerLostError):
            connection.info()
        connection.close()


def test_a_cancelled_request_ends_as_cancelled(server: sonic.LocalServer) -> None:
    # In a message that is large enough to be still on its way.
    messages = ConnectionOptions(shared_memory=False)
    connection = connect_transport(server.url, options=messages)
    contract = connection.contract("tagger", None)
    answered, outcomes = threading.Event(), []

    def done(outcome: Any) -> None:
        outcomes.append(outcome)
        answered.set()

    inputs = {n: np.zeros((64, f, 20_000), np.float32) for n, f in (("features", 2), ("mask", 1))}
    options: Any = {"version": None, "request_id": "r", "done": done}
    handle = connection.infer(contract, lambda _: inputs, ["scores"], **options)
    handle.cancel()
    assert answered.wait(30)
    assert [type(outcome) for outcome in outcomes] == [errors.CancelledError]
    connection.close()
