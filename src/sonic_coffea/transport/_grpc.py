"""KServe v2 over gRPC: one connection to one server."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from tritonclient.grpc import service_pb2

from sonic_coffea.errors import (
    AccessError,
    CancelledError,
    InferenceError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadError,
    RequestError,
    RequestTooLargeError,
    ResponseError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)
from sonic_coffea.transport._channel import Channel, call_metadata
from sonic_coffea.transport._contents import (
    checked,
    classes_of,
    describe,
    tensors_of,
    with_contents,
)
from sonic_coffea.transport._failures import STOOD_STILL, failure_of, translate
from sonic_coffea.transport._heap import LARGE_BYTES, keep_memory
from sonic_coffea.transport._loopback import LocalPeer
from sonic_coffea.transport._metadata import (
    ModelEntry,
    Response,
    ServerInfo,
    agree,
    contract_of,
    newest_of,
    not_found,
    statistics_of,
)
from sonic_coffea.transport._shared_memory import (
    SharedMemory,
    Usability,
    shares,
    unknown_region,
)
from sonic_coffea.transport._wire import to_wire, wire_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._contract import Contract
    from sonic_coffea.transport._metadata import ModelStatistics
    from sonic_coffea.transport._options import ConnectionOptions
    from sonic_coffea.transport._shared_memory import Lend, Region

logger = logging.getLogger(__name__)

_COMPRESSIONS = {
    None: None,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
# A live server responds to a probe at once, however busy it is.
_LIVE_TIMEOUT_S = 2.0
# A deadline that passes before this part of a request's own time is a proxy's.
_EARLY = 0.9
_TRIES = 3
# Servers behind a balancer that are asked for a model before the model counts as missing.
_SERVERS = 5
# Triton's extensions, which other servers lack: gRPC's own servers say so without words.
_OPTIONAL = frozenset({"ModelConfig", "ModelStatistics", "RepositoryIndex"})
_NO_MESSAGE = "the response was cut off: it has a status, and no whole message"


class RpcHandle(Protocol):
    """An inference request in flight."""

    def cancel(self) -> object:
        """Cancel the request, here and on the server. Never blocks."""


# Calls that change nothing. A server that hangs may have got one, behind a balancer with others
# that answer at once: it is made again after these times. The last one goes over another
# connection, if nothing has come over the first: it may be the connection that hangs.
_READS = ("ServerMetadata", "RepositoryIndex", "ModelMetadata", "ModelConfig", "ModelStatistics")
_ASK_AGAIN_S = (0.2, 1.0, 2.0)


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
    known : Usability, optional
        What other connections to the server have found about shared memory.

    Raises
    ------
    ConfigError
        If shared memory is demanded of a server that is not on this machine.
    """

    def __init__(
        self, address: Address, options: ConnectionOptions, *, known: Usability | None = None
    ) -> None:
        self.address = address
        self._options = options
        self._opening = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._channel: Channel | None = None
        self._replaced: list[Channel] = []
        self._peer = LocalPeer(address)
        self._shared: SharedMemory | None = None
        if shares(address, wanted=options.shared_memory):
            demanded = options.shared_memory is True
            self._shared = SharedMemory(self._call, address, demanded=demanded, known=known)

    def another(self) -> Connection:
        """Return one more connection to the same server, which knows what this one has found."""
        known = None if self._shared is None else self._shared.known
        return Connection(self.address, self._options, known=known)

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
            if call.code() == grpc.StatusCode.OK:
                done(None)
            elif call.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                self._replace(channel)
                message = (
                    "the server has requests in flight, and did not respond to a liveness probe "
                    f"within {_LIVE_TIMEOUT_S:g} s"
                )
                done(ServerLostError(message, server=where))
            else:
                error = self._failure(call, secret, server=where)
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
            if not error.message.endswith((grpc.StatusCode.CANCELLED.name, _NO_MESSAGE)):
                raise
            # The admission of SuperSONIC's proxy, which has no other way of saying so.
            raise OverloadError(
                "the server admits no new clients at the moment, as SuperSONIC does while it is "
                "saturated; it still answers inference requests",
                server=str(self.address),
            ) from None
        return [
            ModelEntry(
                name=m.name,
                version=m.version,
                # MLServer says "State.READY".
                state=m.state.rpartition(".")[2],
                reason=m.reason,
            )
            for m in index.models
        ]

    def contract(self, model: str, version: str | None) -> Contract:
        """Ask for a model's inputs, outputs and limits. Blocks for a few times ``metadata_s``.

        Raises
        ------
        ModelNotReadyError
            If a server has it, or is to have it soon.
        ModelNotFoundError
            If it has to be made, or mended, first.
        """
        tries = 0
        while True:
            tries += 1
            metadata = self._metadata(model, version)
            newest = version or newest_of(metadata.versions)
            try:
                config = self._config(model, newest or None)
            except ModelNotFoundError:
                if tries < _TRIES:
                    continue
                raise
            if config is None or agree(metadata, config):
                return contract_of(model, newest, metadata, config)
            # A balancer has asked two servers, of which one has been updated.
            if tries == _TRIES:
                message = "its metadata and its configuration do not fit; is it being replaced?"
                raise ModelNotReadyError(
                    message, server=str(self.address), model=model, version=version
                )

    def _metadata(self, model: str, version: str | None) -> Any:
        """Return the model's metadata."""
        request = service_pb2.ModelMetadataRequest(name=model, version=version or "")
        tries = 0
        while True:
            tries += 1
            try:
                return self._call("ModelMetadata", request, model=model, version=version)
            except ModelNotFoundError as error:
                # Another server behind a balancer may have it.
                if tries < _SERVERS:
                    continue
                try:
                    index = self.models()
                except SonicError:
                    raise error from None
                raise not_found(model, version, index, server=str(self.address)) from None

    def _config(self, model: str, version: str | None) -> Any:
        """Return the model's configuration, or None from a server that has none."""
        request = service_pb2.ModelConfigRequest(name=model, version=version or "")
        tries = 0
        while True:
            tries += 1
            try:
                return self._call("ModelConfig", request, model=model).config
            except (InferenceError, ModelNotFoundError, ServerLostError) as error:
                # A balancer may lead this call to another server than the one before, which is
                # dead, or does not have the model.
                if tries < _TRIES:
                    continue
                if not isinstance(error, InferenceError):
                    raise
                failure: SonicError = error
            except (AccessError, RequestError) as error:
                if isinstance(error, TokenExpiredError):
                    raise
                failure = error
            # Of any other failure, nothing follows: there may be one, with the size of its batches.
            logger.info("%s gives no configuration of %r: %s", self.address, model, failure)
            return None

    def labels(self, contract: Contract, version: str | None) -> dict[str, list[str]]:
        """Ask for the labels of outputs whose configuration names a file of them.

        No call returns them, but Triton sends them with the classes of a response: so a request of
        one row of zeros is made. Blocks for up to ``metadata_s`` a call.
        """
        config = self._config(contract.model, version or contract.version)
        named = (
            {} if config is None else {o.name: o.dims for o in config.output if o.label_filename}
        )
        if not named:
            return {}
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=version or "", id="labels"
        )
        inputs = contract.zeros(1)
        describe(request, inputs, ())
        request.raw_input_contents.extend(t.tobytes() for t in inputs.values())
        for name, dims in named.items():
            output = request.outputs.add(name=name)
            output.parameters["classification"].int64_param = max(1, math.prod(dims))
        response = self._call("ModelInfer", request, model=contract.model)
        return {
            output.name: classes_of(contents)
            for output, contents in zip(response.outputs, response.raw_output_contents, strict=True)
        }

    def statistics(self, model: str, version: str | None) -> ModelStatistics:
        """Ask for a model's statistics. Blocks for up to ``metadata_s``."""
        request = service_pb2.ModelStatisticsRequest(name=model, version=version or "")
        return statistics_of(self._call("ModelStatistics", request, model=model, version=version))

    def infer(
        self,
        contract: Contract,
        pack: Callable[[Lend | None], Mapping[str, NDArray[Any]]],
        outputs: Sequence[str],
        *,
        nbytes: int = 0,
        version: str | None,
        request_id: str,
        done: Callable[[Response | SonicError], None],
    ) -> RpcHandle:
        """Send a request; `done` is called once, on a thread of the connection.

        Does not wait for the response, but may block while a new region of shared memory is
        registered with the server, for a few seconds.

        Parameters
        ----------
        pack : callable
            Returns the tensors by input, in memory that it is lent, or in its own.
        nbytes : int
            About how many bytes they have.
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
        message, region, sent_bytes = self._packed(request, contract, pack, outputs, nbytes)
        try:
            sent_at = time.monotonic()
            future = channel.infer.future(
                message,
                timeout=self._options.timeouts.request_s,
                metadata=call_metadata(self._options, secret),
                compression=_COMPRESSIONS[self._options.compression],
            )
        except BaseException as error:  # a token that cannot be had, a closed channel
            self._release(region, reusable=True)
            if not isinstance(error, ValueError):
                raise
            if self._closed:
                raise CancelledError("the connection is closed", **context) from None
            if channel is self._channel:
                raise
            return self.infer(
                contract,
                pack,
                outputs,
                nbytes=nbytes,
                version=version,
                request_id=request_id,
                done=done,
            )
        channel.in_flight.add(future)

        def finished(call: Any) -> None:
            # gRPC would only log what is raised here, and the rows would wait for ever.
            channel.in_flight.discard(call)
            answered = channel.answered(call)
            try:
                outcome = self._outcome(call, contract, sent_bytes, secret, sent_at, context)
            except ResponseError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001
                outcome = ResponseError(f"cannot read the server's response: {error!r}", **context)
            # Not before it is known whether there are several servers that have to unregister it.
            self._release(region, reusable=answered)
            done(outcome)

        future.add_done_callback(finished)
        if self._closed:
            future.cancel()
        handle: RpcHandle = future
        return handle

    def _packed(
        self,
        request: Any,
        contract: Contract,
        pack: Callable[[Lend | None], Mapping[str, NDArray[Any]]],
        outputs: Sequence[str],
        nbytes: int,
    ) -> tuple[bytes, Region | None, int]:
        """Return the message, the region that has the tensors or None, and all bytes to be sent."""
        shared = self._shared
        region = None if shared is None else shared.room(nbytes, len(contract.inputs))
        try:
            inputs = pack(None if region is None else region.lend)
            describe(request, inputs, outputs, contract.parameters)
            sent = {name: to_wire(tensor) for name, tensor in inputs.items()}
            if shared is not None:
                region = shared.place(sent, request.inputs, region)
        except BaseException:
            self._release(region, reusable=True)
            raise
        if region is None:
            if nbytes > LARGE_BYTES:
                keep_memory()
            message = with_contents(request, sent.values())
            return message, None, len(message)
        message = with_contents(request, ())
        return message, region, len(message) + sum(t.nbytes for t in sent.values())

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
        sent_at: float,
        context: Mapping[str, Any],
    ) -> Response | SonicError:
        if call.cancelled():
            code, details = grpc.StatusCode.CANCELLED, "cancelled by this client"
            return translate(code, details, closing=True, **context)
        if call.code() != grpc.StatusCode.OK:
            early = time.monotonic() - sent_at < _EARLY * self._options.timeouts.request_s
            return self._failure(call, secret, early=early, **context)
        message = call.result()
        if message is None:
            return ServerLostError(_NO_MESSAGE, **context)
        tensors = tensors_of(message)
        if tensors is None:
            return ResponseError("the server's response has outputs without data", **context)
        return Response(
            outputs=checked(tensors, contract, context),
            version=message.model_version,
            sent_bytes=sent_bytes,
            received_bytes=sum(map(wire_bytes, tensors.values())),
        )

    def close(self) -> None:
        """Cancel what is in flight, and close the channel. May be called again.

        May block for a moment while the server unregisters shared memory.
        """
        if os.getpid() != self._process:  # a forked child: it is its parent's
            return
        with self._opening:
            closed, self._closed = self._closed, True
        for channel in self._replaced:
            channel.close()
        if closed:
            return
        if self._channel is None or self._shared is None:
            self._shut()
            return
        # The channel stays open for the server to unregister what these requests used.
        for future in list(self._channel.in_flight):
            future.cancel()
        self._shared.close(done=self._shut)

    def _shut(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._peer.close()

    def _replace(self, channel: Channel) -> None:
        """Open another channel for all that follows: to the network, this one may not be there.

        What is in flight on it may still be answered, if it was the server behind it that hangs.
        """
        with self._opening:
            if channel is not self._channel or self._closed:
                return
            self._channel = None
            over = [known for known in self._replaced if not known.in_flight]
            self._replaced = [known for known in self._replaced if known.in_flight]
            self._replaced.append(channel)
        for known in over:
            known.close()

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
                    self._replaced.append(self._channel)
                self._channel = Channel(address, self._options.tls)
            return self._channel, secret

    def _call(
        self, method: str, request: Any, timeout_s: float | None = None, **context: Any
    ) -> Any:
        """Make a call without tensors, and wait for the response."""
        context["server"] = str(self.address)
        channel, secret = self._open()
        metadata = call_metadata(self._options, secret)
        asked_at = time.monotonic()
        until = asked_at + (timeout_s or self._options.timeouts.metadata_s)
        tries = count(1)

        def begin() -> Any:
            nonlocal channel
            if next(tries) == len(_ASK_AGAIN_S) + 1 and channel.heard_at < asked_at:
                self._replace(channel)
                channel, _ = self._open()
            timeout_s = until - time.monotonic()
            return getattr(channel.stub, method).future(request, timeout_s, metadata)

        try:
            call = _first(begin, _ASK_AGAIN_S if method in _READS else ())
        except ValueError as error:  # a closed channel
            lost = CancelledError if self._closed else ServerLostError
            failure: SonicError = lost(str(error), **context)
        else:
            if not channel.answered(call):
                failure = self._failure(call, secret, optional=method in _OPTIONAL, **context)
                if isinstance(failure, RequestTooLargeError):  # it is the server that has no room
                    failure = InferenceError(f"{method} failed: {call.details()}", **context)
            elif (response := call.result()) is not None:
                return response
            else:
                failure = ServerLostError(_NO_MESSAGE, **context)
        raise failure

    def _failure(
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
        error = translate(code, details, trailers, closing=self._closed, early=early, **context)
        if self._shared is not None:
            if unknown_region(details):
                meaning = self._shared.unknown(details)
                error = ServerLostError(meaning, **context)
                error.undelivered = True
            elif isinstance(error, ServerLostError):
                self._shared.forget()
        if secret and failure_of(code, details, trailers).hint is STOOD_STILL:  # so it ends itself
            error = ServerLostError(error.message, **context)
        if isinstance(error, TokenExpiredError) and not callable(self._options.token):
            error = AccessError(f"{error.message}; token_file= reads a new one", **context)
        if not isinstance(error, (AccessError, ServerLostError)):
            return error
        # A local server that was started anew has another secret, which is recorded a moment after
        # it answers; to the rows, it is a server that was lost and comes back.
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
