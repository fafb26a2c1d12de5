"""Calls whose scores are known, from threads of this process and from workers of a cluster."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import awkward as ak
import numpy as np
from distributed import as_completed
from tests.chaos.world import MODEL

import sonic_coffea as sonic
from sonic_coffea.errors import CancelledError

if TYPE_CHECKING:
    from distributed import Client

LENGTH, EVENTS = 64, 4000
SUMS = sonic.Model(
    MODEL, {"features": sonic.Padded(["pt", "eta"], LENGTH)}, {"scores": ["one", "product"]}
)
# Small calls, and such as travel in shared memory.
_SIZES = (1, 10, 100, 1000, 3000)
_WORKER_TASKS = 6
_CANCELLED = 0.05


@functools.cache
def jets() -> ak.Array:
    """Return events with jets of some constituents, the same in each process."""
    rng = np.random.default_rng(11)
    n_jets = rng.poisson(1.5, EVENTS)
    n_constituents = rng.poisson(20, n_jets.sum())
    total = n_constituents.sum()
    columns = {
        "pt": rng.exponential(size=total).astype(np.float32),
        "eta": rng.normal(size=total).astype(np.float32),
    }
    return ak.unflatten(ak.unflatten(ak.zip(columns), n_constituents), n_jets)


@functools.cache
def expected() -> ak.Array:
    """Return the scores of all jets, computed here."""
    tensor = SUMS.inputs["features"].pack(jets())
    one, two = tensor[:, 0], tensor[:, 1]
    scores = {"one": one.sum(axis=1), "product": (one * two).sum(axis=1)}
    return ak.unflatten(ak.zip(scores), ak.num(jets()))


def difference(scores: ak.Array, start: int, stop: int) -> str:
    """Say how scores of some events differ from those they should be; nothing if they do not."""
    right = expected()[start:stop]
    if ak.num(scores).tolist() != ak.num(right).tolist():
        return f"events {start} to {stop}: another number of rows"
    for field_ in ak.fields(right):
        found, known = (np.asarray(ak.flatten(array[field_])) for array in (scores, right))
        wrong = np.flatnonzero(~np.isclose(found, known, rtol=1e-5, atol=1e-5))
        if len(wrong):
            return f"events {start} to {stop}: {len(wrong)} wrong {field_}, row {wrong[0]} first"
    return ""


def score(seed: int, number: int) -> tuple[int, int, float, ak.Array]:
    """Score some events, as a task; return which they are, how long it took, and the scores."""
    start, stop = _events(random.Random(f"{seed} {number}"))
    expected()  # a new worker compiles first
    begun = time.monotonic()
    scores = SUMS(jets()[start:stop])
    return start, stop, time.monotonic() - begun, scores


def _events(chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(EVENTS)
    return start, min(EVENTS, start + chance.choice(_SIZES))


@dataclass
class Load:
    """Calls that are made until they shall end, and what came of them.

    Attributes
    ----------
    seed : int
        Which events are scored.
    longest_s : float
        A call that takes longer is wrong.
    problems : list of str
        What is wrong; nothing if all is well.
    calls, tasks, cancelled, rows, retries : int
        Of threads, of workers, and what they scored.
    faults : Counter
        What was broken meanwhile, by kind.
    longest : tuple of float and str
        Seconds from a call to its scores, and whose call it was.
    over, aborted : threading.Event
        When calls shall end, and whether because something is wrong.
    """

    seed: int
    longest_s: float
    problems: list[str] = field(default_factory=list)
    calls: int = 0
    tasks: int = 0
    cancelled: int = 0
    rows: int = 0
    retries: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    longest: tuple[float, str] = (0.0, "")
    over: threading.Event = field(default_factory=threading.Event)
    aborted: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made_at: float = field(default_factory=time.monotonic)
    _began: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        faults = ", ".join(f"{number} {kind}" for kind, number in self.faults.most_common())
        return (
            f"calls of threads: {self.calls:,}, and {self.cancelled:,} cancelled; "
            f"tasks of workers: {self.tasks:,}\n"
            f"rows, each as by direct inference: {self.rows:,}; retries: {self.retries:,}\n"
            f"longest call: {self.longest[0]:.2f} s, {self.longest[1]}\n"
            f"faults: {self.faults.total()}: {faults}"
        )

    def call(self, thread: int) -> None:
        """Make calls, one after the other; some are cancelled."""
        chance = random.Random(f"{self.seed} thread {thread}")
        name = f"thread {thread}"
        while not self.over.is_set():
            start, stop = _events(chance)
            self._began[name] = begun = time.monotonic()
            pending = SUMS.submit(jets()[start:stop])
            if chance.random() < _CANCELLED:
                pending.cancel()
            try:
                scores = pending.result()
            except CancelledError:
                self.cancelled += 1
                continue
            except Exception as error:  # noqa: BLE001  no fault may become an error
                self.failed(f"{name}, events {start} to {stop}: {type(error).__name__}: {error}")
                return
            counted, rows = pending.statistics.total().rows, int(ak.count(scores.one))
            if counted != rows:
                self.failed(f"{name}, events {start} to {stop}: {rows} rows count as {counted}")
            self._count(name, start, stop, time.monotonic() - begun, scores)
            self.calls += 1
        self._began.pop(name, None)

    def compute(self, client: Client) -> None:
        """Have tasks computed by workers, some at a time."""
        number = _WORKER_TASKS
        tasks = as_completed(
            [client.submit(score, self.seed, n, pure=False) for n in range(number)]
        )
        for task in tasks:
            try:
                self._count("a task", *task.result())
            except Exception as error:  # noqa: BLE001
                self.failed(f"a task: {type(error).__name__}: {error}")
                return
            self.tasks += 1
            if not self.over.is_set():
                tasks.add(client.submit(score, self.seed, number, pure=False))
                number += 1

    def check_time(self) -> None:
        """Say which call takes too long."""
        for name, begun in list(self._began.items()):
            took_s = time.monotonic() - begun
            if took_s > self.longest_s:
                self.failed(f"a call of {name} takes more than {took_s:.0f} s")

    def failed(self, problem: str) -> None:
        """Note what is wrong, but for what comes of ending a run that failed."""
        if not self.aborted.is_set():
            self.problems.append(problem)

    def _count(self, who: str, start: int, stop: int, took_s: float, scores: ak.Array) -> None:
        wrong = difference(scores, start, stop)
        if wrong:
            self.failed(wrong)
        with self._lock:
            self.rows += int(ak.count(scores.one))
            ended_s = time.monotonic() - self._made_at
            self.longest = max(self.longest, (took_s, f"{who}, which ended at {ended_s:.1f} s"))
