"""Checks of each host: servers step by step, readable files, and packages."""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.pool._check import Step, check
from sonic_coffea.reporting import tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sonic_coffea.pool._settings import Settings

_PACKAGES = (
    "sonic-coffea",
    "awkward",
    "coffea",
    "dask",
    "distributed",
    "grpcio",
    "numba",
    "numpy",
    "protobuf",
    "tritonclient",
)


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
    unreadable : mapping of str to str
        Files of the settings that cannot be read there, and why: by option, such as ``tls_root``.
    versions : mapping of str to (str or None)
        Those of Python and of packages; None for one that is not installed.
    error : str
        Why nothing could be tried there; empty if it could.
    """

    host: str
    process: str
    servers: Mapping[str, Sequence[Step]] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether no step failed, every file can be read, and no package is missing."""
        tried = all(step.ok for steps in self.servers.values() for step in steps)
        return tried and not (self.error or self.unreadable or None in self.versions.values())


class Checks(list[HostCheck]):
    """The checks of all hosts, as a table.

    Parameters
    ----------
    hosts : sequence of HostCheck
        One for each host.
    expected : mapping of str to (str or None)
        The versions for comparison: by default those of this process.

    Attributes
    ----------
    header : tuple of str
        The names of the columns.
    """

    header = ("host", "process", "server", "delay", "result", "lacks, or has otherwise")

    def __init__(
        self, hosts: Sequence[HostCheck], expected: Mapping[str, str | None] | None = None
    ) -> None:
        super().__init__(hosts)
        self._expected = versions() if expected is None else expected

    @property
    def ok(self) -> bool:
        """Whether each host is fine; another version of a package is no failure."""
        return all(host.ok for host in self)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of the table: one for each host and server."""
        for host in self:
            lacks = "\n".join(self._lacks(host))
            if host.error:
                yield host.host, host.process, "", "", f"not tried: {host.error}", lacks
            for server, steps in host.servers.items():
                yield host.host, host.process, server, _delay(steps), _result(steps), lacks

    def _lacks(self, host: HostCheck) -> Iterator[str]:
        for option, problem in host.unreadable.items():
            yield f"{option}: {problem}"
        for package, version in host.versions.items():
            expected = self._expected.get(package)
            if version is None:
                yield f"{package} is not installed"
            elif version != expected:
                yield f"{package} {version}, here {expected or 'not installed'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the checks as plain values, for JSON."""
        hosts = [{**asdict(host), "ok": host.ok} for host in self]
        return {"ok": self.ok, "expected": dict(self._expected), "hosts": hosts}

    def __repr__(self) -> str:
        lines = [" | ".join(self.header), *(" | ".join(row) for row in self.rows())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return tables.table("Servers, as hosts see them", self.rows(), header=self.header)


def check_here(settings: Settings, *tried: Any, process: str = "this process") -> HostCheck:
    """Try all servers from this process, at the same time; `tried` are arguments of `check`."""

    def steps_of(url: str) -> tuple[Step, ...]:
        return tuple(check(replace(settings, servers=(url,)), *tried))

    with ThreadPoolExecutor(len(settings.servers), thread_name_prefix="sonic-check") as threads:
        steps = dict(zip(settings.servers, threads.map(steps_of, settings.servers), strict=True))
    return HostCheck(
        host=socket.gethostname(),
        process=process,
        servers=steps,
        unreadable=dict(_unreadable(settings)),
        versions=versions(),
    )


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the main packages; None for a missing package."""
    known: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            known[package] = None
    return known


def _unreadable(settings: Settings) -> Iterator[tuple[str, str]]:
    token_file = settings.token if isinstance(settings.token, Path) else None
    files = {**settings.options(), "token_file": token_file}
    for option in ("servers_file", "token_file", "tls_root", "tls_cert", "tls_key"):
        if (path := files[option]) is not None:
            try:
                Path(path).expanduser().open("rb").close()
            except OSError as error:
                yield option, f"cannot read {path}: {error.strerror}"


def _delay(steps: Sequence[Step]) -> str:
    """Return the RTT of a small request on an open connection."""
    answered = [step.seconds for step in steps if step.name == "readiness" and step.ok]
    return f"{1e3 * answered[0]:.1f} ms" if answered else ""


def _result(steps: Sequence[Step]) -> str:
    for step in steps:
        if step.ok is False:
            remedy = f"\n→ {step.remedy}" if step.remedy else ""
            return f"✗ {step.name}: {step.detail}{remedy}"
    return f"✓ {steps[-1].name}"
