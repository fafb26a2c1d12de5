"""A real HAProxy before Tritons: of connections (layer 4), or of HTTP/2 requests."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from tests.network.processes import Proxy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.network.tritons import Triton

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
needs_haproxy = pytest.mark.skipif(
    HAPROXY is None, reason="haproxy is not installed on this machine"
)

_CONFIG = """
global
    nbthread 1
defaults
    mode {mode}
    timeout connect 1s
    timeout client 1h
    timeout server {server_timeout}
    {defaults}
frontend requests
    bind 127.0.0.1:{port} {proto}
    {frontend}
    default_backend tritons
backend tritons
    balance {balance}
    {backend}
    {servers}
"""


class HAProxy(Proxy):
    """An HAProxy on loopback.

    Parameters
    ----------
    tritons : sequence of Triton
        What it leads to.
    folder, port : Path, int
        Where its files go, and where it listens.
    mode : {"tcp", "http"}
        Whether a connection stays with one Triton, or each request goes to the next.
    server_timeout : str
        After which a silent Triton is given up.
    check : str
        More for each server: by default it is asked twice a second whether it accepts connections.
    defaults, frontend, backend : str
        More lines of these sections.
    """

    def __init__(
        self,
        tritons: Sequence[Triton],
        folder: Path,
        port: int,
        *,
        mode: str = "tcp",
        balance: str = "roundrobin",
        server_timeout: str = "1h",
        check: str = "check inter 500ms fall 1 rise 1",
        defaults: str = "",
        frontend: str = "",
        backend: str = "",
    ) -> None:
        proto = "proto h2" if mode == "http" else ""
        servers = [
            f"server triton{i} {triton.address}:{triton.port} {proto} {check}"
            for i, triton in enumerate(tritons)
        ]
        config = _CONFIG.format(
            mode=mode,
            port=port,
            proto=proto,
            balance=balance,
            server_timeout=server_timeout,
            defaults=defaults,
            frontend=frontend,
            backend=backend,
            servers="\n    ".join(servers),
        )
        assert HAPROXY is not None
        file = folder / f"haproxy-{port}.cfg"
        file.write_text(config)
        argv = [HAPROXY, "-db", "-f", str(file)]
        super().__init__(argv, folder / f"haproxy-{port}.log", port)
