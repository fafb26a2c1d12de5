"""A real nginx before Tritons, as an ingress: ``grpc_pass`` to whichever is next."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.network.processes import Kept, accepts
from tests.ports import held_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.network.tritons import Triton

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed on this machine")

_CONFIG = """
daemon off;
master_process off;
pid {folder}/nginx-{port}.pid;
error_log {folder}/nginx-{port}.error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder};
    proxy_temp_path {folder};
    fastcgi_temp_path {folder};
    uwsgi_temp_path {folder};
    scgi_temp_path {folder};
    client_max_body_size {body};
    {http}
    upstream tritons {{ {servers} }}
    server {{
        listen 127.0.0.1:{port} http2;
        {server}
        location / {{
            {location}
            grpc_pass grpc://tritons;
            grpc_next_upstream {next};
        }}
    }}
}}
"""


class Nginx:
    """An nginx on loopback.

    Parameters
    ----------
    tritons : sequence of Triton
        What it leads to, in turns.
    folder, port : Path, int
        Where its files go, and where it listens.
    body : str
        The largest body of a request: ``"0"`` for any, nginx's own default is ``"1m"``.
    upstream : str
        More for each server, such as ``max_fails=0``.
    http, server, location : str
        More directives at these places, such as a ``limit_req``.
    next : str
        When it asks the next server by itself.
    """

    def __init__(
        self,
        tritons: Sequence[Triton],
        folder: Path,
        port: int,
        *,
        body: str = "0",
        upstream: str = "",
        http: str = "",
        server: str = "",
        location: str = "",
        next: str = "off",  # noqa: A002  nginx's word
    ) -> None:
        self.port = port
        self.url = f"grpc://127.0.0.1:{port}"
        self._folder = folder
        self.config = _CONFIG.format(
            folder=folder,
            port=port,
            body=body,
            http=http,
            server=server,
            location=location,
            next=next,
            servers=" ".join(f"server {t.address}:{t.port} {upstream};" for t in tritons),
        )
        self._kept: Kept | None = None

    def start(self) -> None:
        """Start it, and return when it listens."""
        assert NGINX is not None
        config = self._folder / f"nginx-{self.port}.conf"
        config.write_text(self.config)
        log = self._folder / f"nginx-{self.port}.error.log"
        command = [NGINX, "-c", str(config), "-e", str(log), "-p", str(self._folder)]
        self._kept = Kept(command, log)
        self._kept.wait(lambda: accepts(self.port))

    def end(self) -> None:
        """End it; harmless when it has ended."""
        if self._kept is not None:
            self._kept.end()


@contextlib.contextmanager
def nginx(tritons: Sequence[Triton], folder: Path, **settings: str) -> Iterator[Nginx]:
    """Run an nginx before Tritons."""
    with held_port() as port:
        running = Nginx(tritons, folder, port, **settings)
        try:
            running.start()
            yield running
        finally:
            running.end()
