"""No chunk is lost or counted twice on a real dask-gateway, whose workers are killed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from dask_gateway import Gateway
from tests.docs.support import ROOT, clean_environment, run_pages
from tests.facilities.analysis import check_cluster, serve, serve_example
from tests.facilities.gateway import gateway, needs_gateway

if TYPE_CHECKING:
    from pathlib import Path

# Clients that have been closed close themselves again when they are collected, and fail, as their
# event loop has ended.
Gateway.__del__ = lambda _: None

pytestmark = [needs_gateway, pytest.mark.server]  # and workers in processes


def test_no_chunk_is_lost_when_a_worker_is_killed(tmp_path: Path) -> None:
    with (
        serve() as server,
        gateway(tmp_path) as address,
        Gateway(address, auth="basic") as there,
        there.new_cluster() as cluster,
        cluster.get_client() as client,
    ):
        cluster.scale(2)

        def kill() -> None:
            os.kill(min(client.run(os.getpid).values()), signal.SIGKILL)

        check_cluster(cluster, client, server, kill)


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """What the documentation says of a cluster that runs already works as it stands."""
    with (
        serve_example() as server,
        gateway(tmp_path) as address,
        Gateway(address, auth="basic") as there,
        there.new_cluster() as cluster,
    ):
        cluster.scale(1)
        env = {
            **clean_environment(tmp_path / "state"),
            "DASK_GATEWAY__ADDRESS": address,
            "DASK_GATEWAY__AUTH__TYPE": "basic",
            "DASK_SONIC__SERVERS": server.url,
        }
        run_pages([ROOT / "docs/facilities/purdue-af.md"], tmp_path, env)
