"""A real dask-gateway on this machine: its clusters are processes of whoever runs the tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from tests.network.processes import Service
from tests.ports import held_port

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_gateway = pytest.mark.skipif(
    importlib.util.find_spec("dask_gateway_server") is None,
    reason="dask-gateway-server has no wheel for this machine",
)
# Workers run in a folder of their own, and import the analysis of the tests.
_CONFIG = """
from dask_gateway_server.backends.local import UnsafeLocalBackend

c.DaskGateway.address = "127.0.0.1:{api_port}"
c.DaskGateway.backend_class = UnsafeLocalBackend
c.Proxy.address = "127.0.0.1:{proxy_port}"
c.UnsafeLocalBackend.clusters_directory = "{folder}"
c.UnsafeLocalBackend.inherited_environment = ["PATH", "PYTHONPATH"]
c.UnsafeLocalBackend.sigint_timeout = 1
c.LocalClusterConfig.scheduler_cmd = ["{dask}", "scheduler"]
c.LocalClusterConfig.worker_cmd = ["{dask}", "worker"]
"""


def _answers(url: str) -> bool:
    """Whether the proxy knows its way to the server, and that is well."""
    try:
        with urlopen(url, timeout=5) as answer:  # noqa: S310  of loopback
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[str]:
    """Run one with its files in a folder; yield its address."""
    programs = Path(sys.executable).parent
    with held_port() as proxy_port, held_port() as api_port:
        config = folder / "gateway.py"
        dask = programs / "dask"
        ports = {"proxy_port": proxy_port, "api_port": api_port}
        config.write_text(_CONFIG.format(folder=folder, dask=dask, **ports))
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        argv = [str(shutil.which("dask-gateway-server", path=programs)), "--config", str(config)]
        address = f"http://127.0.0.1:{proxy_port}"
        ready = partial(_answers, f"{address}/api/health")
        with Service(argv, folder / "gateway.log", ready, env=env):
            yield address
