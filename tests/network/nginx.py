"""A real nginx before Tritons, as an ingress: ``grpc_pass`` to whichever is next."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from tests.network.processes import Proxy

if TYPE_CHECKING:
    from collections.abc import Sequence
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


class Nginx(Proxy):
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
        config = _CONFIG.format(
            folder=folder,
            port=port,
            body=body,
            http=http,
            server=server,
            location=location,
            next=next,
            servers=" ".join(f"server {t.address}:{t.port} {upstream};" for t in tritons),
        )
        assert NGINX is not None
        file, log = folder / f"nginx-{port}.conf", folder / f"nginx-{port}.error.log"
        file.write_text(config)
        argv = [NGINX, "-c", str(file), "-e", str(log), "-p", str(folder)]
        super().__init__(argv, log, port)
