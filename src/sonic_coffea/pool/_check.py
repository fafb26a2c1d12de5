"""Tries servers step by step, from the connection to an inference: what fails, and what helps."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from sonic_coffea import errors, provenance
from sonic_coffea.pool._servers import open_transport
from sonic_coffea.pool._settings import Settings, read_servers
from sonic_coffea.reporting import tables
from sonic_coffea.transport import Contract, Transport, time_requests

# In half precision, scores differ by this much with the size of a batch.
_TOLERANCE = 1e-2

_REMEDIES: dict[type[errors.SonicError], str] = {
    errors.AccessError: "ask the server's operator for a token (--token-file), a header (--header) "
    "or certificates (--tls-root, --tls-cert, --tls-key)",
    errors.ModelNotReadyError: "it may be loading, or fails to load; the server's log says so",
    errors.ModelNotFoundError: "see what there is with: sonic-coffea models URL",
    errors.ContractError: "change the declaration, or pin the version that it was made for "
    "(--version)",
    errors.OverloadError: "the server is overloaded; try again later, or ask its operator",
    errors.RequestError: "the server's log says more; the model may not take a row of zeros",
    errors.ResponseError: "export the network in evaluation mode (model.eval()), without a mean or "
    "a softmax over the first axis; or, if its rows belong together, serve it with "
    "max_batch_size: 0 and declare Model(one_request_per=...)",
    errors.ServerLostError: "check the name and the port: Triton's for gRPC is 8001 by default, "
    "behind TLS often 443, and its port for HTTP, 8000, is another; some hosts can be reached from "
    "inside a site only; `sonic-coffea status` lists local servers",
    errors.SonicError: "use another model, other options, or a server that is less busy",
}

_PACKAGES = "sonic-coffea awkward coffea dask distributed grpcio numba numpy protobuf tritonclient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The outcome of a step.

    Attributes
    ----------
    name : str
        Name of the step.
    ok : bool
        Whether it worked; no step is tried after one that failed.
    detail : str
        The result of the step, or the error.
    remedy : str
        What helps, if the step failed.
    seconds : float
        Duration of the step.
    """

    name: str
    ok: bool
    detail: str = ""
    remedy: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheck:
    """The result of the checks from one process of a host.

    Attributes
    ----------
    host : str
        The host's name, or its address if it gave no answer.
    process : str
        The address of a dask worker; ``"this process"`` for the one that asks.
    servers : mapping of str to sequence of Step
        The steps of each server, by URL.
    versions : mapping of str to (str or None)
        Those of Python and of packages; None for one that is not installed.
    error : str
        Why nothing could be tried there; empty if it could.
    """

    host: str
    process: str
    servers: Mapping[str, Sequence[Step]] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether no step failed, and no package is missing."""
        tried = all(step.ok for steps in self.servers.values() for step in steps)
        return tried and not self.error and None not in self.versions.values()


class Checks(list[HostCheck]):
    """The checks of all hosts, as a table.

    Attributes
    ----------
    header : tuple of str
        The names of the columns.
    """

    header = ("host", "process", "server", "delay", "result", "other versions")

    @property
    def ok(self) -> bool:
        """Whether each host is fine; another version of a package is no failure."""
        return all(host.ok for host in self)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of the table: one for each host and server."""
        here = versions()
        for host in self:
            others = "\n".join(
                f"{package} {version or 'is not installed'}, here {here.get(package)}"
                for package, version in host.versions.items()
                if version is None or version != here.get(package)
            )
            if host.error:
                yield host.host, host.process, "", "", f"not tried: {host.error}", others
            for server, steps in host.servers.items():
                answered = [step.seconds for step in steps if step.name == "readiness" and step.ok]
                delay = f"{1e3 * answered[0]:.1f} ms" if answered else ""
                yield host.host, host.process, server, delay, _result(steps), others

    def to_dict(self) -> dict[str, Any]:
        """Return the checks as plain values, for JSON."""
        hosts = [{**asdict(host), "ok": host.ok} for host in self]
        return {"ok": self.ok, "expected": versions(), "hosts": hosts}

    def __rich__(self) -> Any:
        return tables.described("Servers, as hosts see them", self.rows(), header=self.header)

    def __repr__(self) -> str:
        return "\n".join(" | ".join(row) for row in (self.header, *self.rows()))

    def _repr_html_(self) -> str:
        return tables.html(self)


def _result(steps: Sequence[Step]) -> str:
    for step in steps:
        if not step.ok:
            return f"✗ {step.name}: {step.detail}\n→ {step.remedy}"
    return f"✓ {steps[-1].name}"


def check_here(settings: Settings, *tried: Any, process: str = "this process") -> HostCheck:
    """Try all servers from this process, at the same time; `tried` are arguments of `check`."""
    with ThreadPoolExecutor(len(settings.servers), thread_name_prefix="sonic-check") as threads:
        alone = [replace(settings, servers=(url,)) for url in settings.servers]
        steps = threads.map(lambda server: [*check(server, *tried)], alone)
        servers = dict(zip(settings.servers, steps, strict=True))
    host = socket.gethostname()
    return HostCheck(host=host, process=process, servers=servers, versions=versions())


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the main packages; None for a missing package."""
    packages = _PACKAGES.split()
    return {**dict.fromkeys(("python", *packages)), **provenance.versions(packages)}


def check(
    settings: Settings | str,
    model: str | None = None,
    version: str | int | None = None,
    declared: Sequence[Any] = (),
) -> Iterator[Step]:
    """Try a server, from the connection to an inference, and yield each step when it is over.

    Parameters
    ----------
    settings : Settings or str
        One server, and its options; or its URL.
    model, version : str, optional
        The model to try.
    declared : sequence of sonic_coffea.Model
        Declarations that are compared with the server's models.
    """
    settings = Settings.of(settings)
    version = None if version is None else str(version)
    # Its connection is closed also if the caller takes no more steps.
    with contextlib.closing(_steps(settings, model, version, declared)) as steps:
        for name in steps:
            begun = time.perf_counter()
            try:
                ok, detail, remedy = True, errors.printable(next(steps)), ""
            except errors.SonicError as error:  # it was the last step
                ok, detail = False, str(error)
                remedy = next(_REMEDIES[kind] for kind in type(error).__mro__ if kind in _REMEDIES)
            seconds = time.perf_counter() - begun
            yield Step(name=name, ok=ok, detail=detail, remedy=remedy, seconds=seconds)


def _steps(
    settings: Settings, model: str | None, version: str | None, declared: Sequence[Any]
) -> Generator[str, None, None]:
    """Yield the name of each step, and then its result."""
    yield "connection"
    if settings.servers_file is not None:
        read_servers(settings.servers_file)
    with open_transport(settings.servers[0], options=settings.connection_options()) as connection:
        info = connection.info()
        yield f"{info.name} {info.version}: {', '.join(info.extensions) or 'no extensions'}"
        yield "readiness"
        if not connection.ready():
            raise errors.ModelNotReadyError("the server is not ready to serve")
        yield "ready"
        if not model and not declared:
            yield "models"
            yield _list(connection)
        for declaration in declared:
            yield f"declaration of {declaration.name}"
            yield _compare(connection, declaration)
        if model:
            yield f"model {model}"
            contract = connection.metadata(model, version)
            yield _describe(contract)
            if contract.lists_tensors:
                yield "inference"
                yield _infer(connection, contract, version)


def _list(connection: Transport) -> str:
    try:
        entries = connection.index()
    except errors.SonicError as error:
        return f"the server does not list them ({error.message})"
    return ", ".join(f"{e.name} v{e.version} {e.state}".strip() for e in entries) or "none"


def _compare(connection: Transport, declared: Any) -> str:
    contract = connection.metadata(declared.name, declared.version)
    server = str(connection.address)
    declared.compare(contract, server=server)
    labels: dict[str, list[str]] = {}
    with contextlib.suppress(errors.SonicError):  # a model that does not take a row of zeros
        labels = connection.labels(contract)
    notes = declared.compare_labels(labels, contract, server=server)
    return "; ".join([f"fits version {contract.version}", *notes])


def _describe(contract: Contract) -> str:
    specs = (*contract.inputs, *contract.outputs)
    tensors = "; ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)
    tensors = tensors or "it lists no tensors, so it cannot be tried without a declaration"
    limit = "any number of" if contract.max_rows is None else f"at most {contract.max_rows}"
    return f"version {contract.version}; {tensors}; {limit} rows"


def _infer(connection: Transport, contract: Contract, version: str | None) -> str:
    """Score a row of zeros, alone and beside a row of ones: a row's scores are its own."""
    response, rtt_s = time_requests(connection, contract, version, contract.zeros(1))
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in response.outputs.items())
    shown = f"one row of zeros: {shapes} from version {response.version}, {rtt_s * 1e3:.1f} ms"
    if contract.max_rows == 1:
        return f"{shown}; it takes one row a request"
    pair = contract.zeros(2)
    for tensor in pair.values():
        tensor[1] = 1
    try:
        both = time_requests(connection, contract, version, pair)[0].outputs
    except errors.RequestError as error:
        return f"{shown}; a row of ones could not be tried beside it ({error.message})"
    for name, alone in response.outputs.items():
        if alone.shape[:1] != (1,) or both[name].shape[:1] != (2,):
            return shown  # not of rows, but of a graph
        if alone.dtype.kind in "fc" and not np.allclose(
            alone[0], both[name][0], _TOLERANCE, _TOLERANCE, equal_nan=True
        ):
            raise errors.ResponseError(
                f"output {name!r} depends on the other rows of a request: of a row of zeros it is "
                f"{_shown(alone[0])} alone, and {_shown(both[name][0])} beside one of ones"
            )
    return f"{shown}, the same beside another row"


def _shown(scores: Any) -> str:
    return np.array2string(scores, precision=4, threshold=6, separator=", ").replace("\n", "")
