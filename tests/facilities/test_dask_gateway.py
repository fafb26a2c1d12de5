"""What the documentation says of a cluster that runs already, on a real dask-gateway."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from dask_gateway import Gateway
from tests.docs.support import ROOT, clean_environment, run_pages
from tests.facilities.analysis import serve_example
from tests.network.processes import Service, answers
from tests.ports import held_port

# Clients that have been closed close themselves again when they are collected, and fail, as their
# event loop has ended.
Gateway.__del__ = lambda _: None

pytestmark = [
    pytest.mark.server,  # and workers in processes
    pytest.mark.skipif(
        find_spec("dask_gateway_server") is None,
        reason="dask-gateway-server has no wheel for this machine",
    ),
]
# Its clusters are processes of whoever runs the tests. Workers run in a folder of their own, and
# import the analysis of the tests.
SETTINGS = """
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


@contextlib.contextmanager
def cluster_of(folder: Path) -> Iterator[tuple[str, Any]]:
    """Run a gateway with its files in a folder; yield its address and a cluster of it."""
    programs = Path(sys.executable).parent
    with held_port() as proxy_port, held_port() as api_port:
        ports = {"proxy_port": proxy_port, "api_port": api_port}
        settings = SETTINGS.format(folder=folder, dask=programs / "dask", **ports)
        address = f"http://127.0.0.1:{proxy_port}"
        with (
            Service(
                [programs / "dask-gateway-server", "--config"],
                folder / "gateway.log",
                partial(answers, f"{address}/api/health"),
                settings=(folder / "gateway.py", settings),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            ),
            Gateway(address, auth="basic") as gateway,
            gateway.new_cluster() as cluster,
        ):
            yield address, cluster


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """What the documentation says of a cluster that runs already works as it stands."""
    with serve_example() as server, cluster_of(tmp_path) as (address, cluster):
        cluster.scale(1)
        env = {
            **clean_environment(tmp_path / "state"),
            "DASK_GATEWAY__ADDRESS": address,
            "DASK_GATEWAY__AUTH__TYPE": "basic",
            "DASK_SONIC__SERVERS": server.url,
        }
        run_pages([ROOT / "docs/facilities/purdue-af.md"], tmp_path, env)
