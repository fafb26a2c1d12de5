"""A table that turns gRPC's failures into errors of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import grpc

from sonic_coffea.errors import (
    AccessError,
    CancelledError,
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

Code = grpc.StatusCode


class Failure(NamedTuple):
    """A way in which a call fails, and the error that it becomes.

    Attributes
    ----------
    phase : str
        Where it happens: the "connection", before the request leaves; the "stream", while request
        or response are on their way; a "proxy" that answers in place of the server; the "server".
    error : type
        The class of the error, which decides what is done.
    words : tuple of str
        The status's details contain one of these, in lower case; `SILENT`: they are empty.
    codes : tuple of grpc.StatusCode
        The status is one of these; none: any.
    hint : str
        What helps, for the message.
    trailer : str
        The response has this trailer.
    undelivered : bool
        Whether no server can have got the request.
    """

    phase: str
    error: type[SonicError]
    words: tuple[str, ...] = ("",)
    codes: tuple[Any, ...] = ()
    hint: str = ""
    trailer: str = ""
    undelivered: bool = False


SILENT = "(no words)"
_NO_ROUTE = "the proxy has no such route, or not yet; check the URL's host and port"
# gRPC's words for a connection that cannot be made, in plain words.
_WHY_UNCONNECTED = {
    "connection refused": "nothing listens at this port of the host",
    "no such file": (
        "no server is there: it has ended, or is on another machine, where only its own processes "
        "reach a Unix socket; for other machines, `sonic-coffea serve --port 8001 --host 0.0.0.0`"
    ),
    "permission denied": "the socket is another user's; `sonic-coffea serve --port` is for others",
    "errors resolving": "no address is known for this name of a host",
    "dns resolution failed": "no address is known for this name of a host",
    "no route to host": "no route leads to the host",
    "network is unreachable": "no route leads to the host",
    "timeout occurred": "the host does not answer",
}
_NO_GRPC = "Triton speaks gRPC at port 8001 by default; this port does not, or wants grpcs://"
_LARGE = "let requests be smaller: max_request_bytes"
_STUB_UNHEALTHY = (
    "Triton may take what this process answers late for answers to other requests, so restart the "
    "server; local servers and models of build_repository end themselves then"
)
NO_CERT = "the server refuses the client's certificate, or wants one: check tls_cert= and tls_key="
UNKNOWN_REGION = "unable to find shared memory region"
_HTTP = "received http2 header with status: "
_LOST = (Code.UNAVAILABLE,)
_BUSY = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.ABORTED)
_FAILED = (Code.INTERNAL, Code.UNKNOWN)
_PUSHBACK = "grpc-retry-pushback-ms"


def _unreached(phase: str, *words: str, hint: str = "") -> Failure:
    return Failure(phase, ServerLostError, words, _LOST, hint, undelivered=True)


def _untrusted(*words: str, hint: str) -> Failure:
    return Failure("connection", AccessError, words, _LOST, hint)


# The first row that fits counts. Where a status has several meanings, only the words tell.
FAILURES: tuple[Failure, ...] = (
    Failure("proxy", OverloadError, trailer="x-envoy-overloaded"),
    Failure("server", OverloadError, codes=_BUSY, trailer=_PUSHBACK),
    # gRPC says "Stream removed", under any status, when what is below the stream has ended.
    Failure("stream", DeadlineError, ("stream removed (deadline exceeded)",)),
    Failure("stream", OverloadError, ("rst_stream with error code 11",)),
    Failure("stream", InferenceError, ("metadata size exceeds",)),
    # Not "socket closed (goaway received": that server had the request.
    Failure("stream", ServerLostError, ("stream removed (goaway",), undelivered=True),
    Failure("stream", ServerLostError, ("rst_stream with error code 7",), undelivered=True),
    Failure("stream", ServerLostError, ("stream removed",)),
    Failure("stream", ServerLostError, ("no status received",), (Code.UNKNOWN,)),
    _untrusted("certificate_verify_failed", hint="tls_root= names the authority to trust"),
    _untrusted(
        "hostname verification check failed",
        "is not in peer certificate",
        hint="the certificate is of another host",
    ),
    # The server refuses the client's certificate: in TLS 1.2, and in TLS 1.3.
    _untrusted("_alert_", "unwrap failed", hint=NO_CERT),
    _unreached("connection", "trying to connect an http1.x server", hint=_NO_GRPC),
    _unreached("connection", "expected settings frame as the first frame", hint=_NO_GRPC),
    _unreached("connection", "wrong_version_number", hint="no TLS there; did you mean grpc://?"),
    _unreached("connection", "connections to all backends failing"),
    _unreached("connection", "errors resolving", "dns resolution failed"),
    _unreached("proxy", "remote connection failure", "reset reason: connection timeout"),
    _unreached("proxy", "no healthy upstream", f"{_HTTP}503"),
    Failure("proxy", AccessError, (f"{_HTTP}302",), hint="a login page answers in its place"),
    Failure("proxy", ServerLostError, (f"{_HTTP}404",), hint=_NO_ROUTE),
    # Envoy gives no details for a call without a route; a server names the method.
    Failure("proxy", ServerLostError, (SILENT,), (Code.UNIMPLEMENTED,), _NO_ROUTE),
    Failure("proxy", ServerLostError, (f"{_HTTP}408",)),
    Failure("proxy", RequestTooLargeError, (f"{_HTTP}413", "payload too large"), hint=_LARGE),
    Failure("proxy", RouteTimeoutError, (f"{_HTTP}504", "stream timeout"), hint=_LARGE),
    Failure("proxy", RouteTimeoutError, ("upstream request timeout",), hint=_LARGE),
    Failure("proxy", OverloadError, (f"{_HTTP}429", "local_rate_limited")),
    Failure("proxy", OverloadError, ("reset reason: overflow", "envoy overloaded")),
    Failure("proxy", RequestError, (f"{_HTTP}4",), _FAILED),
    Failure("proxy", TokenExpiredError, ("expired",), (Code.UNAUTHENTICATED,)),
    Failure("server", AccessError, ("this protocol is restricted",), _LOST),
    Failure("server", OverloadError, ("maximum queue size", "request timeout expired"), _LOST),
    Failure("server", ModelNotReadyError, ("has no available versions", "not at ready state")),
    Failure("server", ModelNotFoundError, ("request for unknown model",)),
    Failure("server", ModelNotFoundError, ("requested model",), (Code.INVALID_ARGUMENT,)),
    Failure("server", RequestTooLargeError, ("message larger than max",), hint=_LARGE),
    Failure("server", RequestTooLargeError, ("batch-size must be <=",), (Code.INVALID_ARGUMENT,)),
    Failure("server", RequestTooLargeError, ("out of memory", "to allocate"), _FAILED, _LARGE),
    Failure("server", ServerLostError, (UNKNOWN_REGION,), undelivered=True),
    Failure("server", RequestError, ("is not healthy",), _FAILED, _STUB_UNHEALTHY),
    Failure("server", ServerLostError, codes=(*_LOST, Code.ABORTED, Code.DATA_LOSS)),
    Failure("server", ServerLostError, codes=(Code.CANCELLED,)),
    Failure("server", OverloadError, codes=(Code.RESOURCE_EXHAUSTED,)),
    Failure("server", DeadlineError, codes=(Code.DEADLINE_EXCEEDED,)),
    Failure("server", ModelNotFoundError, codes=(Code.NOT_FOUND,)),
    Failure("server", AccessError, codes=(Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)),
    Failure("server", InferenceError, codes=_FAILED),
    Failure("server", RequestError),
)

_MEANING: dict[type[SonicError], str] = {
    AccessError: "the server and this client do not trust each other; check token and certificates",
    CancelledError: "the request was cancelled",
    DeadlineError: "the server did not answer in time",
    InferenceError: "the server failed on the request",
    ModelNotFoundError: "the server does not have the model",
    ModelNotReadyError: "the server cannot serve the model now",
    OverloadError: "the server is overloaded",
    RequestError: "the server rejected the request",
    RequestTooLargeError: "the request is larger than the server takes at once",
    RouteTimeoutError: "a proxy cut the request, which took longer than its route may",
    ServerLostError: "the connection to the server was lost",
    TokenExpiredError: "the token has expired",
}


def translate(
    code: Any,
    details: str,
    trailers: Mapping[str, str],
    *,
    closing: bool,
    early: bool,
    local: bool,
    **context: Any,
) -> SonicError:
    """Return our error for a gRPC status, by the first row of the table that fits.

    Parameters
    ----------
    closing : bool
        Whether this side cancelled; a CANCELLED that it did not ask for is a lost server.
    early : bool
        Whether a deadline passed that is not this side's: a proxy has a shorter one.
    local : bool
        Whether the server is one of this package's, which ends itself if its model is not healthy.
    **context
        server, model, version, request.
    """
    lowered = details.strip().lower() or SILENT
    row = next(
        row
        for row in FAILURES
        if (not row.codes or code in row.codes)
        and any(words in lowered for words in row.words)
        and (not row.trailer or row.trailer in trailers)
    )
    kind, hint, reason = row.error, row.hint, (details.strip().splitlines() or [code.name])[0]
    if code == Code.CANCELLED and closing:
        kind = CancelledError
    elif kind is DeadlineError and early:
        kind, hint = RouteTimeoutError, _LARGE
    elif local and hint is _STUB_UNHEALTHY:
        kind = ServerLostError
    meaning, why = _MEANING[kind], ""
    if kind is ServerLostError and row.phase == "connection":
        meaning = "no connection to the server could be made"
        hint = hint or f"`sonic-coffea check {context.get('server') or 'URL'}` tries it"
        known = (why for words, why in _WHY_UNCONNECTED.items() if words in lowered)
        why = next(known, "")
        reason = why or reason
    error = kind(f"{meaning}: {reason}{hint and f'; {hint}'}", **context)
    if isinstance(error, OverloadError):
        # A negative time, as a server may send, is none.
        milliseconds = trailers.get(_PUSHBACK, "")
        error.retry_after_s = float(milliseconds) / 1000 if milliseconds.isdecimal() else None
    elif isinstance(error, ServerLostError):
        error.undelivered, error.unreached = row.undelivered, bool(why)
    return error
