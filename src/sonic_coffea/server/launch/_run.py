"""One life of a local server: what it is known by, and whether it becomes ready."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server._probe import is_ready
from sonic_coffea.server.launch import _logs
from sonic_coffea.server.launch.runtimes import HEADER_NAME
from sonic_coffea.transport import local_state

if TYPE_CHECKING:
    from pathlib import Path

    from sonic_coffea.server.launch._supervised import SupervisedServer

__all__ = ["PortTaken", "Run"]

_HEADER = f"triton-grpc-protocol-{HEADER_NAME}"


class PortTaken(Exception):  # noqa: N818  an outcome to act on, which no caller sees
    """Something else listens on the port that was chosen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One life of the server."""

    repository: Path
    port: int
    metrics_port: int | None
    secret: str = dataclasses.field(repr=False)
    shm_prefix: str
    log: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"grpc://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """The gRPC metadata that it demands."""
        return {_HEADER: self.secret}

    def read_log(self) -> str:
        """Return what it has logged so far."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def wait_until_ready(self, supervised: SupervisedServer, timeout_s: float) -> None:
        """Return when it is ready and recorded, or raise what it says if it ends or is late."""
        deadline = time.monotonic() + timeout_s
        listening = f"Started GRPCInferenceService at 127.0.0.1:{self.port}"
        # Whatever else answers on the port is not this server, so ask only once it listens.
        while listening not in self.read_log() or not is_ready(self.url, self.headers):
            if supervised.ended_within(0.02):
                raise self._failure(supervised.failure)
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready after {timeout_s:g} s")
        pid = supervised.server_pid
        ticks = None if pid is None else local_state.process_start_ticks(pid)
        if pid is None or ticks is None:
            raise self._failure("ended as soon as it was ready")
        # By it this user's processes find the server.
        record = local_state.ServerRecord(
            url=self.url,
            pid=pid,
            start_ticks=ticks,
            supervisor_pid=supervised.pid,
            header=_HEADER,
            secret=self.secret,
            repository=str(self.repository),
            log=str(self.log),
            shm_prefix=self.shm_prefix,
        )
        local_state.register(record)

    def _failure(self, end: str) -> Exception:
        log = self.read_log()
        if _logs.port_is_taken(log):
            return PortTaken()
        lines = _logs.error_lines(log.replace(self.secret, "…"))
        quoted = "\n".join(f"  {line}" for text in lines for line in text.splitlines())
        quoted = quoted or "  (nothing)"
        return ServerStartError(
            f"the local server for {self.repository} {end}. It said:\n{quoted}\n"
            f"Its log: {self.log}",
            server=self.url,
        )
