"""The one place where gRPC's failures become ours."""

from __future__ import annotations

from typing import Any

import grpc

from sonic_coffea.errors import (
    AccessError,
    CancelledError,
    DeadlineError,
    ModelNotFoundError,
    OverloadError,
    RequestError,
    ServerLostError,
    SonicError,
)

Code = grpc.StatusCode

_BY_CODE: dict[Any, type[SonicError]] = {
    Code.CANCELLED: CancelledError,
    Code.UNKNOWN: RequestError,
    Code.INVALID_ARGUMENT: RequestError,
    Code.DEADLINE_EXCEEDED: DeadlineError,
    Code.NOT_FOUND: ModelNotFoundError,
    Code.ALREADY_EXISTS: RequestError,
    Code.PERMISSION_DENIED: AccessError,
    Code.RESOURCE_EXHAUSTED: OverloadError,
    Code.FAILED_PRECONDITION: RequestError,
    Code.ABORTED: ServerLostError,
    Code.OUT_OF_RANGE: RequestError,
    Code.UNIMPLEMENTED: RequestError,
    Code.INTERNAL: RequestError,
    Code.UNAVAILABLE: ServerLostError,
    Code.DATA_LOSS: ServerLostError,
    Code.UNAUTHENTICATED: AccessError,
}

# Envoy's words for a route that takes longer than it may.
_ROUTE_CUT = "upstream request timeout"

# Triton has one status for several things; only its words tell them apart.
_BY_WORDS: tuple[tuple[Any, str, type[SonicError]], ...] = (
    (Code.UNAVAILABLE, "this protocol is restricted", AccessError),
    (Code.UNAVAILABLE, "certificate_verify_failed", AccessError),
    (Code.UNAVAILABLE, "hostname verification check failed", AccessError),
    (Code.UNAVAILABLE, "alert_certificate_required", AccessError),
    (Code.UNAVAILABLE, "alert_unknown_ca", AccessError),
    (Code.UNAVAILABLE, _ROUTE_CUT, OverloadError),
    (Code.DEADLINE_EXCEEDED, _ROUTE_CUT, OverloadError),
    (Code.UNAVAILABLE, "exceeds maximum queue size", OverloadError),
    (Code.UNAVAILABLE, "request for unknown model", ModelNotFoundError),
    (Code.INVALID_ARGUMENT, "request for unknown model", ModelNotFoundError),
    (Code.INVALID_ARGUMENT, "requested model", ModelNotFoundError),
    (Code.RESOURCE_EXHAUSTED, "message larger than max", RequestError),
)

_MEANING: dict[type[SonicError], str] = {
    AccessError: "the server and this client do not trust each other; check token and certificates",
    CancelledError: "the request was cancelled",
    DeadlineError: "the server did not answer in time",
    ModelNotFoundError: "the server does not have the model",
    OverloadError: "the server is overloaded",
    RequestError: "the server rejected the request",
    ServerLostError: "the connection to the server was lost",
}


def translate(code: Any, details: str, *, closing: bool = False, **context: Any) -> SonicError:
    """Return our error for a gRPC status.

    Parameters
    ----------
    code : grpc.StatusCode
        The status.
    details : str
        What the server says.
    closing : bool
        Whether this side cancelled; a CANCELLED that it did not ask for is a lost server.
    **context
        server, model, version, request.
    """
    kind = _BY_CODE.get(code, RequestError)
    lowered = details.lower()
    for at, words, meant in _BY_WORDS:
        if code == at and words in lowered:
            kind = meant
    if kind is CancelledError and not closing:
        kind = ServerLostError
    reason = details.strip().splitlines()[0] if details.strip() else code.name
    if _ROUTE_CUT in lowered:
        reason += "; if a single request takes too long, let it be smaller: max_request_bytes"
    return kind(f"{_MEANING[kind]}: {reason}", **context)
