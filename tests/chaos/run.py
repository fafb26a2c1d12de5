"""Breaks servers and what lies before them while threads and workers score, and checks all rows."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
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
    from pathlib import Path

    from tests.chaos.world import Fault

THREADS, WORKERS = 3, 2
LONGEST_CALL_S = 60.0
# What a run may add to memory that was warm: arenas, numba, histories.
MEMORY_BYTES = 150_000_000
_SETTLES_S = 20.0
# Neither tasks nor workers are to blame for workers that are killed on purpose.
_CONFIG = {
    "distributed.scheduler.allowed-failures": 1000,
    "distributed.deploy.lost-worker-timeout": "1 hour",
}


@dataclass
class Outcome:
    """What came of a run.

    Attributes
    ----------
    seed : int
        Of the faults, of the calls, and of the pool's options.
    options : dict
        Of the pool.
    problems : list of str
        What is wrong; nothing if the run is good.
    timeline : list of str
        Faults, and when each was.
    faults : Counter
        By kind.
    calls, tasks, cancelled, rows, retries : int
        Of threads, of workers, and what they scored.
    longest : tuple of float and str
        Seconds from a call to its scores, and whose call it was.
    """

    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    timeline: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    tasks: int = 0
    cancelled: int = 0
    rows: int = 0
    retries: int = 0
    longest: tuple[float, str] = (0.0, "")


def run(seed: int, seconds: float, folder: Path, show: Callable[[Outcome, float], Any]) -> Outcome:
    """Break things for some seconds; return what came of it.

    Parameters
    ----------
    seed : int
        Says which faults there are and in which order, and which events are scored.
    seconds : float
        How long there are faults.
    folder : Path
        Where logs go.
    show : callable
        Called with the outcome so far and the part of the time that is over.
    """
    outcome = Outcome(seed, _options(random.Random(seed)))
    expected()
    with dask.config.set(_CONFIG), World(folder) as world:
        before = _warm(world)
        with (
            _cluster(folder, WORKERS) as client,
            sonic.connect(world.servers_file, client=client, **outcome.options) as pool,
        ):
            world.dask = client
            _calm(world, outcome)
            load = Load(seed, LONGEST_CALL_S, outcome.problems)
            with ThreadPoolExecutor(THREADS + 1) as threads:
                calls = [threads.submit(load.call, number) for number in range(THREADS)]
                calls.append(threads.submit(load.compute, client))
                try:
                    _break(world, load, outcome, seconds, show)
                finally:
                    load.over.set()
                    while any(not call.done() for call in calls) and not outcome.problems:
                        load.check_time()
                        time.sleep(0.05)
                    if outcome.problems:
                        load.aborted.set()
                        pool.close()
                        client.close()
            outcome.calls, outcome.tasks, outcome.cancelled = load.calls, load.tasks, load.cancelled
            outcome.rows, outcome.longest = load.rows, load.longest
            outcome.retries = pool.statistics.total().retries
            if not outcome.problems:
                _calm(world, outcome)
        forget()
        if not outcome.problems:
            _look_for_leaks(world, before, outcome)
    outcome.problems += [f"a leak of a process: {child}" for child in children()]
    return outcome


def _options(chance: random.Random) -> dict[str, Any]:
    """Return options of a pool: those by default, or others."""
    others = {
        "balance": chance.choice(["load", "load", "priority"]),
        "channels": chance.choice([1, 1, 2]),
        "hedge_after_s": chance.choice([None, None, 0.5]),
    }
    # An outage lasts for as long as four Tritons take to start on a busy machine.
    return {**others, "retry_timeout_s": LONGEST_CALL_S}


def _warm(world: World) -> Held:
    """Have all that a process keeps for good, and return what it holds then."""
    resource_tracker.ensure_running()
    with (
        _cluster(world.servers_file.parent, 0) as client,
        sonic.connect(world.servers_file, client=client),
    ):
        world.dask = client
        client.sync(offload, int)  # whose thread lasts
        _calm(world, Outcome(0))
    forget()
    return Held.now()


def _calm(world: World, outcome: Outcome) -> None:
    """Score with nothing broken, here and on each worker."""
    client = world.dask
    assert client is not None
    workers = list(world.workers())
    tasks = [client.submit(score, outcome.seed, -n, workers=[w]) for n, w in enumerate(workers)]
    for start, stop, _, scores in [*client.gather(tasks), score(outcome.seed, -len(tasks))]:
        outcome.problems += filter(None, [difference(scores, start, stop)])


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


def _break(
    world: World,
    load: Load,
    outcome: Outcome,
    seconds: float,
    show: Callable[[Outcome, float], Any],
) -> None:
    """Make one fault after the other, some at a time; return when all is whole again."""
    begun, busy, changed = time.monotonic(), set[str](), threading.Condition()
    over = threading.Event()

    def note(text: str) -> None:
        outcome.timeline.append(f"{time.monotonic() - begun:8.2f} s  {text}")

    def go(fault: Fault) -> None:
        try:
            with world.break_it(fault):
                note(str(fault))
                over.wait(fault.lasts_s)
            note(f"  whole again: {', '.join(fault.parts)}")
        except Exception as error:  # noqa: BLE001  it is the run that is broken then
            outcome.problems.append(f"{fault}: {type(error).__name__}: {error}")
        with changed:
            busy.difference_update(fault.parts)
            changed.notify_all()

    def wait(until: float, done: Callable[[], bool]) -> bool:
        """Wait for what may come; False if the run is over before."""
        while not done():
            left_s = min(until, begun + seconds) - time.monotonic()
            outcome.calls, outcome.tasks, outcome.rows = load.calls, load.tasks, load.rows
            show(outcome, (time.monotonic() - begun) / seconds)
            load.check_time()
            if left_s <= 0 or outcome.problems:
                break
            changed.wait(min(left_s, 0.1))
        return time.monotonic() < begun + seconds and not outcome.problems

    parts = len({part for _, choices, _ in FAULTS.values() for each in choices for part in each})
    with ThreadPoolExecutor(parts) as threads:
        try:
            with changed:
                for fault in plan(outcome.seed):
                    if not wait(float("inf"), lambda fault=fault: is_possible(fault, busy)):
                        break
                    busy.update(fault.parts)
                    outcome.faults[fault.kind] += 1
                    threads.submit(go, fault)
                    if not wait(time.monotonic() + fault.pause_s, lambda: False):
                        break
        finally:
            over.set()


def _look_for_leaks(world: World, before: Held, outcome: Outcome) -> None:
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
        leaks += [f"shared memory: {name}" for name in regions(pids)]
        leaks += [f"shared memory: {name}" for name in world.regions()]
        if not leaks or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    outcome.problems += [f"a leak of {leak}" for leak in leaks]
