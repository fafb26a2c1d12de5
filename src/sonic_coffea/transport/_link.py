"""The way to a server: its channel, which may be replaced, and calls without tensors."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea.errors import (
    AccessError,
    CancelledError,
    ConfigError,
    InferenceError,
    RequestTooLargeError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)
from sonic_coffea.transport._failures import (
    NO_CERT,
    STUB_UNHEALTHY,
    UNKNOWN_REGION,
    failure_of,
    translate,
)
from sonic_coffea.transport._shared_memory import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._options import ConnectionOptions

logger = logging.getLogger(__name__)

# Triton's extensions, which other servers lack: gRPC's own servers say so without words.
_OPTIONAL = frozenset({"ModelConfig", "ModelStatistics", "RepositoryIndex"})
CLOSED = "the connection is closed"
NO_MESSAGE = "the response was cut off: it has a status, and no whole message"

# Read-only calls are repeated after these times: behind a balancer, one server may hang while the
# others answer at once. If no response has come over the channel since the first, the last goes
# over a new channel, as the connection itself may hang.
_READS = ("ServerMetadata", "RepositoryIndex", "ModelMetadata", "ModelConfig", "ModelStatistics")
_REPEAT_AFTER_S = (0.2, 1.0, 2.0)
# A server that refuses a handshake does so at once.
_HANDSHAKE_S = 2.0

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
)


class Channel:
    """A gRPC channel and its methods; opening it reads certificates, closing it cancels calls.

    Attributes
    ----------
    in_flight : set
        The inference requests that are in flight on it.
    heard_at : float
        When the last call was answered, by `time.monotonic`.
    files : tuple
        What `Tls.changed` said of the certificates that were read.
    """

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        # Proxies of a cluster's web traffic, in the environment, lead to no inference server.
        proxy = ("grpc.http_proxy", options.proxy or "")
        arguments = [*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(bool(options.proxy))), proxy]
        self.files = options.tls.changed()
        if address.tls:
            root, cert, key = options.tls.read()
            credentials = grpc.ssl_channel_credentials(root, key, cert)
            channel = grpc.secure_channel(address.target, credentials, options=arguments)
        else:
            channel = grpc.insecure_channel(address.target, options=arguments)
        self._token = options.token
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
            if self._token is not None:
                self._token.accepted = True
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
        # What the handshake told that followed a failure, if there was one since the last answer.
        self._refusals: tuple[SonicError | None, ...] = ()
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
        """Return the channel, opened by the first call, and anew when a certificate was renewed."""
        tls = self._options.tls
        files = tls.changed() if self.address.tls else None
        with self._opening:
            channel = self._channel
        if channel is not None and files not in (None, channel.files):
            try:
                tls.read()
            except ConfigError as problem:  # it may be half written
                channel.files = files
                logger.warning("%s; the connection stays as it is until the file changes", problem)
            else:
                self._replace(channel)
        with self._opening:
            if self._channel is None:
                if self._closed:
                    raise CancelledError(CLOSED, server=str(self.address))
                self._channel = Channel(self.address, self._options)
            return self._channel

    def _replace(self, channel: Channel) -> None:
        """Have the next call open another channel, as the network may have forgotten this one.

        Calls in flight on it may still be answered, if only the server behind it hangs.
        """
        with self._opening:
            if channel is not self._channel or self._closed:
                return
            self._channel, self._refusals = None, ()
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
    ) -> tuple[Any, Channel, str | None]:
        """Send a message, over another channel if the first is replaced and closed meanwhile.

        Return the call, its channel and its token.
        """
        while True:
            channel = channel or self._open()
            token = None if self._options.token is None else self._options.token()
            headers = self._options.metadata(token)
            try:
                call = getattr(channel.stub, method).future(message, timeout_s, headers, **options)
            except ValueError:  # a closed channel
                if self._closed:
                    raise CancelledError(CLOSED, server=str(self.address)) from None
                if channel is self._channel:
                    raise
                channel = None
            else:
                return call, channel, token

    def _call(
        self, method: str, request: Any, timeout_s: float | None = None, **context: Any
    ) -> Any:
        """Make a call without tensors, and wait for the response."""
        context["server"] = str(self.address)
        begun_at = time.monotonic()
        until = begun_at + (timeout_s or self._options.metadata_timeout_s)
        begun: list[tuple[Channel, str | None]] = []

        def begin() -> Any:
            if len(begun) == len(_REPEAT_AFTER_S) and begun[-1][0].heard_at < begun_at:
                self._replace(begun[-1][0])
            call, channel, token = self._begin(method, request, until - time.monotonic())
            begun.append((channel, token))
            return call

        call = _first(begin, _REPEAT_AFTER_S if method in _READS else ())
        channel, token = begun[-1]
        if not channel.answered(call):
            failure = self._failure(call, token, optional=method in _OPTIONAL, **context)
            if isinstance(failure, ServerLostError):
                socket_path = self.address.path
                failure.gone = socket_path is not None and not Path(socket_path).parent.exists()
                row = failure_of(call.code(), call.details() or "")
                if row.phase == "connection" and not failure.unreached:
                    # Once, as a server may count connections.
                    self._refusals = self._refusals or (self._refusal(),)
                    failure = self._refusals[0].at() if self._refusals[0] else failure
            if isinstance(failure, RequestTooLargeError):  # it is the server that has no room
                failure = InferenceError(f"{method} failed: {call.details()}", **context)
            raise failure
        response = call.result()
        if response is None:
            raise ServerLostError(NO_MESSAGE, **context)
        self._refusals = ()
        self._shortest_s = min(self._shortest_s, channel.heard_at - begun_at)
        return response

    def _failure(
        self,
        call: Any,
        token: str | None,
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
        if token is not None and code == grpc.StatusCode.UNAUTHENTICATED:
            if not self._options.token.renewable:
                error = AccessError(f"{error.message}; token_file= reads a new one", **context)
            elif self._options.token.refused(token):
                error = TokenExpiredError(error.message, **context)
        return error

    def _refusal(self) -> SonicError | None:
        """Return why no connection can ever be made, if a TLS handshake tells; this may block.

        gRPC has the same words for a server that refuses a certificate, wants TLS, or is gone.
        """
        import ssl

        address, server = self.address, str(self.address)
        if address.path is not None or self._options.proxy is not None:
            return None
        context = self._options.tls.context() if address.tls else ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # gRPC has verified it
        context.set_alpn_protocols(["h2"])
        ended = _shake_hands(address, context)
        if ended is None:
            return None
        if not address.tls:
            wants_tls = not ended or "ALERT" in ended
            what = f"the port wants TLS; did you mean grpcs://{address.target}?"
            return ConfigError(what, server=server) if wants_tls else None
        if not ended:
            # In TLS 1.3, the handshake is over before the server looks at the certificate, and gRPC
            # hangs up without a word; as a proxy does whose server is lost, also in TLS 1.2.
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            ended = _shake_hands(address, context)
            return AccessError(NO_CERT, server=server) if ended else None
        return AccessError(f"{NO_CERT}: {ended}", server=server) if "ALERT" in ended else None


def _shake_hands(address: Address, context: Any) -> str | None:
    """Return why a TLS handshake fails; empty if the server hangs up later; None: it does not."""
    try:
        plain = socket.create_connection((address.host, address.port), _HANDSHAKE_S)
    except OSError:
        return None
    with plain:
        try:
            secure = context.wrap_socket(plain, server_hostname=address.host)
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", error) or error)
        with secure:
            try:
                return None if address.tls and secure.recv(1) else ""
            except TimeoutError:
                return None
            except OSError as error:
                return str(getattr(error, "reason", ""))


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
