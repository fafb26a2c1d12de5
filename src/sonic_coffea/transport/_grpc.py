"""KServe v2 over gRPC: one connection to one server."""

from __future__ import annotations

import logging
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from tritonclient.grpc import service_pb2

from sonic_coffea.errors import CancelledError, ResponseError, ServerLostError, SonicError
from sonic_coffea.transport._heap import LARGE_BYTES, keep_memory
from sonic_coffea.transport._link import CLOSED, NO_MESSAGE
from sonic_coffea.transport._metadata import Response
from sonic_coffea.transport._model_queries import ModelQueries
from sonic_coffea.transport._tensors import describe, tensors_of, wire_bytes, with_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.transport._contract import Contract
    from sonic_coffea.transport._shared_memory import Lend, Region

logger = logging.getLogger(__name__)

_COMPRESSIONS = {
    None: None,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
# A live server responds to a probe at once, however busy it is.
_LIVE_TIMEOUT_S = 2.0
# A deadline that passes before this fraction of a request's own timeout is a proxy's.
_EARLY = 0.9


class RpcHandle(Protocol):
    """An inference request in flight."""

    def cancel(self) -> object:
        """Cancel the request, here and on the server. Never blocks."""


class Connection(ModelQueries):
    """A connection to one server.

    A connection is made without blocking. Its first call reads certificates and opens the channel,
    on the thread that calls; every call may block in the function or file of a token. So nothing
    but `address` and `RpcHandle.cancel` is for a thread that must not block.
    """

    def another(self) -> Connection:
        """Return one more connection to the server."""
        return type(self)(self.address, self._options)

    def ready(self) -> bool:
        """Whether the server is ready; False also if it does not respond.

        Blocks for up to ``metadata_timeout_s``.
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
        request = service_pb2.ServerLiveRequest()
        try:
            future, channel, token = self._begin("ServerLive", request, _LIVE_TIMEOUT_S)
        except SonicError as error:
            done(error)
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
                error = self._failure(call, token, server=where)
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
        if self._closed:
            raise CancelledError(CLOSED, **context)
        channel = self._open()
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=version or "", id=request_id
        )
        message, region, sent_bytes = self._packed(request, contract, pack, outputs, nbytes)
        sent_at = time.monotonic()
        try:
            future, channel, token = self._begin(
                "ModelInfer",
                message,
                self._options.request_timeout_s,
                channel,
                compression=_COMPRESSIONS[self._options.compression],
            )
        except BaseException:  # such as a token that cannot be had
            self._release(region, reusable=True)
            raise
        channel.in_flight.add(future)

        def finished(call: Any) -> None:
            # gRPC would only log what is raised here, and the rows would wait for ever.
            channel.in_flight.discard(call)
            answered = channel.answered(call)
            outcome: Response | SonicError
            try:
                if answered:
                    outcome = _response(call, contract, sent_bytes, context)
                else:
                    early_s = _EARLY * self._options.request_timeout_s
                    early = time.monotonic() - sent_at < early_s
                    outcome = self._failure(call, token, early=early, **context)
            except SonicError as error:
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

    def ask(
        self,
        contract: Contract,
        version: str | None,
        tensors: Mapping[str, NDArray[Any]],
        *,
        requests: int = 1,
        in_flight: int = 1,
    ) -> tuple[Response, float]:
        """Send requests, `in_flight` at a time; return the last response and the total time."""
        outputs = [spec.name for spec in contract.outputs]
        outcomes: SimpleQueue[Response | SonicError] = SimpleQueue()
        begun = time.perf_counter()
        for number in range(in_flight + requests):
            if number >= in_flight:
                outcome = outcomes.get()
                if isinstance(outcome, SonicError):
                    raise outcome
                response = outcome
            if number < requests:
                self.infer(
                    contract,
                    lambda _: tensors,
                    outputs,
                    version=version,
                    request_id=f"zeros-{number}",
                    done=outcomes.put,
                )
        return response, time.perf_counter() - begun

    def _packed(
        self,
        request: Any,
        contract: Contract,
        pack: Callable[[Lend | None], Mapping[str, NDArray[Any]]],
        outputs: Sequence[str],
        nbytes: int,
    ) -> tuple[bytes, Region | None, int]:
        """Return the message, the region of the tensors or None, and the bytes to be sent."""
        shared = self._shared
        region = None if shared is None else shared.room(nbytes, len(contract.inputs))
        try:
            inputs = pack(None if region is None else region.lend)
            sent = describe(request, inputs, outputs, contract.parameters)
            placed = region is not None and region.place(sent.values(), request.inputs)
        except BaseException:
            self._release(region, reusable=True)
            raise
        if not placed:
            if nbytes > LARGE_BYTES:
                keep_memory()
            message = with_contents(request, sent.values())
            self._release(region, reusable=True)
            return message, None, len(message)
        message = with_contents(request, ())
        return message, region, len(message) + sum(t.nbytes for t in sent.values())

    def _release(self, region: Region | None, *, reusable: bool) -> None:
        """Hand back a region, which is used again if the server surely does not read it."""
        if region is not None and self._shared is not None:
            self._shared.release(region, reusable=reusable)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _response(
    call: Any, contract: Contract, sent_bytes: int, context: Mapping[str, Any]
) -> Response:
    """Return the response to an inference request that was answered."""
    message = call.result()
    if message is None:
        raise ServerLostError(NO_MESSAGE, **context)
    tensors = tensors_of(message)
    if tensors is None:
        raise ResponseError("the server's response has outputs without data", **context)
    return Response(
        outputs=contract.received(tensors, context),
        version=message.model_version,
        sent_bytes=sent_bytes,
        received_bytes=sum(map(wire_bytes, tensors.values())),
    )
