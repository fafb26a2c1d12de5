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
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
from distributed import Client, LocalCluster
from distributed.utils import offload
from tests.chaos.leaks import Held, children, regions
from tests.chaos.load import SUMS, Load, difference, expected, jets, score
from tests.chaos.world import FAULTS, World, is_possible, plan

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings, forget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.chaos.world import Fault

THREADS, WORKERS = 3, 2
LONGEST_CALL_S = 60.0
# What a run may add to memory that was warm: arenas, numba, histories.
MEMORY_BYTES = 150_000_000
_SETTLES_S = 20.0
_CONFIG = {
    # Neither tasks nor workers are to blame for workers that are killed on purpose.
    "distributed.scheduler.allowed-failures": 1000,
    "distributed.deploy.lost-worker-timeout": "1 hour",
}


def run(load: Load, options: dict[str, Any], seconds: float, folder: Path) -> list[str]:
    """Break things for some seconds, while a load runs; return which, and when."""
    timeline: list[str] = []
    expected()
    with dask.config.set(_CONFIG), World(folder) as world:
        before = _warm(world)
        with (
            _cluster(folder, WORKERS) as client,
            sonic.connect(world.servers_file, client=client, **options) as pool,
        ):
            world.dask = client
            _calm(world, load)
            with ThreadPoolExecutor(THREADS + 1) as threads:
                calls = [threads.submit(load.call, number) for number in range(THREADS)]
                calls.append(threads.submit(load.compute, client))
                try:
                    _break(world, load, timeline, seconds)
                finally:
                    load.over.set()
                    while any(not call.done() for call in calls) and not load.problems:
                        load.check_time()
                        time.sleep(0.05)
                    if load.problems:
                        load.aborted.set()
                        pool.close()
                        client.close()
            load.retries = pool.statistics.total().retries
            if not load.problems:
                _calm(world, load)
        forget()
        if not load.problems:
            _look_for_leaks(world, before, load)
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


def _warm(world: World) -> Held:
    """Have all that a process keeps for good, and return what it holds then."""
    resource_tracker.ensure_running()
    with (
        _cluster(world.servers_file.parent, 0) as client,
        sonic.connect(world.servers_file, client=client),
    ):
        world.dask = client
        client.sync(offload, int)  # whose thread lasts
        _calm(world, Load(0, LONGEST_CALL_S))
    forget()
    return Held.now()


def _calm(world: World, load: Load) -> None:
    """Score with nothing broken, here and on each worker."""
    client = world.dask
    assert client is not None
    workers = list(world.workers())
    tasks = [client.submit(score, load.seed, -n, workers=[w]) for n, w in enumerate(workers)]
    for start, stop, _, scores in [*client.gather(tasks), score(load.seed, -len(tasks))]:
        load.problems += filter(None, [difference(scores, start, stop)])


@contextlib.contextmanager
def _cluster(folder: Path, workers: int) -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            local_directory=folder / "dask",
            # Workers that are killed are meant to be.
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def _break(world: World, load: Load, timeline: list[str], seconds: float) -> None:
    """Make one fault after the other, some at a time; return when all is whole again."""
    begun, busy, changed = time.monotonic(), set[str](), threading.Condition()
    over = threading.Event()

    def note(text: str) -> None:
        timeline.append(f"{time.monotonic() - begun:8.2f} s  {text}")

    def go(fault: Fault) -> None:
        try:
            with world.broken(fault):
                note(str(fault))
                over.wait(fault.lasts_s)
            note(f"  whole again: {', '.join(fault.parts)}")
        except Exception as error:  # noqa: BLE001  it is the run that is broken then
            load.problems.append(f"{fault}: {type(error).__name__}: {error}")
        with changed:
            busy.difference_update(fault.parts)
            changed.notify_all()

    def wait(until: float, done: Callable[[], bool]) -> bool:
        """Wait for what may come; False if the run is over before."""
        while not done():
            left_s = min(until, begun + seconds) - time.monotonic()
            load.check_time()
            if left_s <= 0 or load.problems:
                break
            changed.wait(min(left_s, 0.1))
        return time.monotonic() < begun + seconds and not load.problems

    parts = len({p for kind in FAULTS.values() for each in kind.choices for p in each})
    with ThreadPoolExecutor(parts) as threads:
        try:
            with changed:
                for fault in plan(load.seed):
                    if not wait(float("inf"), lambda fault=fault: is_possible(fault, busy)):
                        break
                    busy.update(fault.parts)
                    load.faults[fault.kind] += 1
                    threads.submit(go, fault)
                    if not wait(time.monotonic() + fault.pause_s, lambda: False):
                        break
        finally:
            over.set()


def _look_for_leaks(world: World, before: Held, load: Load) -> None:
    """Wait until nothing is left; say what there still is after some time."""
    for triton in world.tritons.values():
        triton.start()  # one whose model stood still has ended by itself
    # What a client left that was killed is for the next one.
    for url in world.urls.values():
        with Pool(Settings.make(url)) as pool:
            SUMS(jets(), pool=pool)
    deadline = time.monotonic() + _SETTLES_S
    while True:
        leaks = Held.now().leaked_since(before, memory_bytes=MEMORY_BYTES)
        pids = {os.getpid(), *world.worker_pids}
        leaks += [f"shared memory: {name}" for name in (*regions(pids), *world.regions())]
        if not leaks or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    load.problems += [f"a leak of {leak}" for leak in leaks]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, help="by default another one each time")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}; the same again with SEED={seed} SECONDS={arguments.seconds:g}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="sonic-chaos-"))
    os.environ["SONIC_COFFEA_STATE_DIR"] = str(folder)
    # That servers are lost is what is meant.
    os.environ["DASK_LOGGING__SONIC_COFFEA"] = "error"
    logging.basicConfig(
        filename=folder / "client.log", level=logging.INFO, format="%(asctime)s %(message)s"
    )
    load, options = Load(seed, LONGEST_CALL_S), _options(random.Random(seed))
    timeline = run(load, options, arguments.seconds, folder)
    print(f"options: {options}\n{load}")
    if load.problems:
        print("\nwhat was broken, and when:", *timeline, sep="\n")
        print("\nwhat is wrong:", *load.problems, sep="\n")
        sys.exit(f"seed {seed}; logs are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
