"""Analyses run on a real Slurm, by Parsl and by what the documentation says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from coffea import processor
from coffea.nanoevents import BaseSchema
from tests.docs.support import ROOT, clean_environment, run_pages
from tests.facilities.analysis import MODEL, Tagging, serve_example
from tests.facilities.slurm import Slurm, needs_slurm, slurm
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

pytestmark = [needs_slurm, pytest.mark.server]  # and workers in processes


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with (
        slurm(tmp_path_factory.mktemp("slurm")) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", running.env["SLURM_CONF"])
        yield running


def test_parsl_runs_an_analysis(
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
        max_blocks=1,
        exclusive=False,
        launcher=SimpleLauncher(),
        walltime="00:05:00",
        worker_init=f"export PYTHONPATH={Path(__file__).parents[2]}",
    )
    executor = HighThroughputExecutor(
        label="slurm", address="127.0.0.1", provider=provider, max_workers_per_node=2, poll_period=1
    )
    config = Config([executor], run_dir=str(tmp_path), initialize_logging=False, strategy="none")
    files = {"TTbar": {"treename": "Events", "files": [str(DATA / "TTbar_1.root")]}}
    served = {MODEL.name: FakeModel.of(MODEL)}
    with FakeServer(served) as server, sonic.connect(server.url), parsl.load(config):
        here, there = (
            processor.Runner(executor, schema=BaseSchema, chunksize=125)(files, Tagging())
            for executor in (
                processor.IterativeExecutor(status=False),
                processor.ParslExecutor(status=False),
            )
        )
    assert len(there["tops"]) == 1000
    assert there["tops"] == here["tops"]
    rows = [sonic.report(out).to_dict()["total"]["rows"] for out in (here, there)]
    assert rows[0] == rows[1] == sum(map(len, here["tops"].values()))
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
