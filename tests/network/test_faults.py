"""Each fault of `tests.network.faults` on a real connection: what it is taken for, what follows.

Passing faults cost time, and no rows; lasting ones end the call with an error that says where.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np
import pytest
import trustme
from tests.network.fault_server import FaultServer
from tests.network.faults import CASES, MODELS
from tritonclient.grpc import service_pb2

from sonic_coffea.testing import FakeServer
from sonic_coffea.transport import ConnectionOptions, Timeouts, connect_transport
from sonic_coffea.transport._failures import FAILURES, failure_of
from sonic_coffea.transport._link import _CHANNEL_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.network.faults import Case

Code = grpc.StatusCode


class Observed(NamedTuple):
    code: Any
    details: str
    trailers: Mapping[str, str]


def observe(channel: grpc.Channel, timeout_s: float) -> Observed:
    """Make a call past this package, and return what gRPC says of it."""
    request = service_pb2.ModelInferRequest(model_name="tagger", id="1")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(bytes(4))
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelInferResponse.FromString,
    )
    future = call.future(request, timeout=timeout_s)
    future.exception()
    trailers = {item.key: item.value for item in future.trailing_metadata() or ()}
    return Observed(future.code(), future.details() or "", trailers)


@pytest.fixture(scope="module")
def observations() -> dict[str, Observed]:
    """What gRPC shows of every fault, by its name."""
    shown = {}
    for case in CASES:
        with FaultServer(MODELS) as server:
            case.happen(server, times=10)
            target = server.url.removeprefix("grpc://")
            with grpc.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
                shown[case.name] = observe(channel, case.timeout_s)
    return shown


@pytest.mark.parametrize("case", CASES, ids=str)
def test_faults_are_made_as_grpc_shows_them(case: Case, observations: dict[str, Observed]) -> None:
    """The cases are what they say, and not made by this package's doing."""
    observed = observations[case.name]
    assert observed.code == case.code
    assert case.words in observed.details


@pytest.fixture(scope="module")
def contract() -> Any:
    with FakeServer(MODELS) as server:
        connection = connect_transport(server.url)
        contract = connection.contract("tagger", None)
        connection.close()
    return contract


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_fault_is_taken_for(case: Case, contract: Any) -> None:
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    timeouts = Timeouts(request_s=case.timeout_s)
    with FaultServer(MODELS) as server:
        case.happen(server, times=10)
        # A function may return another token when this one has expired.
        options = ConnectionOptions(timeouts=timeouts, token=lambda: "any")
        connection = connect_transport(server.url, options=options)
        inputs = {"x": np.zeros((4, 1), np.float32)}
        names = {"version": None, "request_id": "pool-7"}
        connection.infer(contract, lambda _: inputs, ["y"], **names, done=outcomes.put)
        error = outcomes.get(timeout=30)
        connection.close()
    assert type(error) is case.kind
    assert getattr(error, "undelivered", False) is case.undelivered
    assert case.words in error.message
    assert (error.server, error.model, error.request) == (server.url, "tagger", "pool-7")


@pytest.fixture(scope="module")
def untrusted() -> list[Observed]:
    """What gRPC shows where certificates do not fit; `tests.transport.test_security` has more."""
    ours, others = trustme.CA(), trustme.CA()
    client = ours.issue_cert("client")
    return [
        _observe_tls(ours.issue_cert("127.0.0.1"), ours, others, client),
        _observe_tls(ours.issue_cert("triton.example"), ours, ours, client),
        _observe_tls(ours.issue_cert("127.0.0.1"), ours, ours, None),
        _observe_tls(ours.issue_cert("127.0.0.1"), ours, ours, None, ssl.TLSVersion.TLSv1_2),
    ]


def _observe_tls(
    issued: trustme.LeafCert,
    root: trustme.CA,
    trusted: trustme.CA,
    mine: trustme.LeafCert | None,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> Observed:
    """Make a call to a server that wants a certificate, too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = version
    issued.configure_cert(context)
    root.configure_trust(context)
    shown = grpc.ssl_channel_credentials(
        trusted.cert_pem.bytes(),
        mine and mine.private_key_pem.bytes(),
        mine and mine.cert_chain_pems[0].bytes(),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as elsewhere:
        ended = elsewhere.submit(_shake_hands, listener, context)
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with grpc.secure_channel(target, shown, options=_CHANNEL_OPTIONS) as channel:
            observed = observe(channel, 20.0)
        ended.result(timeout=20)
    return observed


def _shake_hands(listener: socket.socket, context: ssl.SSLContext) -> None:
    """Let a client's certificate be refused, and the client hear of it."""
    plain, _ = listener.accept()
    secured = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
    with contextlib.suppress(OSError):
        secured.do_handshake()
    with socket.socket(fileno=secured.detach()) as plain, contextlib.suppress(OSError):
        # What is not read when a connection is closed takes with it what was sent.
        plain.shutdown(socket.SHUT_WR)
        while plain.recv(4096):
            pass


@pytest.fixture(scope="module")
def unknown_host() -> Observed:
    with grpc.insecure_channel("triton.invalid:8001", options=_CHANNEL_OPTIONS) as channel:
        return observe(channel, 20.0)


@pytest.fixture(scope="module")
def without_tls() -> Observed:
    credentials = grpc.ssl_channel_credentials()
    with FakeServer(MODELS) as server:
        target = server.url.removeprefix("grpc://")
        with grpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS) as channel:
            return observe(channel, 20.0)


@pytest.mark.parametrize("row", FAILURES, ids=lambda row: f"{row.phase} {row.words or row.codes}")
def test_every_row_of_the_table_decides_a_fault(
    row: Any,
    observations: dict[str, Observed],
    untrusted: list[Observed],
    unknown_host: Observed,
    without_tls: Observed,
) -> None:
    """Without it, a fault would be taken for something else."""
    observed = (*observations.values(), *untrusted, unknown_host, without_tls)
    failed = [seen for seen in observed if seen.code != Code.OK]

    def decided(rows: Sequence[Any]) -> list[Any]:
        matches = [failure_of(*seen, rows) for seen in failed]
        return [(match.error, match.hint, match.undelivered) for match in matches]

    nothing = row._replace(error=None, codes=(), words="", trailer="")
    others = [other for other in FAILURES if other is not row]
    changed = decided((*others, nothing)) != decided(FAILURES)
    assert changed, f"no fault is decided by {row}"
