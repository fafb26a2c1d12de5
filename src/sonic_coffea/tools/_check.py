"""Step by step: what works between this machine and a server, what does not, and the remedy."""

from __future__ import annotations

import math
import socket
import ssl
import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np

from sonic_coffea.errors import (
    AccessError,
    ConfigError,
    ContractError,
    DeadlineError,
    ModelNotFoundError,
    RequestError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.transport import (
    DATATYPES,
    Address,
    Connection,
    Contract,
    Response,
    connect_transport,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sonic_coffea.model import Model
    from sonic_coffea.pool import Settings

__all__ = ["Step", "check", "zeros"]

_TIMEOUT_S = 5.0
_TRIES = 20
_LOAD_BYTES = 4_000_000
# Where a length is free: networks that look for the nearest neighbours need some.
_FREE = 16

# With which HTTP/2 begins: fixed words, and settings that change none (RFC 9113, 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_GET = b"GET / HTTP/1.0\r\n\r\n"
# The type of the frame with which a server answers, and how TLS complains of plain text.
_SETTINGS, _ALERT = b"\x04", b"\x15"

_HTTP = "it may be Triton's HTTP port; its gRPC port is 8001 by default"
_REMEDIES: tuple[tuple[type[SonicError], str], ...] = (
    (AccessError, "ask the server's operator for a token (--token-file) or a header (--header)"),
    (ModelNotFoundError, "see what there is with: sonic-coffea models URL"),
    (ContractError, "change the declaration, or pin the version that it was made for (--version)"),
    (DeadlineError, "the server is slow or overloaded; try again later, or ask its operator"),
    (RequestError, "the server's log says more; the model may not take a row of zeros"),
    (ServerLostError, "the server broke the connection; its log says why"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What came of one step.

    Attributes
    ----------
    name : str
        What was tried.
    ok : bool or None
        None if it was not tried, since one before it failed.
    detail : str
        What was found, or what went wrong.
    remedy : str
        What helps, if it failed.
    seconds : float
        How long it took.
    """

    name: str
    ok: bool | None
    detail: str = ""
    remedy: str = ""
    seconds: float = 0.0


class _Failed(ConfigError):  # noqa: N818
    """The outcome of a step."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


def check(
    settings: Settings,
    model: str | None = None,
    version: str | None = None,
    declared: Sequence[Model] = (),
) -> Iterator[Step]:
    """Try a server, from its name to an inference; each step is returned when it is over.

    Parameters
    ----------
    settings : Settings
        One server, and how it is connected.
    model, version : str, optional
        What is tried there.
    declared : sequence of Model
        Declarations that are compared with the server's models.
    """
    attempt = _Attempt(settings, model, version, declared)
    failed = False
    for name, step in attempt.steps():
        if failed:
            yield Step(name=name, ok=None)
            continue
        begun = time.perf_counter()
        try:
            detail = step()
        except (_Failed, SonicError) as error:
            failed = True
            seconds = time.perf_counter() - begun
            remedy = error.remedy if isinstance(error, _Failed) else _remedy(error)
            yield Step(name=name, ok=False, detail=str(error), remedy=remedy, seconds=seconds)
        else:
            yield Step(name=name, ok=True, detail=detail, seconds=time.perf_counter() - begun)
    attempt.close()


def _remedy(error: SonicError) -> str:
    return next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), "")


class _Attempt:
    """The steps, each of which may use what those before it have found."""

    def __init__(
        self,
        settings: Settings,
        model: str | None,
        version: str | None,
        declared: Sequence[Model],
    ) -> None:
        self._address = Address.parse(settings.servers[0])
        self._settings = settings
        self._model = model
        self._version = version
        self._declared = declared
        self._connection: Connection | None = None
        self._contract: Contract | None = None
        self._alone_s = math.nan

    def steps(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Return the names of the steps, and the steps."""
        yield "name", self._resolve
        yield "connection", self._connect
        yield "TLS" if self._address.tls else "protocol", self._speak
        yield "access", self._enter
        yield "readiness", self._ready
        if self._model is None and not self._declared:
            yield "models", self._list
            return
        for one in self._declared:
            yield f"declaration of {one.name}", lambda one=one: self._compare(one)  # type: ignore[misc]
        if self._model is not None:
            yield f"model {self._model}", self._find
            yield "inference", self._infer
            yield "latency", self._latency
            yield "bandwidth", self._bandwidth

    def close(self) -> None:
        """Let go of the server."""
        if self._connection is not None:
            self._connection.close()

    def _resolve(self) -> str:
        host, port = self._address.host, self._address.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            message = f"no address is known for {host!r}: {error.strerror}"
        except UnicodeError as error:
            # Of names that cannot be looked up, as with an empty part or one that is too long.
            message = f"{host!r} is no name of a host: {error}"
        else:
            return ", ".join(sorted({str(entry[4][0]) for entry in found}))
        raise _Failed(message, "check the spelling; some names are known inside a site only")

    def _connect(self) -> str:
        host, port = self._address.host, self._address.port
        try:
            with socket.create_connection((host, port), _TIMEOUT_S):
                return f"port {port} is open"
        except ConnectionRefusedError:
            failure = _Failed(
                f"nothing listens at port {port} of {host}",
                "is the server up? Triton's gRPC port is 8001 by default, behind TLS often 443",
            )
        except OSError as error:
            failure = _Failed(
                f"no connection to port {port} of {host}: {error}",
                "a firewall may be in between; servers of a site are often open from inside only",
            )
        raise failure

    def _speak(self) -> str:
        """Tell HTTP, TLS and plain gRPC apart, which all fail alike later."""
        return self._speak_tls() if self._address.tls else self._speak_plainly()

    def _speak_tls(self) -> str:
        host, context = self._address.host, self._tls_context()
        place = (host, self._address.port)
        try:
            with (
                socket.create_connection(place, _TIMEOUT_S) as plain,
                context.wrap_socket(plain, server_hostname=host) as wrapped,
            ):
                spoken = wrapped.selected_alpn_protocol()
                detail = f"{wrapped.version()}, {spoken or 'no application protocol'}"
        except ssl.SSLCertVerificationError as error:
            raise _Failed(
                f"the certificate is not trusted: {error.verify_message}",
                "name the site's certificate authority with --tls-root, and the host as in the "
                "certificate",
            ) from None
        except ssl.SSLError as error:
            remedy = f"the port may have no TLS; try grpc://{self._address.target}"
            raise _Failed(f"no TLS: {error.reason or error}", remedy) from None
        except OSError as error:
            raise _Failed(f"no TLS: {error}", "the server ended the connection") from None
        return detail

    def _tls_context(self) -> ssl.SSLContext:
        settings = self._settings
        used = f"the certificate authority {settings.tls.root!r}"
        try:
            context = ssl.create_default_context(cafile=settings.tls.root)
            context.set_alpn_protocols(["h2"])
            if settings.tls.cert:
                used = f"the certificate {settings.tls.cert!r} with the key {settings.tls.key!r}"
                context.load_cert_chain(settings.tls.cert, settings.tls.key)
        except OSError as error:
            remedy = "files for TLS are in PEM format, which begins with -----BEGIN"
            raise _Failed(f"cannot use {used}: {error.strerror or error}", remedy) from None
        return context

    def _speak_plainly(self) -> str:
        said = self._answer_to(_PREFACE)
        if said[3:4] == _SETTINGS:
            return "HTTP/2 without TLS"
        if said[:1] == _ALERT or not self._answer_to(_GET).startswith(b"HTTP/"):
            remedy = f"the port may want TLS; try grpcs://{self._address.target}"
            raise _Failed("the port does not speak plain HTTP/2, as gRPC does", remedy)
        raise _Failed("the port speaks HTTP/1, not gRPC", _HTTP)

    def _answer_to(self, words: bytes) -> bytes:
        """Return how the port answers, or nothing."""
        place = (self._address.host, self._address.port)
        try:
            with socket.create_connection(place, _TIMEOUT_S) as plain:
                plain.sendall(words)
                return plain.recv(64)
        except OSError:
            return b""

    def _enter(self) -> str:
        options = self._settings.connection_options()
        self._connection = connect_transport(self._address, options=options)
        info = self._connection.info()
        extensions = ", ".join(info.extensions) or "no extensions"
        return f"{info.name} {info.version}: {extensions}"

    @property
    def _there(self) -> Connection:
        assert self._connection is not None  # noqa: S101  a step before has made it
        return self._connection

    def _ready(self) -> str:
        if not self._there.ready():
            raise _Failed(
                "the server is not ready to serve",
                "it may be loading its models, or one of them fails to load; its log says so",
            )
        return "ready"

    def _list(self) -> str:
        try:
            entries = self._there.models()
        except SonicError as error:
            return f"the server does not list them ({error.message})"
        return ", ".join(f"{e.name} v{e.version} {e.state}".strip() for e in entries) or "none"

    def _compare(self, declared: Model) -> str:
        contract = self._there.contract(declared.name, declared.version)
        declared.compare(contract, server=str(self._address))
        return f"fits version {contract.version}"

    def _find(self) -> str:
        assert self._model is not None  # noqa: S101  or there is no such step
        contract = self._contract = self._there.contract(self._model, self._version)
        tensors = [
            f"{spec.name} {spec.datatype} {list(spec.shape)}"
            for spec in (*contract.inputs, *contract.outputs)
        ]
        most = "any number of" if contract.max_rows is None else f"at most {contract.max_rows}"
        return f"version {contract.version}; {'; '.join(tensors)}; {most} rows"

    def _infer(self) -> str:
        answer, took_s = self._ask(1)
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in answer.outputs.items())
        return f"one row of zeros: {shapes} from version {answer.version}, {took_s * 1e3:.1f} ms"

    def _latency(self) -> str:
        took = [self._ask(1)[1] for _ in range(_TRIES)]
        self._alone_s = statistics.median(took)
        return (
            f"one row: median {self._alone_s * 1e3:.2f} ms, {min(took) * 1e3:.2f} to "
            f"{max(took) * 1e3:.2f} ms of {_TRIES}"
        )

    def _bandwidth(self) -> str:
        contract = self._contract
        assert contract is not None  # noqa: S101  a step before has found it
        row_bytes = sum(t.nbytes for t in zeros(contract, 1).values())
        rows = max(1, _LOAD_BYTES // row_bytes)
        rows = rows if contract.max_rows is None else min(rows, contract.max_rows)
        took = [self._ask(rows)[1] for _ in range(3)]
        more_s = max(statistics.median(took) - self._alone_s, 1e-9)
        sent = rows * row_bytes
        return (
            f"{rows:,} rows, {sent / 1e6:.3g} MB: {statistics.median(took) * 1e3:.2f} ms, at least "
            f"{sent / more_s / 1e6:.3g} MB/s and {rows / more_s:,.0f} rows/s"
        )

    def _ask(self, rows: int) -> tuple[Response, float]:
        """Infer rows of zeros, and return the answer and how long it took."""
        contract = self._contract
        assert contract is not None  # noqa: S101  a step before has found it
        over = threading.Event()
        outcome: list[Response | SonicError] = []

        def done(result: Response | SonicError) -> None:
            outcome.append(result)
            over.set()

        tensors = zeros(contract, rows)
        begun = time.perf_counter()
        self._there.infer(
            contract,
            tensors,
            [spec.name for spec in contract.outputs],
            version=self._version,
            request_id="check",
            done=done,
        )
        over.wait()
        (result,) = outcome
        if isinstance(result, SonicError):
            raise result
        return result, time.perf_counter() - begun


def zeros(contract: Contract, rows: int, length: int = _FREE) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return tensors of zeros, of a length where the model takes any."""
    tensors = {}
    for spec in contract.inputs:
        if spec.datatype not in DATATYPES:
            raise _Failed(
                f"input {spec.name!r} is {spec.datatype}, which is not a number",
                "the model cannot be tried with zeros",
            )
        shape = [rows, *(n if n >= 0 else length for n in spec.shape)]
        tensors[spec.name] = np.zeros(shape, DATATYPES[spec.datatype])
    return tensors
