"""The way to a server: its channel, which may be replaced, and calls without tensors."""

from __future__ import annotations

import math
import threading
import time
from itertools import count
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
from sonic_coffea.transport._failures import STOOD_STILL, UNKNOWN_REGION, failure_of, translate
from sonic_coffea.transport._loopback import LocalPeer
from sonic_coffea.transport._shared_memory import SharedMemory, shares
from sonic_coffea.transport._tokens import token_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._options import ConnectionOptions, Tls
    from sonic_coffea.transport._shared_memory import Usability

# Triton's extensions, which other servers lack: gRPC's own servers say so without words.
_OPTIONAL = frozenset({"ModelConfig", "ModelStatistics", "RepositoryIndex"})
NO_MESSAGE = "the response was cut off: it has a status, and no whole message"

# Calls that change nothing. A server that hangs may have got one, behind a balancer with others
# that answer at once: it is made again after these times. The last one goes over another
# connection, if nothing has come over the first: it may be the connection that hangs.
_READS = ("ServerMetadata", "RepositoryIndex", "ModelMetadata", "ModelConfig", "ModelStatistics")
_ASK_AGAIN_S = (0.2, 1.0, 2.0)

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


class Link:
    """A channel to one server, opened by the first call and replaced by a new one if it hangs.

    Parameters
    ----------
    address : Address
        The server.
    options : ConnectionOptions
        How to connect.
    known : Usability or None
        What other connections to the server have found about shared memory.

    Attributes
    ----------
    channel : Channel or None
        The channel for the next call, if it is open.
    closed : bool
        Whether nothing more is to be sent.
    shared : SharedMemory or None
        The regions, if the server may share this machine's memory.

    Raises
    ------
    ConfigError
        If shared memory is demanded of a server that is not on this machine.
    """

    def __init__(
        self, address: Address, options: ConnectionOptions, known: Usability | None
    ) -> None:
        self.address = address
        self.options = options
        self.channel: Channel | None = None
        self._shortest_s = math.inf
        self.closed = False
        self._opening = threading.Lock()
        self._replaced: list[Channel] = []
        self._peer = LocalPeer(address)
        self.shared: SharedMemory | None = None
        if shares(address, wanted=options.shared_memory):
            demanded = options.shared_memory is True
            self.shared = SharedMemory(self.call, address, demanded=demanded, known=known)

    def open(self) -> tuple[Channel, Mapping[str, str]]:
        """Return the channel, opened by the first call, and the secret of a local server."""
        with self._opening:
            try:
                secret, address = self._peer.secret(), self._peer.address
            except ServerLostError:
                if self.shared is not None:
                    self.shared.forget()
                raise
            if self.channel is None or self.channel.address != address:
                if self.closed:
                    raise CancelledError("the connection is closed", server=str(self.address))
                if self.channel is not None:
                    self._replaced.append(self.channel)
                self.channel = Channel(address, self.options.tls)
            return self.channel, secret

    def metadata(self, secret: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """Return the headers of a call: a local server's secret, the user's headers and the token.

        Raises
        ------
        ConfigError
            If the token cannot be had.
        """
        headers = {**secret, **self.options.headers}
        if self.options.token is not None:
            headers["authorization"] = f"Bearer {token_of(self.options.token)}"
        return tuple((name.lower(), value) for name, value in headers.items())

    @property
    def round_trip_s(self) -> float:
        """The shortest time of a call without tensors; 0 without any, or on this machine.

        The first call takes longer, as it makes the connection.
        """
        known = self._shortest_s < math.inf and not self.address.loopback
        return self._shortest_s if known else 0.0

    def replace(self, channel: Channel) -> None:
        """Have the next call open another channel, as the network may have forgotten this one.

        Calls in flight on it may still be answered, if only the server behind it hangs.
        """
        with self._opening:
            if channel is not self.channel or self.closed:
                return
            self.channel = None
            over = [known for known in self._replaced if not known.in_flight]
            self._replaced = [known for known in self._replaced if known.in_flight]
            self._replaced.append(channel)
        for known in over:
            known.close()

    def close(self) -> bool:
        """Open no more channels, and close those that were replaced; False if that is done."""
        with self._opening:
            closed, self.closed = self.closed, True
        for channel in self._replaced:
            channel.close()
        return not closed

    def shut(self) -> None:
        """Close the channel, which cancels the calls on it, and release the port."""
        if self.channel is not None:
            self.channel.close()
        self._peer.close()

    def call(
        self, method: str, request: Any, timeout_s: float | None = None, **context: Any
    ) -> Any:
        """Make a call without tensors, and wait for the response."""
        context["server"] = str(self.address)
        channel, secret = self.open()
        metadata = self.metadata(secret)
        asked_at = time.monotonic()
        until = asked_at + (timeout_s or self.options.timeouts.metadata_s)
        tries = count(1)

        def begin() -> Any:
            nonlocal channel
            if next(tries) == len(_ASK_AGAIN_S) + 1 and channel.heard_at < asked_at:
                self.replace(channel)
                channel, _ = self.open()
            timeout_s = until - time.monotonic()
            return getattr(channel.stub, method).future(request, timeout_s, metadata)

        try:
            call = _first(begin, _ASK_AGAIN_S if method in _READS else ())
        except ValueError as error:  # a closed channel
            lost = CancelledError if self.closed else ServerLostError
            failure: SonicError = lost(str(error), **context)
        else:
            if not channel.answered(call):
                failure = self.failure(call, secret, optional=method in _OPTIONAL, **context)
                if isinstance(failure, RequestTooLargeError):  # it is the server that has no room
                    failure = InferenceError(f"{method} failed: {call.details()}", **context)
            elif (response := call.result()) is not None:
                self._shortest_s = min(self._shortest_s, channel.heard_at - asked_at)
                return response
            else:
                failure = ServerLostError(NO_MESSAGE, **context)
        raise failure

    def failure(
        self,
        call: Any,
        secret: Mapping[str, str],
        *,
        optional: bool = False,
        early: bool = False,
        **context: Any,
    ) -> SonicError:
        """Return our error for a failed call that was made with a local server's `secret`."""
        code, details = call.code(), call.details() or ""
        if optional and code == grpc.StatusCode.UNIMPLEMENTED:
            details = details or "the server has no such method"
        trailers = dict(call.trailing_metadata() or ())
        row = failure_of(code, details, trailers)
        error = translate(code, details, trailers, closing=self.closed, early=early, **context)
        if self.shared is not None:
            if row.words == UNKNOWN_REGION:
                meaning = self.shared.unknown(details)
                error = ServerLostError(meaning, **context)
                error.undelivered = True
            elif isinstance(error, ServerLostError):
                self.shared.forget()
        if secret and row.hint is STOOD_STILL:  # so it ends itself
            error = ServerLostError(error.message, **context)
        if isinstance(error, TokenExpiredError) and not callable(self.options.token):
            error = AccessError(f"{error.message}; token_file= reads a new one", **context)
        if not isinstance(error, (AccessError, ServerLostError)):
            return error
        # A local server that was started anew has another secret, recorded a moment after it
        # answers. To the rows, it is a lost server that comes back.
        recorded = self._peer.look_up()
        if isinstance(error, AccessError) and recorded != secret:
            return ServerLostError(f"the local server was started anew: {details}", **context)
        return error


def _first(begin: Callable[[], Any], ask_again_s: Sequence[float]) -> Any:
    """Make a call, and again if it takes long; return what was answered first, or failed last."""
    responses: SimpleQueue[Any] = SimpleQueue()
    calls: list[Any] = []
    failed: list[Any] = []
    try:
        for wait_s in (*ask_again_s, math.inf):
            calls.append(begin())
            calls[-1].add_done_callback(responses.put)
            until = time.monotonic() + wait_s
            while len(failed) < len(calls):
                left_s = None if until == math.inf else max(0.0, until - time.monotonic())
                try:
                    call = responses.get(timeout=left_s)
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
