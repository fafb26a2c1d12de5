"""Breaks servers and what lies before them while threads and workers score, and checks all rows.

``python -m tests.chaos --seconds 600 --seed 7`` has faults for ten minutes. A seed says which
faults there are and in which order, which events are scored, and the pool's options.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import dask
from distributed import Client
from distributed.utils import offload
from tests.chaos.leaks import BYTES, children, held, settled
from tests.chaos.load import LONGEST_CALL_S, Load, difference, expected, score
from tests.chaos.world import Fault, World, is_possible, plan
from tests.dask.conftest import local_cluster
from tests.waiting import PATIENT

import sonic_coffea as sonic
from sonic_coffea.pool import forget

_CONFIG = {
    # Neither tasks nor workers are to blame for workers that are killed on purpose.
    "distributed.scheduler.allowed-failures": 1000,
    "distributed.deploy.lost-worker-timeout": "1 hour",
}


def run(load: Load, options: dict[str, Any], seconds: float, folder: Path) -> list[str]:
    """Break things for some seconds, while a load runs; return which, and when."""
    timeline: list[str] = []
    expected()
    with dask.config.set(_CONFIG), World.running(folder) as world:
        before = _warm(world)
        with (
            _cluster(folder, 2) as client,
            sonic.connect(world.servers_file, client=client, **options) as pool,
        ):
            world.dask = client
            _calm(world, load)
            with ThreadPoolExecutor(4) as threads:
                calls = [threads.submit(load.call, number) for number in range(3)]
                calls.append(threads.submit(load.compute, client))
                try:
                    _break(world, load, timeline, seconds)
                finally:
                    load.over.set()
                    if wait(calls, timeout=4 * LONGEST_CALL_S).not_done:
                        load.problems.append("some calls never end")
                        pool.close()
                        client.close()
            for call in calls:
                call.result()
            load.counts["retries"] = pool.statistics.total().retries
            if not load.problems:
                _calm(world, load)
        forget()
        if not load.problems:
            # Memory that was warm may grow by arenas, numba and histories.
            leaks = settled(before, {BYTES: 150_000_000}, within_s=20.0)
            load.problems += [f"a leak of {number:,} {what}" for what, number in leaks.items()]
    load.problems += [f"a leak of a process: {child}" for child in children()]
    return timeline


def _options(chance: random.Random) -> dict[str, Any]:
    """Return options of a pool: those by default, or others."""
    return {
        "balance": chance.choice(["load", "load", "priority"]),
        "channels": chance.choice([1, 1, 2]),
        "hedge_after_s": chance.choice([None, None, 0.5]),
        # An outage lasts for as long as four Tritons take to start on a busy machine.
        "retry_timeout_s": LONGEST_CALL_S,
    }


def _warm(world: World) -> Counter[str]:
    """Have all that a process keeps for good, and return what it holds then."""
    resource_tracker.ensure_running()
    with (
        _cluster(world.servers_file.parent, 0) as client,
        sonic.connect(world.servers_file, client=client),
    ):
        world.dask = client
        client.sync(offload, int)  # whose thread lasts
        _calm(world, Load(0))
    forget()
    return held()


def _calm(world: World, load: Load) -> None:
    """Score with nothing broken, here and on each worker."""
    client, workers = world.dask, list(world.workers())
    tasks = [client.submit(score, load.seed, -n, workers=[w]) for n, w in enumerate(workers)]
    for start, stop, _, scores in [*client.gather(tasks), score(load.seed, -len(tasks))]:
        load.problems += difference(scores, start, stop)


@contextlib.contextmanager
def _cluster(folder: Path, workers: int) -> Iterator[Client]:
    # Workers that are killed are meant to be.
    options = {"local_directory": folder / "dask", "silence_logs": logging.CRITICAL}
    with local_cluster(workers, **options) as cluster, Client(cluster) as client:
        yield client


def _break(world: World, load: Load, timeline: list[str], seconds: float) -> None:
    """Make one fault after the other, some at a time; return when all is whole again."""
    begun, busy, over = time.monotonic(), set[str](), threading.Event()

    def note(text: str) -> None:
        timeline.append(f"{time.monotonic() - begun:8.2f} s  {text}")

    def go(fault: Fault) -> None:
        try:
            with world.broken(fault):
                note(str(fault))
                over.wait(fault.lasts_s)
            note(f"  whole again: {', '.join(fault.parts)}")
        except Exception as error:  # noqa: BLE001  it is the run that is broken then
            load.failed(fault, error)
        busy.difference_update(fault.parts)

    due = begun
    with ThreadPoolExecutor(9) as threads:  # one for each part of the world
        try:
            for fault in plan(load.seed):
                while time.monotonic() < due or not is_possible(fault, busy):
                    if time.monotonic() > begun + seconds or load.problems:
                        return
                    time.sleep(0.02)
                busy.update(fault.parts)
                load.counts["faults"] += 1
                threads.submit(go, fault)
                due = time.monotonic() + fault.pause_s
        finally:
            over.set()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, help="by default another one each time")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}; the same again with SEED={seed} SECONDS={arguments.seconds:g}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="sonic-chaos-"))
    os.environ.update(PATIENT, SONIC_COFFEA_STATE_DIR=str(folder))
    # That servers are lost is what is meant.
    os.environ["DASK_LOGGING__SONIC_COFFEA"] = "error"
    logging.basicConfig(
        filename=folder / "client.log", level=logging.INFO, format="%(asctime)s %(message)s"
    )
    load, options = Load(seed), _options(random.Random(seed))
    timeline = run(load, options, arguments.seconds, folder)
    counts = ", ".join(f"{number:,} {what}" for what, number in load.counts.most_common())
    print(f"options: {options}\n{counts}\nlongest call: {load.longest_s:.2f} s")
    if load.problems:
        print("\nwhat was broken, and when:", *timeline, sep="\n")
        print("\nwhat is wrong:", *load.problems, sep="\n")
        sys.exit(f"seed {seed}; logs are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
