from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import ml_dtypes
import numpy as np
import pytest
from tests.network.toxics import ToxicProxy
from tests.transport.shared import SERVED, score
from tests.waiting import until
from tritonclient.grpc import service_pb2

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeServer
from sonic_coffea.transport import Address, ConnectionOptions, connect_transport, time_requests
from sonic_coffea.transport._failures import translate
from sonic_coffea.transport._grpc import Connection
from sonic_coffea.transport._tensors import with_contents


@pytest.mark.parametrize(
    ("url", "target", "tls", "model"),
    [
        ("grpc://triton.example:8001", "triton.example:8001", False, None),
        ("grpc://triton.example", "triton.example:8001", False, None),
        ("grpcs://triton.example", "triton.example:443", True, None),
        ("grpc://[::1]:9000", "[::1]:9000", False, None),
        ("triton+grpc://host:1/model/2", "host:1", False, ("model", "2")),
        ("triton+grpcs://host/model", "host:443", True, ("model", None)),
        # coffea's form cannot say that the port wants TLS.
        ("triton+grpc://host:443/model", "host:443", True, ("model", None)),
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


@pytest.mark.parametrize(
    "url",
    [
        *("grpc://me:hush@h:1", "me:hush@h:443", "http://me:hush@h", "grpc://me:hu/sh@h:1"),
        *("me:hush@h/", "grpc://h:1?token=hush", "h:443?token=hush", "grpc://h:1#hush"),
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_shown(url: str, caplog: Any) -> None:
    with pytest.raises(errors.ConfigError, match="token= or headers=") as caught:
        sonic.connect(url)
    assert "hu" not in f"{caught.value!r}{caplog.text}"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("host:1", "expected a server as grpc://host:port, .* did you mean 'grpc://host:1'"),
        ("h:443", "did you mean 'grpcs://h:443'"),
        *((url, "grpc://host:port") for url in ("grpc://h:port", "grpc://h/model", "grpc://::1:1")),
        ("http://triton.example:8000", "HTTP endpoint; expected its gRPC endpoint"),
        ("triton+http://h:8000/m/1", "HTTP endpoint; expected its gRPC endpoint"),
        ("grpc://h:0", "expected a port from 1 to 65535, got 0"),
        ("grpc://h:70000", "expected a port from 1 to 65535, got 70000"),
        *((f"unix:{path}", "unix:/path/to/socket") for path in ("", "grpc", "//host/grpc", "/a\n")),
        ("unix:/" + 107 * "x", "at most 107 bytes"),
    ],
)
def test_addresses_that_are_none_are_explained(url: str, problem: str) -> None:
    with pytest.raises(errors.ConfigError, match=problem):
        Address.parse(url)


def test_loopback() -> None:
    here = ["grpc://127.0.0.1:1", "grpc://localhost:1", "grpc://[::1]:1", "unix:/run/user/1/grpc"]
    assert all(Address.parse(url).loopback for url in here)
    away = ["grpc://10.0.0.1:1", "grpc://triton.example:1"]
    assert not any(Address.parse(url).loopback for url in away)


REFUSED = "connections to all backends failing; last error: "
OTHER_HOST = "the certificate is of another host"


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ("errors resolving nowhere:1: [Domain name not found]", "no address is known"),
        ("DNS resolution failed for nowhere:1: Domain name not found", "no address is known"),
        (f"{REFUSED}UNKNOWN: No route to host", "no route leads"),
        (f"{REFUSED}something new", "something new"),
        (f"{REFUSED}Hostname Verification Check failed.", OTHER_HOST),
        (f"{REFUSED}UNKNOWN: Peer name 127.0.0.1 is not in peer certificate", OTHER_HOST),
    ],
)
def test_why_there_is_no_connection(details: str, reason: str) -> None:
    """The certificate stays the same, so that no other try helps."""
    code = grpc.StatusCode.UNAVAILABLE
    error = translate(code, details, {}, closing=False, early=False, local=False)
    assert isinstance(error, errors.AccessError) == (reason == OTHER_HOST)
    assert reason in str(error)
    if reason != OTHER_HOST:
        assert str(error).startswith("no connection to the server could be made: ")
        assert "sonic-coffea check" in str(error)


@pytest.fixture
def connection(server: sonic.LocalServer) -> Iterator[Any]:
    with connect_transport(server.url) as connected:
        yield connected


def test_a_server_is_asked(connection: Any, server: sonic.LocalServer) -> None:
    assert connection.ready()
    assert connection.info().name == "triton"
    assert [(m.name, m.state) for m in connection.index()] == [("tagger", "READY")]
    contract = connection.metadata("tagger", None)
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

    def rows() -> int:
        return int(connection.statistics("tagger", None).rows - before.rows)

    until(lambda: rows() >= 3)  # the server counts a request when it has been answered
    assert rows() == 3
    assert connection.statistics("tagger", None).compute_s > before.compute_s
    connection.close()
    connection.close()
    with pytest.raises(errors.CancelledError):
        connection.info()
    assert not connection.ready()


def test_a_connection_outlives_its_server() -> None:
    with FakeServer(SERVED) as server, connect_transport(server.url) as connection:
        before = connection.info()
        server.stop()
        with pytest.raises(errors.ServerLostError) as caught:
            connection.info()
        assert caught.value.server == server.url
        server.start()
        until(connection.ready, what="the connection to the second")
        assert connection.info() == before


def outcome(connection: Any, inputs: dict[str, np.ndarray], *, cancels: bool = False) -> Any:
    """Return what comes of a request for scores, once."""
    contract = connection.metadata("tagger", None)
    answered, outcomes = threading.Event(), []

    def done(outcome: Any) -> None:
        outcomes.append(outcome)
        answered.set()

    options: Any = {"version": None, "request_id": "r7", "done": done}
    cancel = connection.infer(contract, inputs, ["scores"], **options)
    if cancels:
        cancel()
    assert answered.wait(30)
    (only,) = outcomes
    return only


def test_a_wrong_shape_is_the_request_s_fault(connection: Any, server: sonic.LocalServer) -> None:
    inputs = {"features": np.zeros((2, 3, 4), np.float32), "mask": np.zeros((2, 1, 4), np.float32)}
    error = outcome(connection, inputs)
    assert type(error) is errors.RequestError
    assert (error.server, error.model, error.request) == (server.url, "tagger", "r7")


def test_a_cancelled_request_ends_as_cancelled(connection: Any) -> None:
    # In a message that is large enough to be still on its way.
    inputs = {n: np.zeros((64, f, 20_000), np.float32) for n, f in (("features", 2), ("mask", 1))}
    assert type(outcome(connection, inputs, cancels=True)) is errors.CancelledError


def test_a_probe_over_a_closed_connection_does_not_say_that_the_server_is_lost() -> None:
    """Connections are renewed while servers are probed."""
    connection = connect_transport("grpc://127.0.0.1:1")
    connection.close()
    outcomes: list[Any] = []
    connection.live(outcomes.append)
    assert outcomes == [None]


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


def test_a_server_may_be_far_away() -> None:
    """A connection takes several trips; each has to wait for its turn."""
    with FakeServer(SERVED) as server, ToxicProxy(server.url) as proxy:
        proxy.latency_s = 0.1
        # 0.0.0.0 leads to this machine, and is no loopback address.
        for host, far in (("0.0.0.0", True), ("127.0.0.1", False)):  # noqa: S104
            with connect_transport(proxy.url.replace("127.0.0.1", host)) as connection:
                trip_s = connection.metadata("m", None).round_trip_s
            assert trip_s >= proxy.latency_s if far else trip_s == 0


class Resolved(Address):
    """An address whose name the system resolves to two servers."""

    @property
    def target(self) -> str:
        return self.host


def test_a_name_with_several_addresses() -> None:
    """Requests take turns among the servers that it leads to."""
    with FakeServer(SERVED) as first, FakeServer(SERVED) as second:
        ports = [Address.parse(server.url).port for server in (first, second)]
        name = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        with Connection(Resolved(host=name, port=1), ConnectionOptions()) as connection:
            contract = connection.metadata("m", None)

            def numbers(requests: int) -> list[int]:
                time_requests(connection, contract, None, contract.zeros(1), requests=requests)
                return [server.statistics["m", "rows"] for server in (first, second)]

            # At first, those that are connected already take turns.
            until(lambda: min(numbers(2)) > 0)
            before = numbers(1)
            after = numbers(100)
            assert all(now - then > 20 for now, then in zip(after, before, strict=True))


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 on this machine")
def test_scores_through_ipv6() -> None:
    with FakeServer(SERVED) as server:
        proxy = ToxicProxy(server.url)
        proxy.host = "[::1]"
        with proxy, sonic.connect(proxy.url) as pool:
            score(pool)
            assert [s.url for s in pool.servers] == [proxy.url]
            assert pool.check().ok


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """By the first call: a connection is made without reading files."""
    path = tmp_path / "none.pem"
    options = ConnectionOptions(tls_root=str(path))
    connection = connect_transport("grpcs://127.0.0.1:9", options=options)
    for message in ("none.pem.*No such file", "none.pem.*expected certificates in PEM format"):
        with pytest.raises(errors.ConfigError, match=message) as caught:
            connection.metadata("m", None)
        assert caught.value.__cause__ is None
        path.write_text("nothing")
    connection.close()
    with pytest.raises(errors.CancelledError, match="closed"):
        connection.info()


def test_a_server_without_tls_is_lost_to_a_client_with_it() -> None:
    with (
        FakeServer({}) as server,
        connect_transport(server.url.replace("grpc://", "grpcs://")) as connection,
        pytest.raises(errors.ServerLostError),
    ):
        connection.info()


def test_outputs_that_are_there_twice_are_refused() -> None:
    def twice(answer: Any) -> None:
        answer.outputs.append(answer.outputs[0])
        answer.raw_output_contents.append(bytes(len(answer.raw_output_contents[0])))

    with FakeServer(SERVED) as server, sonic.connect(server.url) as pool:
        server.answer_wrongly(twice)
        with pytest.raises(errors.ResponseError, match="'y' is there twice"):
            score(pool)
        score(pool)
