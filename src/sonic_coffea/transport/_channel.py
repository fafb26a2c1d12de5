"""The gRPC channel to a server, and the credentials of every call on it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea.transport._tokens import token_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._options import ConnectionOptions, Tls

_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Connections of one process to one server must not share a socket behind our back.
    ("grpc.use_local_subchannel_pool", 1),
    # Notices a dead peer within a minute; servers answer faster pings with too_many_pings.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long a connection may take to be made: far servers and busy balancers need seconds.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A name may have several addresses: requests take turns among them.
    ("grpc.lb_policy_name", "round_robin"),
    # Proxies of a cluster's web traffic are no way to an inference server.
    ("grpc.enable_http_proxy", 0),
)


class Channel:
    """A gRPC channel and its methods; opening it reads certificates, closing it cancels calls.

    Attributes
    ----------
    in_flight : set
        The inference requests that are in flight on it.
    heard_at : float
        When the last call was answered, by `time.monotonic`.
    """

    def __init__(self, address: Address, tls: Tls) -> None:
        self.address = address
        if address.tls:
            root, cert, key = tls.read()
            credentials = grpc.ssl_channel_credentials(root, key, cert)
            self._grpc = grpc.secure_channel(address.target, credentials, options=_CHANNEL_OPTIONS)
        else:
            self._grpc = grpc.insecure_channel(address.target, options=_CHANNEL_OPTIONS)
        self.close: Callable[[], None] = self._grpc.close
        self.in_flight: set[Any] = set()
        self.heard_at = -math.inf
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._grpc)
        # Requests are serialized by `with_contents`, which saves three copies of every tensor.
        self.infer = self._grpc.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )

    def answered(self, call: Any) -> bool:
        """Return whether a call that is over was answered, and take note of when."""
        answered = not call.cancelled() and call.code() == grpc.StatusCode.OK
        if answered:
            self.heard_at = time.monotonic()
        return answered


def call_metadata(
    options: ConnectionOptions, secret: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return the headers of a call: a local server's secret, the user's headers and the token.

    Raises
    ------
    ConfigError
        If the token cannot be had.
    """
    headers = {**secret, **options.headers}
    if options.token is not None:
        headers["authorization"] = f"Bearer {token_of(options.token)}"
    return tuple((name.lower(), value) for name, value in headers.items())
