"""Steps from a server's name to an inference: which work, which fail, and the remedy."""

from __future__ import annotations

import contextlib
import socket
import ssl
import statistics
import time
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sonic_coffea import errors
from sonic_coffea.transport import Address, Contract, Response, connect_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sonic_coffea.pool._settings import Settings

_TIMEOUT_S = 5.0
_TRIES = 20
_LOAD_BYTES = 4_000_000
# By how much scores differ with the size of a batch, in half precision.
_TOLERANCE = 1e-2

_REMEDIES: dict[type[errors.SonicError], str] = {
    errors.AccessError: "ask the server's operator for a token (--token-file) or a header "
    "(--header)",
    errors.ModelNotFoundError: "see what there is with: sonic-coffea models URL",
    errors.ContractError: "change the declaration, or pin the version that it was made for "
    "(--version)",
    errors.DeadlineError: "the server is slow or overloaded; try again later, or ask its operator",
    errors.OverloadError: "the server is overloaded; try again later, or ask its operator",
    errors.RequestError: "the server's log says more; the model may not take a row of zeros",
    errors.ServerLostError: "the server broke the connection; its log says why",
    errors.ConfigError: "use another model, or other options",
}


class Declaration(Protocol):
    """The declaration of a model: its name on the servers, and its version; None for the latest."""

    name: str
    version: str | None

    def compare(self, contract: Contract, *, server: str) -> Any:
        """Raise `ContractError` unless the declaration fits a server's contract."""

    def compare_labels(
        self, labels: dict[str, list[str]], contract: Contract, *, server: str
    ) -> list[str]:
        """Return how the declared labels differ from the server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The outcome of a step.

    Attributes
    ----------
    name : str
        Name of the step.
    ok : bool or None
        None if the step was not tried, because an earlier step failed.
    detail : str
        The result of the step, or the error.
    remedy : str
        What helps, if the step failed.
    seconds : float
        Duration of the step.
    """

    name: str
    ok: bool | None
    detail: str = ""
    remedy: str = ""
    seconds: float = 0.0


def _shown(scores: Any) -> str:
    return np.array2string(scores, precision=4, threshold=6, separator=", ").replace("\n", "")


class _Failed(errors.ConfigError):
    """A failed step that knows its remedy."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


def check(
    settings: Settings,
    model: str | None = None,
    version: str | None = None,
    declared: Sequence[Declaration] = (),
) -> Iterator[Step]:
    """Try a server, from its name to an inference, and yield each step when it is over.

    Parameters
    ----------
    settings : Settings
        One server, and its options.
    model, version : str, optional
        The model to try.
    declared : sequence of sonic_coffea.Model
        Declarations that are compared with the server's models.
    """
    steps, failed = _Steps(settings, model, version), False
    for name, step in steps.of(declared):
        if failed:
            yield Step(name=name, ok=None)
            continue
        begun = time.perf_counter()
        try:
            detail, remedy = step(), ""
        except errors.SonicError as error:
            failed, detail = True, str(error)
            remedies = (_REMEDIES[kind] for kind in type(error).__mro__ if kind in _REMEDIES)
            remedy = getattr(error, "remedy", next(remedies, ""))
        seconds = time.perf_counter() - begun
        yield Step(name=name, ok=not failed, detail=detail, remedy=remedy, seconds=seconds)
    steps.connection.close()


class _Steps:
    """The steps, with the connection and the contract that they share."""

    def __init__(self, settings: Settings, model: str | None, version: str | None) -> None:
        self._address = Address.parse(settings.servers[0])
        self._place = self._address.host, self._address.port
        self._unix = self._address.path is not None
        self._settings = settings
        self._model, self._version = model or "", version
        # Nothing is connected before the first request.
        self.connection = connect_transport(self._address, options=settings.connection_options())

    def of(self, declared: Sequence[Declaration]) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield each step and its name."""
        if self._unix:
            yield "socket", self._connect_socket
        elif self._settings.proxy is None:  # else only the proxy can tell
            yield "name", self._resolve
            yield "connection", self._connect
        if self._settings.proxy is None:
            yield ("TLS", self._speak_tls) if self._address.tls else ("protocol", self._speak)
        yield "access", self._enter
        yield "readiness", self._ready
        if not self._model and not declared:
            yield "models", self._list
        for declaration in declared:
            yield f"declaration of {declaration.name}", partial(self._compare, declaration)
        if self._model:
            yield f"model {self._model}", self._describe
            # The contract is unknown if an earlier step failed.
            if "_contract" in vars(self) and not self._contract.lists_tensors:
                return
            yield "inference", self._infer
            yield "latency", self._latency
            yield "bandwidth", self._bandwidth

    @cached_property
    def _contract(self) -> Contract:
        return self.connection.contract(self._model, self._version)

    def _resolve(self) -> str:
        host, port = self._place
        remedy = "check the spelling; some names are known inside a site only"
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise _Failed(f"no address is known for {host!r}: {error.strerror}", remedy) from None
        except UnicodeError as error:  # an empty part, or a part that is too long
            raise _Failed(f"{host!r} is no name of a host: {error}", remedy) from None
        return ", ".join(sorted({str(entry[4][0]) for entry in entries}))

    def _connect(self) -> str:
        host, port = self._place
        try:
            socket.create_connection(self._place, _TIMEOUT_S).close()
        except ConnectionRefusedError:
            raise _Failed(
                f"nothing listens at port {port} of {host}",
                "is the server up? Triton's gRPC port is 8001 by default, behind TLS often 443",
            ) from None
        except OSError as error:
            raise _Failed(
                f"no connection to port {port} of {host}: {error}",
                "a firewall may be in between; servers of a site are often open from inside only",
            ) from None
        return f"port {port} is open"

    def _connect_socket(self) -> str:
        path = str(self._address.path)
        try:
            with socket.socket(socket.AF_UNIX) as plain:
                plain.settimeout(_TIMEOUT_S)
                plain.connect(path)
        except OSError as error:
            raise _Failed(
                f"no connection to the socket {path}: {error.strerror or error}",
                "a local server is reached by processes of its owner on its own machine only, "
                "while it runs; `sonic-coffea status` lists yours",
            ) from None
        return "the socket is open"

    def _speak(self) -> str:
        """Tell HTTP, TLS and plain gRPC apart, as gRPC has one error for all of them."""
        import http.client

        try:
            self.connection.info()
        except (errors.ServerLostError, errors.DeadlineError, errors.ConfigError) as error:
            if self._unix:
                raise
            with contextlib.suppress(OSError):
                ssl.get_server_certificate(self._place, timeout=_TIMEOUT_S)
                remedy = f"try grpcs://{self._address.target}"
                raise _Failed("the port wants TLS", remedy) from None
            plain = http.client.HTTPConnection(*self._place, timeout=_TIMEOUT_S)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(plain):
                plain.request("GET", "/")
                plain.getresponse()
                remedy = "it may be Triton's HTTP port; its gRPC port is 8001 by default"
                raise _Failed("the port speaks HTTP/1, not gRPC", remedy) from None
            if not isinstance(error, errors.ConfigError):  # else the next step says what it is
                raise
        except errors.SonicError:  # refused, but by gRPC: the next step says why
            pass
        return "HTTP/2 without TLS"

    def _speak_tls(self) -> str:
        settings, remedy = self._settings, "files for TLS are PEM, which begins with -----BEGIN"
        used = f"the certificate authority {settings.tls_root!r}"
        try:
            context = ssl.create_default_context(cafile=settings.tls_root)
            context.set_alpn_protocols(["h2"])
            if settings.tls_cert:
                used = f"the certificate {settings.tls_cert!r} with the key {settings.tls_key!r}"
                context.load_cert_chain(settings.tls_cert, settings.tls_key)
        except OSError as error:
            raise _Failed(f"cannot use {used}: {error.strerror or error}", remedy) from None
        try:
            with (
                socket.create_connection(self._place, _TIMEOUT_S) as plain,
                context.wrap_socket(plain, server_hostname=self._address.host) as wrapped,
            ):
                spoken = wrapped.selected_alpn_protocol()
                return f"{wrapped.version()}, {spoken or 'no application protocol'}"
        except ssl.SSLCertVerificationError as error:
            raise _Failed(
                f"the certificate is not trusted: {error.verify_message}",
                "name the site's certificate authority with --tls-root, and the host as in the "
                "certificate",
            ) from None
        except OSError as error:
            remedy = f"the port may have no TLS; try grpc://{self._address.target}"
            raise _Failed(f"no TLS: {getattr(error, 'reason', error)}", remedy) from None

    def _enter(self) -> str:
        info = self.connection.info()
        extensions = ", ".join(info.extensions) or "no extensions"
        return errors.printable(f"{info.name} {info.version}: {extensions}")

    def _ready(self) -> str:
        if not self.connection.ready():
            raise _Failed(
                "the server is not ready to serve",
                "it may be loading its models, or one of them fails to load; its log says so",
            )
        return "ready"

    def _list(self) -> str:
        try:
            entries = self.connection.models()
        except errors.SonicError as error:
            return f"the server does not list them ({error.message})"
        models = ", ".join(f"{e.name} v{e.version} {e.state}".strip() for e in entries)
        return errors.printable(models) or "none"

    def _compare(self, declared: Declaration) -> str:
        contract = self.connection.contract(declared.name, declared.version)
        declared.compare(contract, server=str(self._address))
        labels: dict[str, list[str]] = {}
        with contextlib.suppress(errors.SonicError):  # a model that does not take a row of zeros
            labels = self.connection.labels(contract, declared.version)
        notes = declared.compare_labels(labels, contract, server=str(self._address))
        return errors.printable("; ".join([f"fits version {contract.version}", *notes]))

    def _describe(self) -> str:
        contract = self._contract
        specs = (*contract.inputs, *contract.outputs)
        tensors = "; ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)
        tensors = tensors or "it lists no tensors, so it cannot be tried without a declaration"
        limit = "any number of" if contract.max_rows is None else f"at most {contract.max_rows}"
        return errors.printable(f"version {contract.version}; {tensors}; {limit} rows")

    def _infer(self) -> str:
        response, rtt_s = self._request(1)
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in response.outputs.items())
        shown = errors.printable(f"{shapes} from version {response.version}")
        beside = self._beside_another(response)
        return f"one row of zeros: {shown}, {rtt_s * 1e3:.1f} ms{beside}"

    def _beside_another(self, alone: Response) -> str:
        """Score the row of zeros beside a row of ones: a row's scores are its own."""
        if self._contract.max_rows == 1:
            return "; it takes one row a request"
        pair = self._contract.zeros(2)
        for tensor in pair.values():
            tensor[1] = 1
        try:
            both = self.connection.ask(self._contract, self._version, pair)[0].outputs
        except errors.RequestError as error:
            return f"; a row of ones could not be tried beside it ({error.message})"
        for name, tensor in alone.outputs.items():
            if tensor.shape[:1] != (1,) or both[name].shape[:1] != (2,):
                return ""  # not of rows, but of a graph
            if tensor.dtype.kind in "fc" and not np.allclose(
                tensor[0], both[name][0], _TOLERANCE, _TOLERANCE, equal_nan=True
            ):
                raise _Failed(
                    f"output {name!r} depends on the other rows of a request: of a row of zeros it "
                    f"is {_shown(tensor[0])} alone, and {_shown(both[name][0])} beside one of ones",
                    "export the network in evaluation mode (model.eval()), without a mean or a "
                    "softmax over the first axis; or, if its rows belong together, serve it with "
                    "max_batch_size: 0 and declare Model(one_request_per=...)",
                )
        return ", the same beside another row"

    def _request(self, rows: int) -> tuple[Response, float]:
        tensors = self._contract.zeros(rows)
        return self.connection.ask(self._contract, self._version, tensors)

    @cached_property
    def _latencies_s(self) -> list[float]:
        return [self._request(1)[1] for _ in range(_TRIES)]

    def _latency(self) -> str:
        rtts_ms = [1e3 * seconds for seconds in self._latencies_s]
        return (
            f"one row: median {statistics.median(rtts_ms):.2f} ms, {min(rtts_ms):.2f} to "
            f"{max(rtts_ms):.2f} ms of {_TRIES}"
        )

    def _bandwidth(self) -> str:
        contract = self._contract
        row_bytes = sum(t.nbytes for t in contract.zeros(1).values())
        rows = max(1, _LOAD_BYTES // row_bytes)
        rows = rows if contract.max_rows is None else min(rows, contract.max_rows)
        rtt_s = statistics.median(self._request(rows)[1] for _ in range(3))
        more_s = max(rtt_s - statistics.median(self._latencies_s), 1e-9)
        sent = rows * row_bytes
        return (
            f"{rows:,} rows, {sent / 1e6:.3g} MB: {rtt_s * 1e3:.2f} ms, at least "
            f"{sent / more_s / 1e6:.3g} MB/s and {rows / more_s:,.0f} rows/s"
        )
