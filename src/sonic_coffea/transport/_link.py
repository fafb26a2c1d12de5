"""The way to a server: its channel, which may be replaced, and calls without tensors."""

from __future__ import annotations

import math
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea.errors import (
    AccessError,
    CancelledError,
    InferenceError,
    RequestTooLargeError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)
from sonic_coffea.transport._failures import STUB_UNHEALTHY, UNKNOWN_REGION, failure_of, translate
from sonic_coffea.transport._shared_memory import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._options import ConnectionOptions, Tls

# Triton's extensions, which other servers lack: gRPC's own servers say so without words.
_OPTIONAL = frozenset({"ModelConfig", "ModelStatistics", "RepositoryIndex"})
CLOSED = "the connection is closed"
NO_MESSAGE = "the response was cut off: it has a status, and no whole message"

# Read-only calls are repeated after these times: behind a balancer, one server may hang while the
# others answer at once. If no response has come over the channel since the first, the last goes
# over a new channel, as the connection itself may hang.
_READS = ("ServerMetadata", "RepositoryIndex", "ModelMetadata", "ModelConfig", "ModelStatistics")
_REPEAT_AFTER_S = (0.2, 1.0, 2.0)

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
        if address.tls:
            root, cert, key = tls.read()
            credentials = grpc.ssl_channel_credentials(root, key, cert)
            channel = grpc.secure_channel(address.target, credentials, options=_CHANNEL_OPTIONS)
        else:
            channel = grpc.insecure_channel(address.target, options=_CHANNEL_OPTIONS)
        self.close: Callable[[], None] = channel.close
        self.in_flight: set[Any] = set()
        self.heard_at = -math.inf
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # Requests are serialized by `with_contents`, which saves three copies of every tensor.
        self.stub.ModelInfer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )

    def answered(self, call: Any) -> bool:
        """Return whether a call that is over was answered, and take note of when."""
        answered = not call.cancelled() and call.code() == grpc.StatusCode.OK
        if answered:
            self.heard_at = time.monotonic()
        return answered


class Link:
    """A channel to one server, opened by the first call and replaced by a new one if it hangs.

    Raises
    ------
    ConfigError
        If shared memory is demanded of a server that is not on this machine.
    """

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        self.address = address
        self._options = options
        self._process = os.getpid()
        self._opening = threading.Lock()
        self._channel: Channel | None = None
        self._replaced: list[Channel] = []
        self._closed = False
        self._shortest_s = math.inf
        self._shared = SharedMemory(self._call, address) if options.shared_memory else None

    @property
    def round_trip_s(self) -> float:
        """The shortest time of a call without tensors; 0 without any, or on this machine.

        The first call takes longer, as it makes the connection.
        """
        known = self._shortest_s < math.inf and not self.address.loopback
        return self._shortest_s if known else 0.0

    def close(self) -> None:
        """Cancel what is in flight, and close the channels. May be called again.

        May block for a moment while the server unregisters shared memory.
        """
        if os.getpid() != self._process:  # a forked child's is its parent's
            return
        with self._opening:
            if self._closed:
                return
            self._closed = True
        for channel in self._replaced:
            channel.close()
        for call in [] if self._channel is None else list(self._channel.in_flight):
            call.cancel()
        if self._shared is not None:
            # The channel is open for the server to unregister what these requests used.
            self._shared.close()
        if self._channel is not None:
            self._channel.close()

    def _open(self) -> Channel:
        """Return the channel, opened by the first call."""
        with self._opening:
            if self._channel is None:
                if self._closed:
                    raise CancelledError(CLOSED, server=str(self.address))
                self._channel = Channel(self.address, self._options.tls)
            return self._channel

    def _replace(self, channel: Channel) -> None:
        """Have the next call open another channel, as the network may have forgotten this one.

        Calls in flight on it may still be answered, if only the server behind it hangs.
        """
        with self._opening:
            if channel is not self._channel or self._closed:
                return
            self._channel = None
            idle = [known for known in self._replaced if not known.in_flight]
            self._replaced = [known for known in self._replaced if known.in_flight]
            self._replaced.append(channel)
        for known in idle:
            known.close()

    def _begin(
        self,
        method: str,
        message: Any,
        timeout_s: float,
        channel: Channel | None = None,
        **options: Any,
    ) -> tuple[Any, Channel]:
        """Send a message, over another channel if the first is replaced and closed meanwhile."""
        while True:
            channel = channel or self._open()
            headers = self._options.metadata()
            try:
                call = getattr(channel.stub, method).future(message, timeout_s, headers, **options)
            except ValueError:  # a closed channel
                if self._closed:
                    raise CancelledError(CLOSED, server=str(self.address)) from None
                if channel is self._channel:
                    raise
                channel = None
            else:
                return call, channel

    def _call(
        self, method: str, request: Any, timeout_s: float | None = None, **context: Any
    ) -> Any:
        """Make a call without tensors, and wait for the response."""
        context["server"] = str(self.address)
        begun_at = time.monotonic()
        until = begun_at + (timeout_s or self._options.timeouts.metadata_s)
        channels: list[Channel] = []

        def begin() -> Any:
            if len(channels) == len(_REPEAT_AFTER_S) and channels[-1].heard_at < begun_at:
                self._replace(channels[-1])
            call, channel = self._begin(method, request, until - time.monotonic())
            channels.append(channel)
            return call

        call = _first(begin, _REPEAT_AFTER_S if method in _READS else ())
        channel = channels[-1]
        if not channel.answered(call):
            failure = self._failure(call, optional=method in _OPTIONAL, **context)
            if isinstance(failure, RequestTooLargeError):  # it is the server that has no room
                failure = InferenceError(f"{method} failed: {call.details()}", **context)
            raise failure
        response = call.result()
        if response is None:
            raise ServerLostError(NO_MESSAGE, **context)
        self._shortest_s = min(self._shortest_s, channel.heard_at - begun_at)
        return response

    def _failure(
        self,
        call: Any,
        *,
        optional: bool = False,
        early: bool = False,
        **context: Any,
    ) -> SonicError:
        """Return our error for a failed call."""
        code, details = call.code(), call.details() or ""
        if optional and code == grpc.StatusCode.UNIMPLEMENTED:
            details = details or "the server has no such method"
        trailers = dict(call.trailing_metadata() or ())
        closing = self._closed or call.cancelled()
        row = failure_of(code, details, trailers)
        error = translate(code, details, trailers, closing=closing, early=early, **context)
        if self._shared is not None and row.words == UNKNOWN_REGION:
            error = self._shared.unknown(details).at(**context)
            if isinstance(error, ServerLostError):
                error.undelivered = True
        if self.address.path is not None and row.hint is STUB_UNHEALTHY:  # so it ends itself
            error = ServerLostError(error.message, **context)
        if isinstance(error, TokenExpiredError) and not callable(self._options.token):
            error = AccessError(f"{error.message}; token_file= reads a new one", **context)
        return error


def _first(begin: Callable[[], Any], repeat_after_s: Sequence[float]) -> Any:
    """Make a call, and repeat it; return the first that was answered, or the last that failed."""
    responses: SimpleQueue[Any] = SimpleQueue()
    calls: list[Any] = []
    failed: list[Any] = []
    try:
        for wait_s in (*repeat_after_s, None):
            calls.append(begin())
            calls[-1].add_done_callback(responses.put)
            while len(failed) < len(calls):
                try:
                    call = responses.get(timeout=wait_s)
                except Empty:
                    break
                if call.code() == grpc.StatusCode.OK:
                    return call
                failed.append(call)
            else:
                break
    finally:
        for call in calls:
            call.cancel()
    return failed[-1]
