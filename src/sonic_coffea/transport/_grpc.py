"""KServe v2 over gRPC: one connection to one server."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from tritonclient.grpc import service_pb2

from sonic_coffea.errors import (
    AccessError,
    CancelledError,
    DeadlineError,
    ModelNotFoundError,
    OverloadError,
    ResponseError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.transport._channel import Channel, call_metadata
from sonic_coffea.transport._contents import checked, tensors_of, with_contents
from sonic_coffea.transport._datatypes import kserve_name
from sonic_coffea.transport._failures import translate
from sonic_coffea.transport._loopback import LocalPeer
from sonic_coffea.transport._metadata import (
    ModelEntry,
    Response,
    ServerInfo,
    contract_of,
    not_found,
    statistics_of,
)
from sonic_coffea.transport._shared_memory import SharedMemory, shares, unknown_region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._contract import Contract
    from sonic_coffea.transport._metadata import ModelStatistics
    from sonic_coffea.transport._options import ConnectionOptions
    from sonic_coffea.transport._shared_memory import Region

logger = logging.getLogger(__name__)

_COMPRESSIONS = {
    None: None,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
# A live server responds to a probe at once, however busy it is.
_LIVE_TIMEOUT_S = 2.0


class RpcHandle(Protocol):
    """An inference request in flight."""

    def cancel(self) -> object:
        """Cancel the request, here and on the server. Never blocks."""


class Connection:
    """A channel to one server.

    A connection is made without blocking. Its first call reads certificates and opens the channel,
    on the thread that calls; every call may block in the function or file of a token. So nothing
    but `address` and `RpcHandle.cancel` is for a thread that must not block.

    Parameters
    ----------
    address : Address
        The server.
    options : ConnectionOptions
        How to connect.

    Raises
    ------
    ConfigError
        If shared memory is demanded of a server that is not on this machine.
    """

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        self.address = address
        self._options = options
        self._opening = threading.Lock()
        self._closed = False
        self._channel: Channel | None = None
        self._peer = LocalPeer(address)
        self._in_flight: set[Any] = set()
        self._shared: SharedMemory | None = None
        if shares(address, wanted=options.shared_memory):
            demanded = options.shared_memory is True
            self._shared = SharedMemory(self._call, address, demanded=demanded)

    def ready(self) -> bool:
        """Whether the server is ready; False also if it does not respond.

        Blocks for up to ``metadata_s``.
        """
        try:
            return bool(self._call("ServerReady", service_pb2.ServerReadyRequest()).ready)
        except SonicError as error:
            logger.debug("%s is not ready: %s", self.address, error)
            return False

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Probe liveness; `done` is called once, with an error if the server is lost.

        Does not wait for the response. `done` may be called before this returns.
        """
        where = str(self.address)
        try:
            channel, secret = self._open()
            future = channel.stub.ServerLive.future(
                service_pb2.ServerLiveRequest(),
                timeout=_LIVE_TIMEOUT_S,
                metadata=call_metadata(self._options, secret),
            )
        except SonicError as error:
            done(error)
            return
        except ValueError as error:  # a closed channel
            done(CancelledError(str(error), server=where))
            return

        def finished(call: Any) -> None:
            code, details = call.code(), call.details()
            if code == grpc.StatusCode.OK:
                done(None)
            elif code == grpc.StatusCode.DEADLINE_EXCEEDED:
                message = (
                    "the server has requests in flight, and did not respond to a liveness probe "
                    f"within {_LIVE_TIMEOUT_S:g} s"
                )
                done(ServerLostError(message, server=where))
            else:
                error = self._failure(code, details, secret, server=where)
                done(error if isinstance(error, ServerLostError) else None)

        future.add_done_callback(finished)

    def info(self) -> ServerInfo:
        """Ask the server for its metadata. Blocks for up to ``metadata_s``."""
        metadata = self._call("ServerMetadata", service_pb2.ServerMetadataRequest())
        return ServerInfo(
            name=metadata.name, version=metadata.version, extensions=tuple(metadata.extensions)
        )

    def models(self) -> list[ModelEntry]:
        """Ask for the repository index. Blocks for up to ``metadata_s``."""
        try:
            index = self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        except ServerLostError as error:
            if not error.message.endswith(grpc.StatusCode.CANCELLED.name):
                raise
            # The admission of SuperSONIC's proxy, which has no other way of saying so.
            raise OverloadError(
                "the server admits no new clients at the moment, as SuperSONIC does while it is "
                "saturated; it still answers inference requests",
                server=str(self.address),
            ) from None
        return [
            ModelEntry(name=m.name, version=m.version, state=m.state, reason=m.reason)
            for m in index.models
        ]

    def contract(self, model: str, version: str | None) -> Contract:
        """Ask for a model's inputs, outputs and limits. Blocks for a few times ``metadata_s``."""
        request = service_pb2.ModelMetadataRequest(name=model, version=version or "")
        try:
            metadata = self._call("ModelMetadata", request, model=model, version=version)
        except ModelNotFoundError as error:
            try:
                index = self.models()
            except SonicError:
                raise error from None
            raise not_found(model, version, index, server=str(self.address)) from None
        try:
            config = self._config(model, version)
        except ServerLostError:
            # A balancer that has not noticed yet which server is dead may lead each second call
            # there.
            config = self._config(model, version)
        return contract_of(model, version, metadata, config)

    def _config(self, model: str, version: str | None) -> Any:
        """Return the model's configuration, or None from a server that has none."""
        request = service_pb2.ModelConfigRequest(name=model, version=version or "")
        try:
            return self._call("ModelConfig", request, model=model).config
        except (ServerLostError, OverloadError, DeadlineError):
            raise  # the server may have one, with the size of its batches
        except SonicError as error:
            logger.info("%s gives no configuration of %s: %s", self.address, model, error)
            return None

    def statistics(self, model: str, version: str | None) -> ModelStatistics:
        """Ask for a model's statistics. Blocks for up to ``metadata_s``."""
        request = service_pb2.ModelStatisticsRequest(name=model, version=version or "")
        return statistics_of(self._call("ModelStatistics", request, model=model, version=version))

    def infer(
        self,
        contract: Contract,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        *,
        version: str | None,
        request_id: str,
        done: Callable[[Response | SonicError], None],
    ) -> RpcHandle:
        """Send a request; `done` is called once, on a thread of the connection.

        Does not wait for the response, but may block while a new region of shared memory is
        registered with the server, for a few seconds.
        """
        context: dict[str, Any] = {
            "server": str(self.address),
            "model": contract.model,
            "version": version or contract.version,
            "request": request_id,
        }
        if self._closed:
            raise CancelledError("the connection is closed", **context)
        channel, secret = self._open()
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=version or "", id=request_id
        )
        for name, tensor in inputs.items():
            request.inputs.add(name=name, datatype=kserve_name(tensor.dtype), shape=tensor.shape)
        for name in outputs:
            request.outputs.add(name=name)
        region = None if self._shared is None else self._shared.place(inputs, request.inputs)
        try:
            message = with_contents(request, () if region else inputs.values())
            future = channel.infer.future(
                message,
                timeout=self._options.timeouts.request_s,
                metadata=call_metadata(self._options, secret),
                compression=_COMPRESSIONS[self._options.compression],
            )
        except BaseException as error:  # a token that cannot be had, a closed channel
            self._release(region, reusable=True)
            if isinstance(error, ValueError) and self._closed:
                raise CancelledError("the connection is closed", **context) from None
            raise
        sent_bytes = len(message) + (sum(t.nbytes for t in inputs.values()) if region else 0)
        self._in_flight.add(future)

        def finished(call: Any) -> None:
            # gRPC would only log what is raised here, and the rows would wait for ever.
            self._in_flight.discard(call)
            answered = not call.cancelled() and call.code() == grpc.StatusCode.OK
            self._release(region, reusable=answered)
            try:
                outcome = self._outcome(call, contract, sent_bytes, secret, context)
            except ResponseError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001
                outcome = ResponseError(f"cannot read the server's response: {error!r}", **context)
            done(outcome)

        future.add_done_callback(finished)
        if self._closed:
            future.cancel()
        handle: RpcHandle = future
        return handle

    def _release(self, region: Region | None, *, reusable: bool) -> None:
        """Hand back a region, which is used again if the server surely does not read it."""
        if region is not None and self._shared is not None:
            (self._shared.release if reusable else self._shared.discard)(region)

    def _outcome(
        self,
        call: Any,
        contract: Contract,
        sent_bytes: int,
        secret: Mapping[str, str],
        context: Mapping[str, Any],
    ) -> Response | SonicError:
        if call.cancelled():
            code, details = grpc.StatusCode.CANCELLED, "cancelled by this client"
            return translate(code, details, closing=True, **context)
        if call.code() != grpc.StatusCode.OK:
            return self._failure(call.code(), call.details(), secret, **context)
        message = call.result()
        tensors = tensors_of(message)
        if tensors is None:
            return ResponseError("the server's response has outputs without data", **context)
        return Response(
            outputs=checked(tensors, contract, context),
            version=message.model_version,
            sent_bytes=sent_bytes,
            received_bytes=sum(t.nbytes for t in tensors.values()),
        )

    def close(self) -> None:
        """Cancel what is in flight, and close the channel. May be called again.

        May block for a moment while the server unregisters shared memory.
        """
        with self._opening:
            closed, self._closed = self._closed, True
        if closed:
            return
        if self._channel is None or self._shared is None:
            self._shut()
            return
        # The channel stays open for the server to unregister what these requests used.
        for future in list(self._in_flight):
            future.cancel()
        self._shared.close(done=self._shut)

    def _shut(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._peer.close()

    def _open(self) -> tuple[Channel, Mapping[str, str]]:
        """Return the channel, opened by the first call, and the secret of a local server."""
        with self._opening:
            try:
                secret, address = self._peer.secret(), self._peer.address
            except ServerLostError:
                if self._shared is not None:
                    self._shared.forget()
                raise
            if self._channel is None or self._channel.address != address:
                if self._closed:
                    raise CancelledError("the connection is closed", server=str(self.address))
                if self._channel is not None:
                    self._channel.close()
                self._channel = Channel(address, self._options.tls)
            return self._channel, secret

    def _call(
        self, method: str, request: Any, timeout_s: float | None = None, **context: Any
    ) -> Any:
        """Make a call without tensors, and wait for the response."""
        context["server"] = str(self.address)
        channel, secret = self._open()
        try:
            return getattr(channel.stub, method)(
                request,
                timeout=timeout_s or self._options.timeouts.metadata_s,
                metadata=call_metadata(self._options, secret),
            )
        except grpc.RpcError as error:
            failure = self._failure(error.code(), error.details(), secret, **context)
        except ValueError as error:  # a closed channel
            failure = CancelledError(str(error), **context)
        raise failure

    def _failure(
        self, code: Any, details: str | None, secret: Mapping[str, str], **context: Any
    ) -> SonicError:
        """Return our error for a call that was made with a local server's `secret`."""
        error = translate(code, details or "", closing=self._closed, **context)
        if self._shared is not None:
            if unknown_region(details):
                error = ServerLostError(f"the server was started anew: {details}", **context)
            if isinstance(error, ServerLostError):
                self._shared.forget()
        if not isinstance(error, (AccessError, ServerLostError)):
            return error
        # A local server that was started anew has another secret, which is recorded a moment after
        # it answers; to the rows, it is a server that was lost and comes back.
        recorded = self._peer.look_up()
        if isinstance(error, AccessError) and recorded != secret:
            return ServerLostError(f"the local server was started anew: {details}", **context)
        return error
