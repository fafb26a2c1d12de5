"""Addresses, connections and contracts; servers that were never there, or have ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import awkward as ak
import grpc
import ml_dtypes
import numpy as np
import pytest
from tests.network.toxics import Forwarded, ToxicProxy
from tests.ports import held_port
from tests.scripts import python
from tests.transport.shared import MODEL, SERVED, score
from tests.waiting import until
from tritonclient.grpc import service_pb2

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import (
    Address,
    ConnectionOptions,
    Contract,
    TensorSpec,
    connect_transport,
    time_requests,
)
from sonic_coffea.transport._failures import translate
from sonic_coffea.transport._grpc import Connection
from sonic_coffea.transport._heap import keep_memory
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
        *((f"grpc://{host}:8001", "grpc://host:port") for host in ("tri\x07ton", "a\u202eb")),
    ],
)
def test_addresses_that_are_none_are_explained(url: str, problem: str) -> None:
    with pytest.raises(errors.ConfigError, match=problem) as caught:
        Address.parse(url)
    assert str(caught.value).isprintable()
    assert "://" not in url or "did you mean" not in str(caught.value)


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


def test_push_back_is_in_milliseconds() -> None:
    code, how = grpc.StatusCode.UNAVAILABLE, {"closing": False, "early": False, "local": False}
    for sent, expected in (("1500", 1.5), ("-1", None)):
        error: Any = translate(code, "later", {"grpc-retry-pushback-ms": sent}, **how)
        assert error.retry_after_s == expected


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
        assert len(server.calls) == 1  # what has an answer is not asked again
        server.stop()
        with pytest.raises(errors.ServerLostError) as caught:
            connection.info()
        assert caught.value.server == server.url
        probed: SimpleQueue[Any] = SimpleQueue()
        connection.live(probed.put)
        assert isinstance(probed.get(timeout=30), errors.ServerLostError)
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


def test_requests_of_a_wrong_shape_and_cancelled_ones_end_as_such(
    connection: Any, server: sonic.LocalServer
) -> None:
    inputs = {"features": np.zeros((2, 3, 4), np.float32), "mask": np.zeros((2, 1, 4), np.float32)}
    error = outcome(connection, inputs)
    assert type(error) is errors.RequestError
    assert (error.server, error.model, error.request) == (server.url, "tagger", "r7")
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


def test_a_connection_that_was_lost_is_renewed() -> None:
    """A network may drop a connection without a word; its questions have an answer all the same."""
    server = FakeServer(SERVED)
    with server, ToxicProxy(server.url) as proxy, connect_transport(proxy.url) as connection:
        assert connection.info()
        proxy.lose()
        proxy.find()
        assert connection.info()


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


@pytest.fixture
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


@pytest.mark.usefixtures("soon")
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


@pytest.mark.usefixtures("soon")
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


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_requests_are_compressed(compression: str) -> None:
    with FakeServer(SERVED) as server, ToxicProxy(server.url) as proxy:
        with sonic.connect(proxy.url, compression=compression) as pool:
            scores = MODEL([[{"pt": 0.0}] * 10_000], pool=pool)
        assert scores.top.tolist() == [[0.5] * 10_000]
        assert proxy.sent_bytes < pool.statistics.total().sent_bytes


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


FLOAT, DOUBLE = np.dtype("float32"), np.dtype("float64")
CONTRACT = Contract(
    model="m",
    version="3",
    inputs=(
        TensorSpec(name="features", datatype="FP32", shape=(4, -1)),
        TensorSpec(name="ids", datatype="INT64", shape=()),
    ),
    outputs=(
        TensorSpec(name="scores", datatype="FP32", shape=(2,)),
        TensorSpec(name="mass", datatype="FP64", shape=()),
        TensorSpec(name="any", datatype="FP32", shape=(-1,)),
    ),
)
INPUTS: dict[str, Any] = {"features": (FLOAT, (4, 64)), "ids": (np.dtype("int64"), ())}
OUTPUTS: dict[str, Any] = {"scores": (2, FLOAT), "mass": (1, DOUBLE), "any": (7, FLOAT)}


def test_what_fits_is_silent() -> None:
    CONTRACT.check(INPUTS, OUTPUTS, server="grpc://s:1")
    CONTRACT.check({**INPUTS, "features": (FLOAT, (4, -1))}, {}, server="grpc://s:1")
    CONTRACT.check({**INPUTS, "features": (FLOAT, None)}, {"scores": (None, None)}, server="s")


@pytest.mark.parametrize(
    ("inputs", "outputs", "problem"),
    [
        ({"features": (FLOAT, (5, 64))}, {}, "is FP32 [N, 5, 64]"),
        ({"features": (FLOAT, (4,))}, {}, "is FP32 [N, 4], the model"),
        ({"features": (DOUBLE, None)}, {}, "is FP64 [N, …]"),
        ({}, {"mass": (1, FLOAT)}, "is declared float32, the model gives float64"),
        ({}, {"mass": (1, np.dtype(object))}, "is declared string, the model gives float64 (FP64)"),
        ({"ids": (np.dtype(object), ())}, {}, "is BYTES [N], the model takes INT64 [N]"),
        ({}, {"scores": ((), FLOAT)}, "with shape [N], the model gives FP32 [N, 2]"),
        ({}, {"mass": ((7,), DOUBLE)}, "with shape [N, 7], the model gives FP64 [N]"),
    ],
)
def test_what_does_not_fit_is_named(
    inputs: dict[str, Any], outputs: dict[str, Any], problem: str
) -> None:
    with pytest.raises(errors.ContractError) as caught:
        CONTRACT.check({**INPUTS, **inputs}, {**OUTPUTS, **outputs}, server="grpc://s:1")
    found, _, table = caught.value.message.partition("\n")
    assert problem in found
    assert [row.split()[1] for row in table.splitlines()[1:]] == [*INPUTS, *OUTPUTS]
    assert (caught.value.server, caught.value.model) == ("grpc://s:1", "m")
    assert caught.value.version == "3"


OLD = """
from google.protobuf import runtime_version


def validate(*_, **__):
    raise runtime_version.VersionError("Runtime version cannot be older than 6.33.5")


runtime_version.ValidateProtobufRuntimeVersion = validate

import sonic_coffea as sonic

model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["top"]})
with sonic.connect("grpc://127.0.0.1:1") as pool:
    try:
        model.check(pool)
    except sonic.errors.ConfigError as error:
        print(error)
"""


def test_protobuf_that_is_too_old_is_named() -> None:
    pytest.importorskip("google.protobuf.runtime_version", reason="this one compares no versions")
    done = python("-c", OLD)
    expected = "tritonclient cannot be loaded (Runtime version cannot be older than 6.33.5)"
    assert done.stdout.startswith(expected), done.stderr
    assert "pip install --upgrade" in done.stdout


GLIBC = platform.libc_ver()[0] == "glibc"
# How many new pages large blocks take, before and after, as in dask's workers.
SCRIPT = """
import resource
from sonic_coffea.transport._heap import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        b"".join([bytes(1), memoryview(large)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

large = bytearray(4_000_000)
first = faults()
print(keep_memory())
faults()
print(first, faults())
"""


def printed(**environment: str) -> list[str]:
    known = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    return python("-c", SCRIPT, env=known, **environment).stdout.split()


@pytest.mark.skipif(not GLIBC, reason="only glibc says what it keeps")
def test_large_messages_lie_in_memory_that_was_used_before() -> None:
    kept, before, after = printed(MALLOC_TRIM_THRESHOLD_="65536")
    assert kept == "True"
    assert int(after) < int(before) / 10
    # What a user has set stays.
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        assert printed(**{name: "131072"})[0] == "False"


def test_it_is_kept_from_the_first_large_message_on() -> None:
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": None})
    served = FakeModel.of(model, lambda inputs: {"y": inputs["x"]}, max_rows=50_000)
    keep_memory.cache_clear()
    with FakeServer({"m": served}) as fake, sonic.connect(fake.url, shared_memory=False):
        for rows, expected in ((10, 0), (50_000, 1)):
            model(ak.zip({"pt": np.zeros(rows, np.float32)}))
            assert keep_memory.cache_info().currsize == expected
