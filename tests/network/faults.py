"""What goes wrong with calls on real networks: how to make it, and what it is to be taken for.

The words of servers and proxies are theirs, letter by letter: of Triton 2.60, Envoy 1.40, nginx
1.22 and gRPC 1.85; those of gRPC itself come up by breaking the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import awkward as ak
import grpc
import numpy as np
from h2.errors import ErrorCodes
from tests.network import fault_server as wrong
from tests.network.fault_server import CallFault, ConnectionFault, FaultServer

import sonic_coffea as sonic
from sonic_coffea.errors import (
    AccessError,
    DeadlineError,
    InferenceError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadError,
    RequestError,
    RequestTooLargeError,
    RouteTimeoutError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)
from sonic_coffea.testing import FakeModel

Code = grpc.StatusCode
# What is served, and 300 rows, which are five requests of at most 64.
MODEL = sonic.Model("tagger", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
MODELS = {"tagger": FakeModel.of(MODEL)}
JETS = ak.unflatten(ak.zip({"pt": np.linspace(-3, 3, 300, dtype=np.float32)}), [120, 0, 180])


@dataclass(frozen=True, slots=True)
class Case:
    """A fault, what gRPC makes of it, and what this package has to.

    Parameters
    ----------
    name : str
        Of the test.
    fault : callable
        What happens to a call, or to a connection.
    words : str
        A part of gRPC's details.
    kind : type
        The error that follows.
    connects : bool
        Whether it is a fault of the connection.
    timeout_s : float
        The request's own deadline.
    """

    name: str
    fault: CallFault | ConnectionFault
    words: str
    kind: type[SonicError]
    connects: bool = False
    timeout_s: float = 20.0

    def __str__(self) -> str:
        return self.name

    def happen(self, server: FaultServer, *, times: int = 1, method: str = "ModelInfer") -> None:
        """Have it happen to the next calls, or connections."""
        server.misbehave(self.fault, times=times, method="" if self.connects else method)


def _statuses() -> Iterator[Case]:
    """What a server or a proxy says in gRPC's own words."""
    upstream = "upstream connect error or disconnect/reset before headers. reset reason: "
    refused = "remote connection failure, transport failure reason: delayed connect error: 111"
    unknown = "Request for unknown model: 'tagger' "
    not_ready = "version 1 is not at ready state"
    larger = "Received message larger than max (8000130 vs. 4194304)"
    node = "Non-zero status code returned while running Conv node. Name:'c' Status Message: "
    batch = "[request id: 1] inference request batch-size must be <= 64 for 'tagger'"
    region = "Unable to find shared memory region: 'sonic-1'"
    overloaded, pushback = ("x-envoy-overloaded", "true"), ("grpc-retry-pushback-ms", "20")
    for origin, code, words, kind, *trailers in (
        # A server behind the proxy is dead, is going, or has just come.
        ("Envoy", Code.UNAVAILABLE, upstream + refused, ServerLostError),
        ("Envoy", Code.UNAVAILABLE, f"{upstream}connection termination", ServerLostError),
        ("Envoy", Code.UNAVAILABLE, f"{upstream}connection timeout", ServerLostError),
        ("Envoy", Code.UNAVAILABLE, f"{upstream}remote refused stream reset", ServerLostError),
        ("Envoy", Code.UNAVAILABLE, "no healthy upstream", ServerLostError),
        ("Envoy", Code.UNIMPLEMENTED, "", ServerLostError),
        ("Envoy", Code.UNAVAILABLE, "", ServerLostError),
        ("Triton", Code.NOT_FOUND, region, ServerLostError),
        ("SuperSONIC", Code.CANCELLED, "", ServerLostError),
        ("Triton", Code.UNAVAILABLE, f"{unknown}has no available versions", ModelNotReadyError),
        ("Triton", Code.UNAVAILABLE, f"{unknown}{not_ready}", ModelNotReadyError),
        ("Triton", Code.NOT_FOUND, f"{unknown}is not found", ModelNotFoundError),
        ("Triton", Code.UNAVAILABLE, f"{unknown}is not found", ModelNotFoundError),
        ("a Python server", Code.NOT_FOUND, "Model tagger not found", ModelNotFoundError),
        ("a server", Code.INVALID_ARGUMENT, "requested model 'x' is gone", ModelNotFoundError),
        # Too much at once.
        ("Envoy", Code.UNAVAILABLE, f"{upstream}overflow", OverloadError),
        ("Envoy", Code.UNAVAILABLE, "no words for it", OverloadError, overloaded),
        ("Envoy", Code.UNAVAILABLE, "envoy overloaded", OverloadError),
        ("Envoy", Code.UNAVAILABLE, "local_rate_limited", OverloadError),
        ("Envoy", Code.RESOURCE_EXHAUSTED, "", OverloadError),
        ("Triton", Code.UNAVAILABLE, "Exceeds maximum queue size", OverloadError),
        ("Triton", Code.UNAVAILABLE, "Request timeout expired", OverloadError),
        ("a server", Code.UNAVAILABLE, "come back later", OverloadError, pushback),
        # Too much in one request.
        ("Envoy", Code.UNKNOWN, "Payload Too Large", RequestTooLargeError),
        ("gRPC", Code.RESOURCE_EXHAUSTED, larger, RequestTooLargeError),
        ("Triton", Code.INTERNAL, f"{node}CUDA out of memory", RequestTooLargeError),
        ("Triton", Code.INTERNAL, "Stub process 'tagger_0_0' is not healthy.", RequestError),
        ("Triton", Code.INTERNAL, f"{node}Failed to allocate memory", RequestTooLargeError),
        ("a Python model", Code.INTERNAL, "Unable to allocate 3.7 GiB", RequestTooLargeError),
        ("Triton", Code.INVALID_ARGUMENT, batch, RequestTooLargeError),
        ("Envoy", Code.UNAVAILABLE, "upstream request timeout", RouteTimeoutError),
        ("Envoy", Code.DEADLINE_EXCEEDED, "upstream request timeout", RouteTimeoutError),
        ("Envoy", Code.UNAVAILABLE, "stream timeout", RouteTimeoutError),
        # What another server may not do.
        ("Triton", Code.INTERNAL, f"{node}CUDNN_STATUS_EXECUTION_FAILED", InferenceError),
        ("a Python server", Code.UNKNOWN, "Unexpected <class 'KeyError'>: 'x'", InferenceError),
        # What is so for ever.
        ("Triton", Code.INVALID_ARGUMENT, "unexpected shape for input 'x'", RequestError),
        ("Envoy", Code.UNAUTHENTICATED, "Jwt is missing", AccessError),
        ("Envoy", Code.UNAUTHENTICATED, "Jwt is expired", TokenExpiredError),
        ("Envoy", Code.PERMISSION_DENIED, "RBAC: access denied", AccessError),
        ("Triton", Code.UNAVAILABLE, "This protocol is restricted", AccessError),
    ):
        shown = words.removeprefix(upstream).removeprefix(node) or "no words"
        name = f"{origin} {code.name} {shown} {' '.join(dict(trailers))}".strip()
        yield Case(name, wrong.status(code, words, *trailers), words, kind)


def _web() -> Iterator[Case]:
    """What web servers and ingresses answer, who know no gRPC."""
    for number, kind in {
        302: AccessError,
        400: RequestError,
        401: AccessError,
        403: AccessError,
        404: ServerLostError,
        408: ServerLostError,
        413: RequestTooLargeError,
        429: OverloadError,
        431: RequestError,
        500: InferenceError,
        502: ServerLostError,
        503: ServerLostError,
        504: RouteTimeoutError,
    }.items():
        page = f"<html><head><title>{number}</title></head><body>nginx</body></html>"
        words = f"Received http2 header with status: {number}"
        # A request that is too large is refused before it has arrived.
        yield Case(
            f"HTTP {number}", wrong.http_status(number, page, early=number == 413), words, kind
        )


def _streams() -> Iterator[Case]:
    """Streams that are reset, as gRPC's rst_during_data."""
    for sent in (
        ErrorCodes.NO_ERROR,
        ErrorCodes.PROTOCOL_ERROR,
        ErrorCodes.INTERNAL_ERROR,
        ErrorCodes.REFUSED_STREAM,
        ErrorCodes.CANCEL,
        ErrorCodes.ENHANCE_YOUR_CALM,
        ErrorCodes.INADEQUATE_SECURITY,
    ):
        kind = OverloadError if sent == ErrorCodes.ENHANCE_YOUR_CALM else ServerLostError
        words = f"Received RST_STREAM with error code {int(sent)}"
        yield Case(f"RST_STREAM {sent.name}", wrong.reset(sent), words, kind)


def _broken() -> Iterator[Case]:
    """Connections that end, and answers that are none."""
    lost = ServerLostError
    for name, by_reset in (("FIN", False), ("RST", True)):
        yield Case(name, wrong.disconnect(by_reset=by_reset), "Stream removed (", lost)
    for number in (ErrorCodes.NO_ERROR, ErrorCodes.INTERNAL_ERROR, ErrorCodes.PROTOCOL_ERROR):
        fault = wrong.goaway(number, b"maximum age")
        yield Case(f"GOAWAY {number.name}", fault, "GOAWAY received", lost)
    # gRPC names the one that it noticed first.
    yield Case("GOAWAY, then FIN", wrong.goaway(takes=True), "", lost)
    ended = "Data frame with END_STREAM flag received"
    page = wrong.http_status(200, "<html>The site is being maintained</html>")
    yield Case("HTML with status 200", page, ended, lost)
    yield Case("no grpc-status", wrong.no_status, "No status received", lost)
    yield Case("no message", wrong.no_message, "", lost)
    yield Case("half a message", wrong.truncated, "", lost)
    yield Case("no protobuf", wrong.garbled, "Exception deserializing", InferenceError)
    larger = wrong.answering(headers=("x-filler", "x" * 20_000))
    yield Case("large headers", larger, "metadata size exceeds", InferenceError)


def _connections() -> Iterator[Case]:
    """Connections that are never made."""
    for name, fault, words in (
        ("hangs up", wrong.hang_up, "connect"),
        ("hangs up by RST", partial(wrong.hang_up, reset=True), "connect"),
        ("SSH", wrong.garbage(b"SSH-2.0-OpenSSH_9.2\r\n"), "Failed parsing HTTP/2"),
        ("HTTP/1", wrong.garbage(b"HTTP/1.1 503 Service Unavailable\r\n\r\n"), "http1.x server"),
    ):
        yield Case(name, fault, words, ServerLostError, connects=True)


def _hanging() -> Iterator[Case]:
    """Answers that come too late; a proxy's deadline is shorter than the request's own."""
    words, cut = "Deadline Exceeded", wrong.status(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
    yield Case("no answer", wrong.silent, words, DeadlineError, timeout_s=0.5)
    yield Case("a proxy's deadline", cut, words, RouteTimeoutError)


CASES = [*_hanging(), *_statuses(), *_web(), *_streams(), *_broken(), *_connections()]


def assert_right(scores: ak.Array, jets: ak.Array = JETS) -> None:
    """Compare scores with the formula of the server, row by row."""
    assert ak.num(scores).tolist() == ak.num(jets).tolist()
    expected = (1 + np.sin(ak.flatten(jets.pt).to_numpy())) / 2
    np.testing.assert_allclose(ak.flatten(scores.top).to_numpy(), expected, rtol=1e-6, atol=1e-6)
