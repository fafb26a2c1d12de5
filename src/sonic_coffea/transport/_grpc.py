"""KServe v2 over gRPC: the one importer of tritonclient."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea.errors import (
    AccessError,
    CancelledError,
    ConfigError,
    DeadlineError,
    ModelNotFoundError,
    OverloadError,
    ResponseError,
    ServerLostError,
    SonicError,
    nearest,
)
from sonic_coffea.transport import _local_state as local_state
from sonic_coffea.transport._contents import checked, tensors_of, with_contents
from sonic_coffea.transport._contract import Contract, TensorSpec, kserve_name
from sonic_coffea.transport._failures import translate
from sonic_coffea.transport._protocol import (
    Answer,
    ConnectionOptions,
    Exchange,
    ModelEntry,
    ServerInfo,
    Timings,
)
from sonic_coffea.transport._shared_memory import Region, SharedMemory, lost_words, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.transport._address import Address

logger = logging.getLogger(__name__)

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
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


COMPRESSIONS = {
    None: None,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}

# A server that lives says so at once, however much it has to do.
_LIFE_S = 2.0


class GrpcConnection:
    """A channel to one server."""

    def __init__(self, address: Address, options: ConnectionOptions) -> None:
        self._address = address
        self._options = options
        self._closed = threading.Event()
        self._out: set[Any] = set()
        self._local_headers = _local_secret(address)
        self._channel = _channel(address, options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._shared: SharedMemory | None = None
        if shares(address, wanted=options.shared_memory):
            demanded = options.shared_memory is True
            self._shared = SharedMemory(self._ask_by, address, demanded=demanded)
        # Requests are serialized here, which saves three copies of every tensor.
        self._infer = self._channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )

    @property
    def address(self) -> Address:
        """Where the server is."""
        return self._address

    def ready(self) -> bool:
        """Whether the server answers that it can serve; False also if it does not answer."""
        try:
            return bool(self._ask("ServerReady", service_pb2.ServerReadyRequest()).ready)
        except SonicError as error:
            logger.debug("%s is not ready: %s", self._address, error)
            return False

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Ask whether the server lives; `done` is called once, with an error if it does not."""
        local = self._local_headers
        try:
            future = self._stub.ServerLive.future(
                service_pb2.ServerLiveRequest(), timeout=_LIFE_S, metadata=self._headers(local)
            )
        except SonicError as error:
            done(error)
            return
        except ValueError as error:  # a closed channel
            done(CancelledError(str(error), server=str(self._address)))
            return

        def finished(call: Any) -> None:
            code, details, where = call.code(), call.details(), str(self._address)
            if code == grpc.StatusCode.OK:
                done(None)
            elif code == grpc.StatusCode.DEADLINE_EXCEEDED:
                message = f"the server owes answers, and gave no sign of life for {_LIFE_S:g} s"
                done(ServerLostError(message, server=where))
            else:
                error = self._failure(code, details, local, server=where)
                done(error if isinstance(error, ServerLostError) else None)

        future.add_done_callback(finished)

    def info(self) -> ServerInfo:
        """Ask the server for its name, version and extensions."""
        answer = self._ask("ServerMetadata", service_pb2.ServerMetadataRequest())
        return ServerInfo(
            name=answer.name, version=answer.version, extensions=tuple(answer.extensions)
        )

    def models(self) -> list[ModelEntry]:
        """Ask for the repository index."""
        try:
            answer = self._ask("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        except ServerLostError as error:
            if not error.message.endswith(grpc.StatusCode.CANCELLED.name):
                raise
            # The admission of SuperSONIC's proxy, which has no other way of saying so.
            raise OverloadError(
                "the server admits no new clients at the moment, as SuperSONIC does while it is "
                "saturated; it still answers inference requests",
                server=str(self._address),
            ) from None
        return [
            ModelEntry(name=m.name, version=m.version, state=m.state, reason=m.reason)
            for m in answer.models
        ]

    def contract(self, model: str, version: str | None) -> Contract:
        """Ask what a model takes and gives."""
        try:
            metadata = self._ask(
                "ModelMetadata",
                service_pb2.ModelMetadataRequest(name=model, version=version or ""),
                model=model,
                version=version,
            )
        except ModelNotFoundError as error:
            raise self._not_found(error, model, version) from None
        try:
            config = self._config(model, version)
        except ServerLostError:
            # A balancer that has not found out yet who is dead may lead each second call there.
            config = self._config(model, version)
        batched = config is not None and config.max_batch_size > 0
        inputs = [_spec(t) for t in metadata.inputs]
        free = all(t.shape and t.shape[0] < 0 for t in metadata.inputs)
        if batched:
            max_rows: int | None = config.max_batch_size
        elif free:
            max_rows = None
        else:
            max_rows = 1
        preferred: Sequence[int] = ()
        if config is not None:
            preferred = config.dynamic_batching.preferred_batch_size
        resolved = version or max(metadata.versions, key=_numeric, default="")
        digest = ""
        if config is not None:
            digest = config.parameters[f"sha256.{resolved}"].string_value
        return Contract(
            model=model,
            version=resolved,
            digest=digest,
            inputs=tuple(inputs),
            outputs=tuple(_spec(t) for t in metadata.outputs),
            max_rows=max_rows,
            preferred_rows=tuple(preferred),
            platform=metadata.platform,
        )

    def timings(self, model: str, version: str | None) -> Timings:
        """Ask for a model's statistics."""
        answer = self._ask(
            "ModelStatistics",
            service_pb2.ModelStatisticsRequest(name=model, version=version or ""),
            model=model,
            version=version,
        )
        stats = answer.model_stats
        return Timings(
            rows=sum(s.inference_count for s in stats),
            executions=sum(s.execution_count for s in stats),
            requests=sum(s.inference_stats.success.count for s in stats),
            failures=sum(s.inference_stats.fail.count for s in stats),
            queue_s=sum(s.inference_stats.queue.ns for s in stats) * 1e-9,
            input_s=sum(s.inference_stats.compute_input.ns for s in stats) * 1e-9,
            compute_s=sum(s.inference_stats.compute_infer.ns for s in stats) * 1e-9,
            output_s=sum(s.inference_stats.compute_output.ns for s in stats) * 1e-9,
        )

    def infer(
        self,
        contract: Contract,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        *,
        version: str | None,
        request_id: str,
        done: Callable[[Answer | SonicError], None],
    ) -> Exchange:
        """Send a request; `done` is called once, on a thread of the connection."""
        context: dict[str, Any] = {
            "server": str(self._address),
            "model": contract.model,
            "version": version or contract.version,
            "request": request_id,
        }
        if self._closed.is_set():
            raise CancelledError("the connection is closed", **context)
        request = service_pb2.ModelInferRequest(
            model_name=contract.model, model_version=version or "", id=request_id
        )
        for name, tensor in inputs.items():
            request.inputs.add(name=name, datatype=kserve_name(tensor.dtype), shape=tensor.shape)
        for name in outputs:
            request.outputs.add(name=name)
        region = None if self._shared is None else self._shared.place(inputs, request.inputs)
        message = with_contents(request, () if region else inputs.values())
        sent_bytes = len(message) + (sum(t.nbytes for t in inputs.values()) if region else 0)
        local = self._local_headers
        future = self._send(message, local, region)

        def finished(call: Any) -> None:
            # gRPC would only log what is raised here, and the rows would wait for ever.
            self._out.discard(call)
            if region is not None:
                self._read(region, call)
            try:
                outcome = self._outcome(call, sent_bytes, local, context)
                if isinstance(outcome, Answer):
                    found = checked(outcome.outputs, contract, context)
                    outcome = replace(outcome, outputs=found)
            except ResponseError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001
                outcome = ResponseError(f"cannot read the server's answer: {error!r}", **context)
            done(outcome)

        future.add_done_callback(finished)
        if self._closed.is_set():
            future.cancel()
        return _Exchange(future)

    def close(self) -> None:
        """Let go of the channel; what is out is cancelled. May be called again."""
        if not self._closed.is_set():
            self._closed.set()
            if self._shared is None:
                self._channel.close()
                return
            # The channel is still of use: the server is to let go of what these used.
            for future in list(self._out):
                future.cancel()
            self._shared.close(done=self._channel.close)

    def _send(self, message: bytes, local: Mapping[str, str], region: Region | None) -> Any:
        """Send a request; what it cannot take along can be used for the next."""
        try:
            future = self._infer.future(
                message,
                timeout=self._options.timeouts.request_s,
                metadata=self._headers(local),
                compression=COMPRESSIONS[self._options.compression],
            )
        except BaseException:  # a token that cannot be had, a closed channel
            if self._shared is not None and region is not None:
                self._shared.release(region)
            raise
        self._out.add(future)
        return future

    def _read(self, region: Region, call: Any) -> None:
        """Use a region again if the server has surely read it."""
        assert self._shared is not None  # noqa: S101  there is a region
        answered = not call.cancelled() and call.code() == grpc.StatusCode.OK
        (self._shared.release if answered else self._shared.discard)(region)

    def _outcome(
        self, call: Any, sent_bytes: int, local: Mapping[str, str], context: dict[str, Any]
    ) -> Answer | SonicError:
        if call.cancelled():
            return translate(
                grpc.StatusCode.CANCELLED, "cancelled by this client", closing=True, **context
            )
        code = call.code()
        if code != grpc.StatusCode.OK:
            return self._failure(code, call.details(), local, **context)
        answer = call.result()
        outputs = tensors_of(answer)
        if outputs is None:
            return ResponseError("the server's answer has outputs without data", **context)
        return Answer(
            outputs=outputs,
            version=answer.model_version,
            sent_bytes=sent_bytes,
            received_bytes=sum(t.nbytes for t in outputs.values()),
        )

    def _config(self, model: str, version: str | None) -> Any:
        """Return the model's configuration, or None from a server that gives none."""
        try:
            answer = self._ask(
                "ModelConfig",
                service_pb2.ModelConfigRequest(name=model, version=version or ""),
                model=model,
            )
        except (ServerLostError, OverloadError, DeadlineError):
            raise  # it may have one, with the size of its batches
        except SonicError as error:
            logger.info("%s gives no configuration of %s: %s", self._address, model, error)
            return None
        return answer.config

    def _not_found(
        self, error: ModelNotFoundError, model: str, version: str | None
    ) -> ModelNotFoundError:
        try:
            known = self.models()
        except SonicError:
            return error
        names = {m.name for m in known}
        if model not in names:
            hint = nearest(model, names)
        elif version is not None:
            versions = sorted({m.version for m in known if m.name == model and m.version})
            hint = f"it has version {', '.join(versions) or '(none)'}"
        else:
            reasons = {m.reason for m in known if m.name == model and m.reason}
            hint = f"it is there but not ready: {'; '.join(reasons) or 'no reason given'}"
        what = f"the server does not have model {model!r}" + (
            f" version {version}" if version else ""
        )
        return ModelNotFoundError(
            f"{what}; {hint}", server=str(self._address), model=model, version=version
        )

    def _ask_by(self, method: str, request: Any, timeout_s: float) -> Any:
        return self._ask(method, request, timeout_s=timeout_s)

    def _ask(
        self, method: str, request: Any, *, timeout_s: float | None = None, **context: Any
    ) -> Any:
        local = self._local_headers
        context["server"] = str(self._address)
        timeout_s = timeout_s or self._options.timeouts.metadata_s
        try:
            return getattr(self._stub, method)(
                request, timeout=timeout_s, metadata=self._headers(local)
            )
        except grpc.RpcError as error:
            failure = self._failure(error.code(), error.details(), local, **context)
        except ValueError as error:  # a closed channel
            failure = translate(
                grpc.StatusCode.CANCELLED, str(error), closing=True, server=str(self._address)
            )
        raise failure

    def _failure(
        self, code: Any, details: str | None, local: Mapping[str, str], **context: Any
    ) -> SonicError:
        """Return our error for a call that was made with the `local` secret."""
        error = translate(code, details or "", closing=self._closed.is_set(), **context)
        if self._shared is not None and lost_words(details):
            error = ServerLostError(f"the server was started anew: {details}", **context)
        if self._shared is not None and isinstance(error, ServerLostError):
            self._shared.forget()
        if not isinstance(error, (AccessError, ServerLostError)):
            return error
        # A local server that was started anew has another secret, which is recorded a moment after
        # it answers; to the rows, it is a server that was lost and comes back.
        recorded = _local_secret(self._address)
        self._local_headers = recorded or self._local_headers
        if isinstance(error, AccessError) and recorded != local:
            return ServerLostError(f"the local server was started anew: {details}", **context)
        return error

    def _headers(self, local: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        token = self._options.token
        headers = {**local, **self._options.headers}
        if token is not None:
            said = _said(token) if callable(token) else token
            if not said.isprintable():
                raise ConfigError("the token has characters, such as a line break, that none has")
            headers["authorization"] = f"Bearer {said}"
        return tuple((k.lower(), v) for k, v in headers.items())


def _said(token: Callable[[], str]) -> str:
    """Return what a function says the token is."""
    try:
        said = token()
    except SonicError:
        raise
    except Exception as error:  # noqa: BLE001  it is the user's
        message = f"the function that token= names failed: {type(error).__name__}"
    else:
        if isinstance(said, str):
            return said
        message = f"the function that token= names returned {type(said).__name__}, expected str"
    raise ConfigError(message)


class _Exchange:
    def __init__(self, future: Any) -> None:
        self._future = future

    def cancel(self) -> None:
        self._future.cancel()


def _channel(address: Address, options: ConnectionOptions) -> Any:
    if not address.tls:
        return grpc.insecure_channel(address.target, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_pem(options.tls.root, "certificate authority"),
        private_key=_pem(options.tls.key, "key"),
        certificate_chain=_pem(options.tls.cert, "certificate"),
    )
    return grpc.secure_channel(address.target, credentials, options=CHANNEL_OPTIONS)


def _pem(path: str | None, what: str) -> bytes | None:
    """Return what is in a PEM file."""
    if path is None:
        return None
    try:
        found = Path(path).expanduser().read_bytes()
    except OSError as error:
        problem = str(error.strerror)
    else:
        if b"-----BEGIN" in found:
            return found
        problem = "expected a file in PEM format, which begins with -----BEGIN"
    raise ConfigError(f"cannot read the {what} {path!r}: {problem}")


def _local_secret(address: Address) -> dict[str, str]:
    """Return the header that a local server of this user wants, from its owner's files."""
    if not address.loopback:
        return {}
    record = local_state.lookup(address.url)
    return {} if record is None else {record.header: record.secret}


def _spec(tensor: Any) -> TensorSpec:
    shape = tuple(int(n) for n in tensor.shape)
    return TensorSpec(name=tensor.name, datatype=tensor.datatype, shape=shape[1:])


def _numeric(version: str) -> tuple[int, str]:
    return (int(version), version) if version.isdigit() else (-1, version)
