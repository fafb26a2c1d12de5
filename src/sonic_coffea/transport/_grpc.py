"""KServe v2 over gRPC: one connection to one server."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2, service_pb2

from sonic_coffea import errors
from sonic_coffea._files import is_locked
from sonic_coffea.errors import ConfigError, SonicError
from sonic_coffea.transport._address import Address
from sonic_coffea.transport._channel import Channel
from sonic_coffea.transport._contract import Contract, ModelEntry, newest_of, not_found
from sonic_coffea.transport._failures import UNKNOWN_REGION, translate
from sonic_coffea.transport._handshake import refusal
from sonic_coffea.transport._heap import LARGE_BYTES, keep_memory
from sonic_coffea.transport._model_config import contract_of, digest_of
from sonic_coffea.transport._options import ConnectionOptions
from sonic_coffea.transport._shared_memory import SharedMemory
from sonic_coffea.transport._tensors import classes_of, describe, tensors_of, with_contents
from sonic_coffea.transport._transport import (
    PROMPT_S,
    ModelStatistics,
    Response,
    ServerMetadata,
    Transport,
)

logger = logging.getLogger(__name__)

# Triton's extensions, which other servers lack: gRPC's own servers say so without words.
_OPTIONAL = frozenset({"ModelConfig", "ModelStatistics", "RepositoryIndex"})
# Questions are asked again after these times: behind a balancer, one server may hang while the
# others answer at once. The last time is over a new channel, as the connection itself may hang.
_READS = _OPTIONAL | {"ServerMetadata", "ModelMetadata"}
_REPEAT_AFTER_S = (0.5, 1.5)
_NO_MESSAGE = "the response was cut off: it has a status, and no whole message"


class Connection(Transport):
    """A transport by gRPC, and what else a server can be asked.

    Its first call reads certificates and opens the channel, on the thread that calls. Calls without
    tensors block for up to ``metadata_timeout_s``.

    Raises
    ------
    ConfigError
        If shared memory is demanded of a server that is not on this machine.
    """

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        self.address = address
        self._options = options
        self._process = os.getpid()
        self._lock = threading.Lock()
        # The last one is in use; calls in flight on the others may still be answered.
        self._channels: list[Channel] = []
        self._closed = False
        # Of a call without tensors; the first call takes longer, as it makes the connection.
        self._shortest_s = math.inf
        # Why the server refuses connections, if a handshake was tried since the last answer.
        self._refusals: tuple[SonicError | None, ...] = ()
        self._shared = SharedMemory(self._call, address) if options.shared_memory else None

    def close(self) -> None:
        """Cancel what is in flight, and close the channels. May be called again.

        May block for a moment while the server unregisters shared memory.
        """
        if os.getpid() != self._process:  # a forked child's is its parent's
            return
        with self._lock:
            self._closed = True
            calls = [call for channel in self._channels for call in list(channel.in_flight)]
        for call in calls:
            call.cancel()
        if self._shared is not None:
            # The channel is open for the server to unregister what these requests used.
            self._shared.close()
        with self._lock:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _start(
        self,
        method: str,
        message: Any,
        timeout_s: float,
        done: Callable[[Any], None],
        **context: Any,
    ) -> Callable[[], object]:
        """Start a call, and return what cancels it.

        `done` is called once, with the response or an error of ours.

        After a call without tensors that had no answer for long, the next call opens another
        channel: the network may have dropped this connection.
        """
        token = None if self._options.token is None else self._options.token()
        headers = self._options.metadata(token)
        files = self._options.certificate_states() if self.address.tls else ()
        # Under the lock, so that a channel that is idle and not in use stays so.
        with self._lock:
            # Shared memory is unregistered meanwhile.
            if self._closed and (not self._channels or method == "ModelInfer"):
                raise errors.CancelledError("the connection is closed", server=str(self.address))
            channel, begun_at = self._open(files), time.monotonic()
            start = getattr(channel.stub, method).future
            call = start(message, timeout_s, headers)
            channel.in_flight.add(call)

        def over(_: Any) -> None:
            channel.in_flight.discard(call)
            if call.code() == grpc.StatusCode.OK:
                if self._options.token is not None:
                    self._options.token.accepted = True
                response = call.result()
                if response is None:
                    response = errors.ServerLostError(_NO_MESSAGE, **context)
                done(response)
                return
            late = call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if late and method != "ModelInfer" and timeout_s >= _REPEAT_AFTER_S[-1]:
                channel.files, self._refusals = None, ()
            # A deadline that passes sooner than that of the request was a proxy's.
            early = method == "ModelInfer" and time.monotonic() - begun_at < 0.9 * timeout_s
            done(self._failure(call, method, token, early=early, **context))

        call.add_done_callback(over)
        cancel: Callable[[], object] = call.cancel
        return cancel

    def _open(self, files: object) -> Channel:
        """Return the channel to use: a new one if the last hung, or a certificate was renewed."""
        channel = self._channels[-1] if self._channels else None
        if channel is None or channel.files != files:
            try:
                new = Channel(self.address, self._options, files)
            except ConfigError as problem:  # it may be half written
                if channel is None or channel.files is None:
                    raise
                channel.files = files
                logger.warning("%s; the connection stays as it is until the file changes", problem)
            else:
                for old in self._channels:
                    if not old.in_flight:
                        old.close()
                self._channels = [*(old for old in self._channels if old.in_flight), new]
        return self._channels[-1]

    def _failure(
        self, call: Any, method: str, token: str | None, *, early: bool, **context: Any
    ) -> SonicError:
        """Return our error for a failed call."""
        code, details, source = call.code(), call.details() or "", self._options.token
        # A server may repeat secrets. The short words of headers are none, and may be its own.
        words = " ".join(map(str, self._options.headers.values())).split()
        for secret in filter(None, [token, *(word for word in words if len(word) >= 8)]):
            details = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "…", details)
        if method in _OPTIONAL and code == grpc.StatusCode.UNIMPLEMENTED:
            details = details or "the server has no such method"
        trailers = dict(call.trailing_metadata() or ())
        error = translate(
            code,
            details,
            trailers,
            closing=self._closed or call.cancelled(),
            early=early,
            local=self.address.path is not None,
            **context,
        )
        if self._shared is not None and UNKNOWN_REGION in details.lower():
            unusable = self._shared.unknown(details)
            error = error if unusable is None else unusable.at(**context)
        if source and token and code == grpc.StatusCode.UNAUTHENTICATED:
            if not source.renewable:
                what = f"{error.message}; token_file= reads a new one"
                error = errors.AccessError(what, **context)
            elif source.refused(token):
                error = errors.TokenExpiredError(error.message, **context)
        return error

    def _call(
        self, method: str, request: Any, timeout_s: float | None = None, **context: Any
    ) -> Any:
        """Make a call without tensors, and wait for the response."""
        context["server"] = str(self.address)
        until = time.monotonic() + (timeout_s or self._options.metadata_timeout_s)
        for repeat_s in (*(_REPEAT_AFTER_S if method in _READS else ()), math.inf):
            begun_at = time.monotonic()
            within_s = min(repeat_s, until - begun_at)
            outcomes: SimpleQueue[Any] = SimpleQueue()
            self._start(method, request, within_s, outcomes.put, **context)
            outcome = outcomes.get()
            if not isinstance(outcome, errors.DeadlineError) or time.monotonic() >= until:
                break
        if isinstance(outcome, errors.RequestTooLargeError):  # it is the server that has no room
            raise errors.InferenceError(f"{method} failed: {outcome.message}", **context)
        if isinstance(outcome, errors.ServerLostError):
            raise self._explained(outcome)
        if isinstance(outcome, SonicError):
            raise outcome
        self._refusals = ()
        self._shortest_s = min(self._shortest_s, time.monotonic() - begun_at)
        return outcome

    def _explained(self, error: errors.ServerLostError) -> SonicError:
        """Return why a server is lost, if a handshake tells; this may block."""
        folder = None if self.address.path is None else Path(self.address.path).parent
        is_supervised = False
        if folder is not None:
            with contextlib.suppress(ImportError, OSError):  # it may be another user's
                is_supervised = is_locked(folder)
                error.gone = not folder.exists()
        if error.undelivered and not error.unreached:
            # Once, as a server may count connections.
            self._refusals = self._refusals or (refusal(self.address, self._options),)
            return self._refusals[0].at() if self._refusals[0] else error
        # A supervisor starts its local server again.
        error.unreached = error.unreached and not is_supervised
        return error

    def ready(self) -> bool:
        """Return whether the server is ready; False also if it does not respond."""
        try:
            return bool(self._call("ServerReady", service_pb2.ServerReadyRequest()).ready)
        except SonicError as error:
            logger.debug("%s is not ready: %s", self.address, error)
            return False

    def info(self) -> ServerMetadata:
        """Ask the server for its metadata."""
        metadata = self._call("ServerMetadata", service_pb2.ServerMetadataRequest())
        return ServerMetadata(metadata.name, metadata.version, tuple(metadata.extensions))

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Probe liveness, as `Transport` has it."""
        server = str(self.address)

        def finished(outcome: Any) -> None:
            if isinstance(outcome, errors.DeadlineError):
                outcome = errors.ServerLostError(
                    "the server has requests in flight, and did not respond to a liveness probe "
                    f"within {PROMPT_S:g} s",
                    server=server,
                )
            done(outcome if isinstance(outcome, errors.ServerLostError) else None)

        request = service_pb2.ServerLiveRequest()
        try:
            self._start("ServerLive", request, PROMPT_S, finished, server=server)
        except SonicError as error:  # in this process, such as a connection that was closed
            finished(error)

    def index(self) -> list[ModelEntry]:
        """Ask for the repository index."""
        try:
            index = self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        except errors.ServerLostError as error:
            if not error.message.endswith((grpc.StatusCode.CANCELLED.name, _NO_MESSAGE)):
                raise
            # SuperSONIC's proxy has no other way of saying that it admits no clients.
            raise errors.OverloadError(
                "the server admits no new clients at the moment, as SuperSONIC does while it is "
                "saturated; it still answers inference requests",
                server=str(self.address),
            ) from None
        # MLServer says "State.READY".
        return [
            ModelEntry(m.name, m.version, m.state.rpartition(".")[2], m.reason)
            for m in index.models
        ]

    def metadata(self, model: str, version: str | None) -> Contract:
        """Ask for a model's contract, a few times if need be, as `Transport` has it."""
        request = service_pb2.ModelMetadataRequest(name=model, version=version or "")
        try:
            metadata = self._call_repeatedly("ModelMetadata", request, model=model, version=version)
            newest = version or newest_of(metadata.versions)
            config = self._config(model, newest)
            with _reading(server=str(self.address), model=model, version=version):
                contract = contract_of(model, newest, metadata, config)
        except errors.ModelNotFoundError as missing:
            error = missing
            with contextlib.suppress(SonicError):
                error = not_found(model, version, self.index(), server=str(self.address))
            raise error from None
        round_trip_s = 0.0 if self.address.loopback else self._shortest_s
        return replace(contract, round_trip_s=round_trip_s)

    def _call_repeatedly(self, method: str, request: Any, **context: Any) -> Any:
        """Ask for a model, up to five times, as a balancer may lead to servers that lack it.

        Only what failed is asked again, as a balancer may lead calls to two servers by turns.
        """
        passing = errors.InferenceError, errors.ModelNotFoundError, errors.ServerLostError
        for _ in range(4):
            with contextlib.suppress(*passing):
                return self._call(method, request, **context)
        return self._call(method, request, **context)

    def load(self, model: str) -> None:
        """Ask a server in explicit mode to load a model.

        A server that takes longer than ``metadata_timeout_s`` goes on loading.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=model)
        self._call("RepositoryModelLoad", request, model=model)

    def _config(self, model: str, version: str) -> Any:
        """Return the model's configuration; an empty one from a server that gives none."""
        request = service_pb2.ModelConfigRequest(name=model, version=version)
        try:
            return self._call_repeatedly("ModelConfig", request, model=model).config
        except (errors.InferenceError, errors.TokenExpiredError):
            raise
        except (errors.AccessError, errors.RequestError) as error:
            # After other errors, the model may still have a configuration, with a batch size.
            logger.info("%s gives no configuration of %r: %s", self.address, model, error)
        return model_config_pb2.ModelConfig()

    def digest(self, model: str, version: str) -> str:
        """Ask for a version's digest; empty if the server has none."""
        request = service_pb2.ModelConfigRequest(name=model, version=version)
        response = self._call("ModelConfig", request, model=model, version=version or None)
        return digest_of(response.config, version)

    def labels(self, contract: Contract) -> dict[str, list[str]]:
        """Ask for the labels of outputs whose configuration names a file of them.

        Triton sends labels only with the classes of a response, so this sends a row of zeros. Each
        of its calls blocks for up to ``metadata_timeout_s``.
        """
        config = self._config(contract.model, contract.version)
        # Of an output of any length, a server says one class at most.
        labelled = [o for o in config.output if o.label_filename and min(o.dims, default=1) > 0]
        if not labelled:
            return {}
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=contract.version, id="labels"
        )
        names = [output.name for output in labelled]
        inputs = describe(request, contract.zeros(1), names)
        for output, tensor in zip(labelled, request.outputs, strict=True):
            classes = min(math.prod(output.dims), 2**31 - 1)  # a message holds fewer
            tensor.parameters["classification"].int64_param = classes
        message = with_contents(request, inputs.values())
        response = self._call("ModelInfer", message, model=contract.model)
        contents = zip(response.outputs, response.raw_output_contents, strict=False)
        with _reading(server=str(self.address), model=contract.model):
            return {output.name: classes_of(raw) for output, raw in contents}

    def statistics(self, model: str, version: str | None) -> ModelStatistics:
        """Ask for statistics, of all versions or one. Blocks for up to ``metadata_timeout_s``."""
        request = service_pb2.ModelStatisticsRequest(name=model, version=version or "")
        response = self._call("ModelStatistics", request, model=model, version=version)
        total = ModelStatistics()
        for stats in response.model_stats:
            inference = stats.inference_stats
            total += ModelStatistics(
                rows=stats.inference_count,
                executions=stats.execution_count,
                requests=inference.success.count,
                failures=inference.fail.count,
                queue_s=inference.queue.ns * 1e-9,
                input_s=inference.compute_input.ns * 1e-9,
                compute_s=inference.compute_infer.ns * 1e-9,
                output_s=inference.compute_output.ns * 1e-9,
            )
        return total

    def infer(
        self,
        contract: Contract,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        *,
        version: str | None,
        request_id: str,
        done: Callable[[Response | SonicError], None],
    ) -> Callable[[], object]:
        """Send a request, as `Transport` has it; `done` is called on a thread of gRPC.

        May block while a new region of shared memory is registered with the server, for a few
        seconds.
        """
        context: dict[str, Any] = {
            "server": str(self.address),
            "model": contract.model,
            "version": version or contract.version,
            "request": request_id,
        }
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=version or "", id=request_id
        )
        sent = describe(request, inputs, outputs, contract.parameters)
        nbytes = sum(tensor.nbytes for tensor in sent.values())
        if nbytes > LARGE_BYTES:
            keep_memory()
        release = self._shared and self._shared.place(request, sent.values(), nbytes)
        message = with_contents(request, () if release else sent.values())
        sent_bytes = len(message) + (nbytes if release else 0)

        def finished(outcome: Any) -> None:
            answered = not isinstance(outcome, SonicError)
            if answered:
                # gRPC would only log what is raised here, and the rows would wait for ever.
                try:
                    with _reading(**context):
                        outcome = _response(outcome, contract, sent_bytes)
                except SonicError as error:
                    outcome = error
            if release:
                # A server that did not answer might still read it.
                release(reusable=answered)
            done(outcome)

        try:
            return self._start(
                "ModelInfer", message, self._options.request_timeout_s, finished, **context
            )
        except BaseException:  # such as a token that cannot be had
            if release:
                release(reusable=True)
            raise


@contextlib.contextmanager
def _reading(**context: Any) -> Iterator[None]:
    """Raise what goes wrong with a server's words as a `ResponseError`."""
    try:
        yield
    except SonicError as error:
        raise error.at(**context) from None
    except Exception as error:  # noqa: BLE001
        what = f"cannot read the server's response: {error!r}"
        raise errors.ResponseError(what, **context) from None


def _response(message: Any, contract: Contract, sent_bytes: int) -> Response:
    """Return the response to an inference request that was answered."""
    return Response(
        outputs=contract.received(tensors_of(message)),
        version=message.model_version,
        sent_bytes=sent_bytes,
        received_bytes=message.ByteSize(),
    )
