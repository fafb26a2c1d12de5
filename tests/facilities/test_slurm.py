"""No chunk is lost or counted twice on a real Slurm, whose jobs come, go, and are cancelled."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coffea import processor
from dask_jobqueue import SLURMCluster
from distributed import Client
from tests.docs.support import ROOT, clean_environment, run_pages
from tests.facilities.analysis import analyse, check, interrupted, serve, serve_example
from tests.facilities.slurm import Slurm, needs_slurm, slurm
from tests.waiting import until

import sonic_coffea as sonic

pytestmark = [needs_slurm, pytest.mark.server]  # and workers in processes


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", running.env["SLURM_CONF"])
        yield running


def test_dask_jobqueue_loses_no_chunk_when_a_job_is_cancelled(batch: Slurm, tmp_path: Path) -> None:
    def run() -> dict[str, Any]:
        return analyse(processor.DaskExecutor(client=client, status=False))

    with (
        serve() as server,
        SLURMCluster(
            cores=1,
            memory="2GB",
            python=sys.executable,
            log_directory=str(tmp_path),
            local_directory=str(tmp_path),
            scheduler_options={"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"},
        ) as cluster,
        Client(cluster) as client,
        sonic.connect(server.url, client=client, max_suspended_chunks=0),
    ):
        cluster.scale(jobs=2)
        client.wait_for_workers(2, timeout=100)
        check(interrupted(run, server, lambda: batch.cancel(min(batch.jobs("RUNNING")))))
        cluster.scale(1)
        until(lambda: len(client.scheduler_info()["workers"]) == 1)
        check(run())
    until(lambda: not batch.jobs())


def test_parsl_loses_no_chunk_when_a_job_is_cancelled(
    batch: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It takes each process of tests a second to import.
    import parsl
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor
    from parsl.launchers import SimpleLauncher
    from parsl.providers import SlurmProvider

    # It starts programs of its own by their names, here and in the jobs.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    provider = SlurmProvider(
        partition="all",
        cores_per_node=1,
        init_blocks=0,
        max_blocks=3,
        exclusive=False,
        launcher=SimpleLauncher(),
        walltime="00:05:00",
        worker_init=f"export PYTHONPATH={Path(__file__).parents[2]}",
    )
    executor = HighThroughputExecutor(
        label="slurm",
        address="127.0.0.1",
        provider=provider,
        max_workers_per_node=1,
        heartbeat_period=1,
        # A busy machine leaves processes without a turn for seconds; Parsl starts no other then.
        heartbeat_threshold=15,
        poll_period=1,
    )
    # One that is cancelled loses its chunk, which runs again elsewhere.
    config = Config(
        [executor], retries=2, run_dir=str(tmp_path), initialize_logging=False, strategy="none"
    )

    def run() -> dict[str, Any]:
        return analyse(processor.ParslExecutor(status=False))

    jobs: list[str] = []

    def started() -> bool:
        """Start what is left of three jobs; gRPC's threads may end a process that submits one."""
        jobs.extend(executor.scale_out_facade(3 - len(jobs)))
        return len(jobs) == 3

    with serve() as server, sonic.connect(server.url), parsl.load(config):
        until(started)
        until(lambda: len(executor.connected_managers()) == 3)
        executor.scale_in_facade(1)
        until(lambda: len(batch.jobs()) == 2)
        cancelled, _ = batch.jobs("RUNNING")
        check(interrupted(run, server, lambda: batch.cancel(cancelled)))
        check(run())
    until(lambda: not batch.jobs())


def test_the_page_runs_as_it_stands(batch: Slurm, tmp_path: Path) -> None:
    """What the documentation says of Slurm runs as it stands."""
    work = tmp_path / "slurm"
    work.mkdir()
    with serve_example() as server:
        (work / "servers.txt").write_text(f"{server.url}\n")
        run_pages(
            [ROOT / "docs/facilities/slurm.md"], tmp_path, clean_environment(tmp_path / "state")
        )
    until(lambda: not batch.jobs())
