"""KServe v2 over gRPC: one connection to one server."""

from __future__ import annotations

import logging
import os
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from tritonclient.grpc import service_pb2

from sonic_coffea.errors import CancelledError, ResponseError, ServerLostError, SonicError
from sonic_coffea.transport._contents import checked, describe, tensors_of, with_contents
from sonic_coffea.transport._datatypes import to_wire, wire_bytes
from sonic_coffea.transport._failures import translate
from sonic_coffea.transport._heap import LARGE_BYTES, keep_memory
from sonic_coffea.transport._link import NO_MESSAGE, Channel, Link
from sonic_coffea.transport._metadata import Response
from sonic_coffea.transport._model_queries import ModelQueries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from sonic_coffea.transport._address import Address
    from sonic_coffea.transport._contract import Contract
    from sonic_coffea.transport._options import ConnectionOptions
    from sonic_coffea.transport._regions import Lend, Region
    from sonic_coffea.transport._shared_memory import Usability

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


class RpcHandle(Protocol):
    """An inference request in flight."""

    def cancel(self) -> object:
        """Cancel the request, here and on the server. Never blocks."""


class Connection(ModelQueries):
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
        self._process = os.getpid()
        self._link = Link(address, options, known)

    @property
    def round_trip_s(self) -> float:
        """How far the server is, by calls without tensors so far; 0 if that is not known."""
        return self._link.round_trip_s

    def another(self) -> Connection:
        """Return one more connection to the server; both share what they find about memory."""
        known = None if self._link.shared is None else self._link.shared.known
        return Connection(self.address, self._link.options, known=known)

    def ready(self) -> bool:
        """Whether the server is ready; False also if it does not respond.

        Blocks for up to ``metadata_s``.
        """
        try:
            return bool(self._link.call("ServerReady", service_pb2.ServerReadyRequest()).ready)
        except SonicError as error:
            logger.debug("%s is not ready: %s", self.address, error)
            return False

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Probe liveness; `done` is called once, with an error if the server is lost.

        Does not wait for the response. `done` may be called before this returns.
        """
        where = str(self.address)
        try:
            channel, secret = self._link.open()
            future = channel.stub.ServerLive.future(
                service_pb2.ServerLiveRequest(),
                timeout=_LIVE_TIMEOUT_S,
                metadata=self._link.metadata(secret),
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
                self._link.replace(channel)
                message = (
                    "the server has requests in flight, and did not respond to a liveness probe "
                    f"within {_LIVE_TIMEOUT_S:g} s"
                )
                done(ServerLostError(message, server=where))
            else:
                error = self._link.failure(call, secret, server=where)
                done(error if isinstance(error, ServerLostError) else None)

        future.add_done_callback(finished)

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
        if self._link.closed:
            raise CancelledError("the connection is closed", **context)
        channel, secret = self._link.open()
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=version or "", id=request_id
        )
        message, region, sent_bytes = self._packed(request, contract, pack, outputs, nbytes)
        sent_at = time.monotonic()
        try:
            channel, secret, future = self._begin(channel, secret, message, context)
        except BaseException:  # such as a token that cannot be had
            self._release(region, reusable=True)
            raise
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
        if self._link.closed:
            future.cancel()
        handle: RpcHandle = future
        return handle

    def _begin(
        self, channel: Channel, secret: Mapping[str, str], message: bytes, context: dict[str, Any]
    ) -> tuple[Channel, Mapping[str, str], Any]:
        """Send a message, over another channel if this one was replaced meanwhile."""
        while True:
            try:
                future = channel.infer.future(
                    message,
                    timeout=self._link.options.timeouts.request_s,
                    metadata=self._link.metadata(secret),
                    compression=_COMPRESSIONS[self._link.options.compression],
                )
            except ValueError:  # a closed channel
                if self._link.closed:
                    raise CancelledError("the connection is closed", **context) from None
                if channel is self._link.channel:
                    raise
                channel, secret = self._link.open()
            else:
                return channel, secret, future

    def ask(
        self,
        contract: Contract,
        version: str | None,
        tensors: Mapping[str, NDArray[Any]],
        *,
        requests: int = 1,
        in_flight: int = 1,
    ) -> tuple[Response, float]:
        """Make requests, `in_flight` at a time; return the last response and the time of all."""
        outputs = [spec.name for spec in contract.outputs]
        outcomes: SimpleQueue[Response | SonicError] = SimpleQueue()
        begun = time.perf_counter()
        for number in range(in_flight + requests):
            if number >= in_flight:
                outcome = outcomes.get()
                if isinstance(outcome, SonicError):
                    raise outcome
                answer = outcome
            if number < requests:
                self.infer(
                    contract,
                    lambda _: tensors,
                    outputs,
                    version=version,
                    request_id=f"zeros-{number}",
                    done=outcomes.put,
                )
        return answer, time.perf_counter() - begun

    def _packed(
        self,
        request: Any,
        contract: Contract,
        pack: Callable[[Lend | None], Mapping[str, NDArray[Any]]],
        outputs: Sequence[str],
        nbytes: int,
    ) -> tuple[bytes, Region | None, int]:
        """Return the message, the region of the tensors or None, and the bytes to be sent."""
        shared = self._link.shared
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
        if region is not None and self._link.shared is not None:
            (self._link.shared.release if reusable else self._link.shared.discard)(region)

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
            early = time.monotonic() - sent_at < _EARLY * self._link.options.timeouts.request_s
            return self._link.failure(call, secret, early=early, **context)
        message = call.result()
        if message is None:
            return ServerLostError(NO_MESSAGE, **context)
        tensors = tensors_of(message)
        if tensors is None:
            return ResponseError("the server's response has outputs without data", **context)
        return Response(
            outputs=checked(tensors, contract, context),
            version=message.model_version,
            sent_bytes=sent_bytes,
            received_bytes=sum(map(wire_bytes, tensors.values())),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is in flight, and close the channel. May be called again.

        May block for a moment while the server unregisters shared memory.
        """
        link = self._link
        if os.getpid() != self._process or not link.close():  # a forked child's is its parent's
            return
        if link.channel is None or link.shared is None:
            link.shut()
            return
        # The channel stays open for the server to unregister what these requests used.
        for future in list(link.channel.in_flight):
            future.cancel()
        link.shared.close(done=link.shut)
