"""Through a real nginx, as a gRPC load balancer in front of two Tritons."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.ports import held_port

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed on this machine")

# The balancer leads each request to one of two servers of its own, which add the secret of the
# Triton behind it.
_CONFIG = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder};
    proxy_temp_path {folder};
    fastcgi_temp_path {folder};
    uwsgi_temp_path {folder};
    scgi_temp_path {folder};
    client_max_body_size 0;
    upstream tritons {{ server 127.0.0.1:{ports[1]}; server 127.0.0.1:{ports[2]}; }}
    server {{
        listen 127.0.0.1:{ports[0]} http2;
        location / {{
            grpc_pass grpc://tritons;
            # Not asked again elsewhere, but known for dead: as balancers find out.
            grpc_next_upstream error timeout http_502;
        }}
    }}
    {behind}
}}
"""
_BEHIND = """
    server {{
        listen 127.0.0.1:{port} http2;
        location / {{
            grpc_pass grpc://127.0.0.1:{triton};
            grpc_set_header {header} "{secret}";
        }}
    }}
"""


@pytest.fixture
def tritons(repository: Path, installation: Any) -> Iterator[list[sonic.LocalServer]]:
    with sonic.LocalServer(repository) as one, sonic.LocalServer(repository) as two:
        yield [one, two]


@pytest.fixture
def ports() -> Iterator[list[int]]:
    with held_port() as one, held_port() as two, held_port() as three:
        yield [one, two, three]


@pytest.fixture
def balancer(ports: list[int], tritons: list[sonic.LocalServer], tmp_path: Path) -> Iterator[str]:
    behind = ""
    for port, triton in zip(ports[1:], tritons, strict=True):
        ((header, secret),) = triton.headers.items()
        target = triton.url.rpartition(":")[2]
        behind += _BEHIND.format(port=port, triton=target, header=header, secret=secret)
    config = tmp_path / "nginx.conf"
    config.write_text(_CONFIG.format(folder=tmp_path, ports=ports, behind=behind))
    assert NGINX is not None
    command = [NGINX, "-c", str(config), "-e", str(tmp_path / "error.log"), "-p", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", ports[0]), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "error.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield f"grpc://127.0.0.1:{ports[0]}"
    finally:
        process.terminate()
        process.wait(20)


def requests_of(triton: sonic.LocalServer) -> int:
    with Pool(Settings.make(triton)) as pool:
        return pool.connections()[0].statistics("tagger", None).requests


@pytest.mark.parametrize("channels", [1, 4])
def test_both_servers_behind_a_balancer_are_used(
    balancer: str,
    tritons: list[sonic.LocalServer],
    tagger: sonic.Model,
    jets: Any,
    direct: list[Any],
    compare: Any,
    channels: int,
) -> None:
    with Pool(Settings.make(balancer, channels=channels)) as pool:
        compare(tagger(jets, pool=pool).top, direct)
        assert pool.statistics.total().failures == 0
    assert all(requests_of(triton) > 5 for triton in tritons)


def test_a_server_behind_a_balancer_is_killed(
    balancer: str,
    tritons: list[sonic.LocalServer],
    tagger: sonic.Model,
    jets: Any,
    direct: list[Any],
    compare: Any,
) -> None:
    """What it had is answered by the other, which is behind the same address."""
    with Pool(Settings.make(balancer, retry_timeout_s=60)) as pool:
        pendings = [tagger.submit(jets, pool=pool) for _ in range(2)]
        assert tritons[0].pid is not None
        os.kill(tritons[0].pid, signal.SIGKILL)
        for pending in pendings:
            compare(pending.result(timeout_s=60).top, direct)
