"""Calls whose scores are known, from threads of this process and from workers of a cluster."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import awkward as ak
import numpy as np
from distributed import Client, as_completed
from tests.chaos.world import MODEL
from tests.scored import random_jets

import sonic_coffea as sonic
from sonic_coffea.errors import CancelledError

LENGTH, EVENTS = 64, 4000
SUMS = sonic.Model(
    MODEL, {"features": sonic.Padded(["pt", "eta"], LENGTH)}, {"scores": ["one", "product"]}
)
# A call that takes longer is wrong.
LONGEST_CALL_S = 60.0


@functools.cache
def jets() -> ak.Array:
    """Return events with jets of some constituents, the same in each process."""
    return random_jets(11, events=EVENTS, constituents=20)


@functools.cache
def expected() -> ak.Array:
    """Return the scores of all jets, computed here."""
    tensor = SUMS.inputs["features"].pack(jets())
    one, two = tensor[:, 0], tensor[:, 1]
    scores = {"one": one.sum(axis=1), "product": (one * two).sum(axis=1)}
    return ak.unflatten(ak.zip(scores), ak.num(jets()))


def difference(scores: ak.Array, start: int, stop: int) -> list[str]:
    """Say how scores of some events differ from those that they should be, if they do."""
    right = expected()[start:stop]
    if ak.num(scores).tolist() != ak.num(right).tolist():
        return [f"events {start} to {stop}: the wrong number of rows"]
    for name in right.fields:
        got, known = (np.asarray(ak.flatten(array[name])) for array in (scores, right))
        wrong = np.flatnonzero(~np.isclose(got, known, rtol=1e-5, atol=1e-5))
        if len(wrong):
            return [f"events {start} to {stop}: {len(wrong)} wrong {name}, row {wrong[0]} first"]
    return []


def score(seed: int, number: int) -> tuple[int, int, float, ak.Array]:
    """Score some events, as a task; return which they are, how long it took, and the scores."""
    start, stop = _events(random.Random(f"{seed} {number}"))
    expected()  # a new worker compiles first
    begun = time.monotonic()
    scores = SUMS(jets()[start:stop])
    return start, stop, time.monotonic() - begun, scores


def _events(chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(EVENTS)
    return start, min(EVENTS, start + chance.choice((1, 10, 100, 1000, 3000)))


@dataclass
class Load:
    """Calls that are made until they shall end, and what came of them.

    Attributes
    ----------
    seed : int
        Which events are scored.
    problems : list of str
        What is wrong; nothing if all is well.
    counts : Counter
        Calls of threads, and those that were cancelled; tasks of workers; rows, retries.
    longest_s : float
        Longest time from a call to its scores.
    over : threading.Event
        When calls shall end.
    """

    seed: int
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, thread: int) -> None:
        """Make calls, one after the other; some are cancelled."""
        chance = random.Random(f"{self.seed} thread {thread}")
        while not self.over.is_set():
            start, stop = _events(chance)
            begun = time.monotonic()
            pending = SUMS.submit(jets()[start:stop])
            if chance.random() < 0.05:
                pending.cancel()
            try:
                scores = pending.result(timeout_s=LONGEST_CALL_S)
            except CancelledError:
                self.counts["cancelled"] += 1
                continue
            except Exception as error:  # noqa: BLE001  no fault may become an error
                self.failed(f"thread {thread}, events {start} to {stop}", error)
                return
            counted, rows = pending.statistics.total().rows, int(ak.count(scores.one))
            if counted != rows:
                self.problems.append(f"events {start} to {stop}: {rows} rows count as {counted}")
            self._take("calls", start, stop, time.monotonic() - begun, scores)

    def compute(self, client: Client) -> None:
        """Have tasks computed by workers, some at a time."""
        number = 6
        tasks = as_completed(
            [client.submit(score, self.seed, n, pure=False) for n in range(number)]
        )
        for task in tasks:
            try:
                self._take("tasks", *task.result())
            except Exception as error:  # noqa: BLE001
                self.failed("a task", error)
                return
            if not self.over.is_set():
                tasks.add(client.submit(score, self.seed, number, pure=False))
                number += 1

    def failed(self, what: object, error: Exception) -> None:
        """Note an error."""
        self.problems.append(f"{what}: {type(error).__name__}: {error}")

    def _take(self, kind: str, start: int, stop: int, took_s: float, scores: ak.Array) -> None:
        self.problems += difference(scores, start, stop)
        with self._lock:
            self.counts.update({kind: 1, "rows": int(ak.count(scores.one))})
            self.longest_s = max(self.longest_s, took_s)
