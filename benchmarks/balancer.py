"""The rate of a client at one URL, where a real Envoy has several Tritons, some of them in trouble.

The peer is a bare client that sends prebuilt tensors, with the best number of requests in flight,
and resends refused requests at once. Envoy has the settings of SuperSONIC's chart: no health checks
and no retries. The rows are short, and the four accelerators are slower than the two, so that the
machine's two cores do not limit the rate.

Notes
-----
After a refusal, Triton's batcher sleeps for half a second, so a refused call takes 2 s. Eight
processes without a common quota are refused more often than the four bare clients, which is the
best number of bare clients. A dask cluster gives its workers quotas.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerator
import numpy as np
from accelerator import FIELDS, collection
from harness import Results, run
from pool import ROWS, check, client_of, input_of

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import awkward as ak

sys.path.insert(0, str(Path(__file__).parents[1]))
LENGTH = 8
# Four accelerators that take 22 ms for a full batch do as much as two of the others.
SLOW, SLOW_ROW_S = "slow", 20e-6
# A model whose queue is soon full: it takes few rows at a time, and 20 ms for them.
QUEUED, QUEUED_ROWS, QUEUED_S, QUEUE = "queued", 8, 0.02, 4
# What a process keeps going: two calls, of some dozen requests each.
THREADS, REQUESTS_A_CALL = 2, 32
IN_FLIGHT = (4, 16)
# With --quick, of each kind of trouble the one that two Tritons can have.
QUICK = {"1 of 2 dead, LEAST_REQUEST", f"a queue of {QUEUE}", "1 of 2 hangs, LEAST_REQUEST"}
BARE, OURS = "bare clients that resend at once", "sonic-coffea"
HEALTH_CHECK = {
    "timeout": "0.5s",
    "interval": "0.5s",
    "no_traffic_interval": "0.5s",
    "unhealthy_threshold": 1,
    "healthy_threshold": 1,
    "grpc_health_check": {},
}


def bare(url: str, name: str, rows: int, in_flight: int, seconds: float) -> float:
    """Send prebuilt tensors, and again at once whatever is not answered; return rows a second."""
    client, inputs = client_of(url), input_of(np.zeros((rows, len(FIELDS), LENGTH), np.float32))
    ended = threading.Semaphore(0)
    answers: list[float] = []
    until = time.perf_counter() + seconds

    def done(result: Any, error: Any) -> None:
        del result
        now = time.perf_counter()
        if error is None and now < until:
            answers.append(now)
        if now < until:
            client.async_infer(name, inputs, done)
        else:
            ended.release()

    with contextlib.closing(client):
        for _ in range(in_flight):
            client.async_infer(name, inputs, done)
        for _ in range(in_flight):
            ended.acquire()
    return rows * len(answers) / seconds


class Ours:
    """Calls of some pools, in several threads each, one after the other."""

    def __init__(self, scorer: sonic.Model, jets: ak.Array, pools: Sequence[Pool]) -> None:
        self._score, self._jets, self._pools = scorer, jets, pools
        self.longest_s, self.failures = 0.0, 0
        for pool in pools:
            self._call(pool)

    def _call(self, pool: Pool) -> None:
        begun = time.perf_counter()
        try:
            check(self._score(self._jets, pool=pool), self._jets)
        except sonic.errors.SonicError:
            self.failures += 1
        self.longest_s = max(self.longest_s, time.perf_counter() - begun)

    def rate(
        self, seconds: float, trouble: Callable[[], None] | None = None, settle_s: float = 0.0
    ) -> float:
        """Return the rows a second, from some time after a trouble on."""
        over = threading.Event()

        def work(pool: Pool) -> None:
            while not over.is_set():
                self._call(pool)

        threads = THREADS if len(self._pools) == 1 else 1
        with ThreadPoolExecutor(threads * len(self._pools)) as executor:
            works = [executor.submit(work, pool) for pool in self._pools for _ in range(threads)]
            if trouble is not None:
                trouble()
            time.sleep(settle_s)
            start, before = time.perf_counter(), self._rows()
            time.sleep(seconds)
            rate = (self._rows() - before) / (time.perf_counter() - start)
            over.set()
        for each in works:
            each.result()
        return rate

    def _rows(self) -> int:
        return sum(pool.statistics.total().rows for pool in self._pools)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What stands behind the Envoy, and what happens to it.

    Attributes
    ----------
    number, dead : int
        How many Tritons there are, and how many of them die once the pools are warm.
    hangs : bool
        Whether one of them hangs in mid-run; the peer is then the share of the others.
    clients : int
        How many pools or bare clients there are.
    served, rows : str and int
        The model, and the rows of its requests.
    aims : bool
        Whether there are targets.
    envoy : dict
        Its settings.
    """

    number: int = 2
    dead: int = 0
    hangs: bool = False
    clients: int = 1
    served: str = "accelerator"
    rows: int = ROWS
    aims: bool = True
    envoy: dict[str, Any] = field(default_factory=dict)


def compare(
    results: Results, name: str, case: Case, tritons: Sequence[Any], seconds: float, turns: int
) -> None:
    """Compare the rows a second with those of bare clients, in turns of some seconds."""
    from tests.network.proxies import Envoy
    from tests.network.tritons import restore

    behind = tritons[: case.number]
    restore(behind)
    scorer = sonic.Model(case.served, {"x": sonic.Padded(FIELDS, LENGTH)}, {"y": ["a", "b"]})
    settle_s = 5 / 3 * seconds
    jets = collection(REQUESTS_A_CALL * case.rows, mean=2)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(Envoy.before(behind, folder, **case.envoy)).url
        setting = Settings.make(url, shared_memory=False)
        pools = [stack.enter_context(Pool(setting)) for _ in range(case.clients)]
        ours = Ours(scorer, jets, pools)
        if case.hangs:
            peer = ours.rate(seconds) * (case.number - 1) / case.number
            rate = ours.rate(2 * seconds, tritons[0].stop, settle_s=settle_s)
            tritons[0].go_on()
        else:
            for instance in tritons[: case.dead]:
                instance.kill()
            rates: dict[Any, list[float]] = {}
            for _ in range(turns):
                for in_flight in IN_FLIGHT:
                    each = min(case.clients, in_flight)
                    send = partial(bare, url, case.served, case.rows, in_flight // each, seconds)
                    with ThreadPoolExecutor(each) as executor:
                        sent = [executor.submit(send) for _ in range(each)]
                    rates.setdefault(in_flight, []).append(sum(one.result() for one in sent))
                rates.setdefault(OURS, []).append(ours.rate(seconds))
            medians = {way: float(np.median(measured)) for way, measured in rates.items()}
            rate, peer = medians.pop(OURS), max(medians.values())
        retries = sum(pool.statistics.total().retries for pool in pools)
    if case.hangs:
        results.note(f"{name}: rows/s {settle_s:g} s later", rate)
        results.note(f"{name}: the same over the others' share", rate / peer, at_least=0.8)
    else:
        least = 0.9 if case.aims else None
        results.note(f"{name}: rows/s", rate)
        results.note(f"{name}: rows/s of {BARE}", peer)
        results.note(f"{name}: rows/s over those of {BARE}", rate / peer, at_least=least)
        results.note(f"{name}: requests sent again", retries)
    most = 2.0 if case.aims and not case.hangs else None
    results.note(f"{name}: longest call, s", ours.longest_s, at_most=most)
    results.note(f"{name}: calls that failed", ours.failures, at_most=0)
    results.numbers.setdefault("rows a second", {})[name] = {BARE: peer, OURS: rate}
    print(f"{name}: {rate:,.0f} rows/s, {BARE}: {peer:,.0f}", file=sys.stderr)


def cases() -> dict[str, Case]:
    """Return each of the troubles, by its name."""
    four: dict[str, Any] = {"number": 4, "served": SLOW}
    two: dict[str, Any] = {"number": 2}
    queued: dict[str, Any] = {"number": 1, "served": QUEUED, "rows": QUEUED_ROWS}
    table = {"all well": Case(), "all well, 4": Case(**four)}
    for policy in ("LEAST_REQUEST", "ROUND_ROBIN"):
        for behind in (two, four):
            named = f"1 of {behind['number']} dead, {policy}"
            table[named] = Case(**behind, dead=1, envoy={"policy": policy})
    checked = {"cluster": {"health_checks": [HEALTH_CHECK]}}
    table["1 of 2 dead, health checks"] = Case(dead=1, envoy=checked)
    table["max_requests: 4"] = Case(envoy={"max_requests": 4})
    table[f"a queue of {QUEUE}"] = Case(**queued)
    # After a refusal, Triton's batcher sleeps for half a second.
    table[f"8 clients, a queue of {QUEUE}"] = Case(**queued, clients=8, aims=False)
    for policy in ("LEAST_REQUEST", "ROUND_ROBIN"):
        table[f"1 of 2 hangs, {policy}"] = Case(hangs=True, envoy={"policy": policy})
    return table


def measure(results: Results, *, quick: bool) -> None:
    """Measure each of the troubles."""
    from tests.network.tritons import tritons

    # What it says of each failure is not news here.
    logging.getLogger("sonic_coffea").setLevel(logging.ERROR)
    number, seconds, turns = (2, 0.3, 1) if quick else (4, 3.0, 3)
    with tempfile.TemporaryDirectory() as name:
        repository = accelerator.write(Path(name) / "repository", length=LENGTH)
        accelerator.write(repository, name=SLOW, row_s=SLOW_ROW_S, length=LENGTH)
        accelerator.write(
            repository,
            name=QUEUED,
            launch_s=QUEUED_S,
            row_s=0.0,
            max_rows=QUEUED_ROWS,
            length=LENGTH,
            max_queue_size=QUEUE,
        )
        with tritons(repository, Path(name), number) as running:
            for named, case in cases().items():
                if named in QUICK or not quick:
                    compare(results, named, case, running, seconds, turns)


if __name__ == "__main__":
    title = "Balancer: stand-in accelerators behind the one URL of a real Envoy"
    run(__doc__, title, measure)
