"""The rate of a client at one URL, where a real Envoy has several Tritons, some of them in trouble.

The peer is a bare client that sends prebuilt tensors, with the best number of requests in flight,
and resends refused requests at once. Envoy has the settings of SuperSONIC's chart: no health checks
and no retries. The rows are short, and the four accelerators are slower than the two, so that the
machine's two cores do not limit the rate.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerator
import numpy as np
import tritonclient.grpc as triton
from distributed import Client, LocalCluster, as_completed
from harness import Results, finish, parser
from layouts import FIELDS, collection
from matplotlib.figure import Figure
from pool import ROWS, check

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import awkward as ak

ROOT = Path(__file__).parents[1]
LENGTH = 8
# Four accelerators that take 22 ms for a full batch do as much as two of the others.
SLOW, SLOW_ROW_S = "slow", 20e-6
# A model whose queue is soon full: it takes few rows at a time, and 20 ms for them.
QUEUED, QUEUED_ROWS, QUEUED_S, QUEUE = "queued", 8, 0.02, 4
# What a process keeps going: two calls, of some dozen requests each.
THREADS, REQUESTS_A_CALL = 2, 32
IN_FLIGHT = (4, 16)
# Tasks of dask at a time, which share what there is, and the samples that they score. One slow
# accelerator takes 1.5 s for four of them.
TASKS, SAMPLES, REQUESTS_A_TASK = 4, 4, 16
# With --quick, of each kind of trouble the one that two Tritons can have.
QUICK = {
    "1 of 2 dead, LEAST_REQUEST",
    f"a queue of {QUEUE}",
    "1 of 2 hangs, LEAST_REQUEST",
    "dask, 1 of 2 dead",
}
BARE, OURS = "bare clients that resend at once", "sonic-coffea"
HEALTH_CHECK = {
    "timeout": "0.5s",
    "interval": "0.5s",
    "no_traffic_interval": "0.5s",
    "unhealthy_threshold": 1,
    "healthy_threshold": 1,
    "grpc_health_check": {},
}


def model(name: str) -> sonic.Model:
    """Return one of the models."""
    return sonic.Model(name, {"x": sonic.Padded(FIELDS, LENGTH)}, {"y": ["a", "b"]})


def jets_of(rows: int) -> ak.Array:
    """Return what one call scores."""
    return collection(REQUESTS_A_CALL * rows, fields=FIELDS, mean=2)


def fails(scorer: sonic.Model, jets: ak.Array, pool: Pool) -> bool:
    """Whether a call raises; if it does not, its scores are checked."""
    try:
        check(scorer(jets, pool=pool), jets)
    except sonic.errors.SonicError:
        return True
    return False


def bare(url: str, name: str, rows: int, in_flight: int, seconds: float) -> tuple[float, float]:
    """Send prebuilt tensors, and again at once whatever is not answered.

    Returns
    -------
    tuple of float
        Rows per second, and the longest time until a request was answered.
    """
    client = triton.InferenceServerClient(url.removeprefix("grpc://"))
    tensor = triton.InferInput("x", (rows, len(FIELDS), LENGTH), "FP32")
    tensor.set_data_from_numpy(np.zeros((rows, len(FIELDS), LENGTH), np.float32))
    ended = threading.Semaphore(0)
    answers: list[tuple[float, float]] = []
    until = time.perf_counter() + seconds

    def send(begun: float) -> None:
        client.async_infer(name, [tensor], partial(done, begun))

    def done(begun: float, result: Any, error: Any) -> None:
        del result
        now = time.perf_counter()
        if error is None:
            answers.append((now, now - begun))
            begun = now
        if now < until:
            send(begun)
        else:
            ended.release()

    try:
        start = time.perf_counter()
        for _ in range(in_flight):
            send(start)
        for _ in range(in_flight):
            ended.acquire()
    finally:
        client.close()
    rate = rows * sum(at < until for at, _ in answers) / seconds
    return rate, max((took for _, took in answers), default=seconds)


class Load:
    """Calls of some pools, in several threads each, one after the other, while it is entered."""

    def __init__(self, scorer: sonic.Model, jets: ak.Array, pools: Sequence[Pool]) -> None:
        self._scorer, self._jets, self._pools = scorer, jets, pools
        self._over = threading.Event()
        threads = THREADS if len(pools) == 1 else 1
        self._threads = [
            threading.Thread(target=self._run, args=[pool])
            for pool in pools
            for _ in range(threads)
        ]
        self._calls: list[tuple[float, float]] = []
        self.failures: list[Exception] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, pool: Pool) -> None:
        while not self._over.is_set():
            begun = time.perf_counter()
            try:
                self._scorer(self._jets, pool=pool)
            except sonic.errors.SonicError as error:
                self.failures.append(error)
            ended = time.perf_counter()
            self._calls.append((ended, ended - begun))

    def rate(self, seconds: float) -> float:
        """Let it run, and return the rows per second."""
        start, before = time.perf_counter(), self._rows()
        time.sleep(seconds)
        return (self._rows() - before) / (time.perf_counter() - start)

    def longest_s(self, since: float = 0.0) -> float:
        """Return the duration of the longest call that ended since then."""
        return max((took for ended, took in self._calls if ended >= since), default=0.0)

    def _rows(self) -> int:
        return sum(pool.statistics.total().rows for pool in self._pools)


@cache
def jets_of_task(seed: int) -> ak.Array:
    """Return what a task of dask scores."""
    return collection(REQUESTS_A_TASK * ROWS, fields=FIELDS, mean=2, seed=seed)


def score(number: int) -> float:
    """Score what one task of dask scores, and return how long that took."""
    jets = jets_of_task(number % SAMPLES)
    begun = time.perf_counter()
    check(model(SLOW)(jets), jets)
    return time.perf_counter() - begun


class Bed:
    """Tritons, before which Envoys are put.

    Parameters
    ----------
    results : Results
        Where the figures go.
    tritons : sequence
        All there are.
    folder : Path
        Where Envoys keep their files.
    seconds, turns : float and int
        How long each way is measured, and how often.
    settle_s : float
        How long after one has stopped the others' rate is measured.
    chosen : callable
        Whether a case is measured, by its name.
    """

    def __init__(
        self,
        results: Results,
        tritons: Sequence[Any],
        folder: Path,
        seconds: float,
        turns: int,
        *,
        settle_s: float,
        chosen: Callable[[str], bool],
    ) -> None:
        self.results, self.tritons, self.folder = results, tritons, folder
        self.seconds, self.turns, self.settle_s, self.chosen = seconds, turns, settle_s, chosen
        self.rates: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def envoy(self, number: int, **settings: Any) -> Iterator[str]:
        """Run an Envoy before some of the Tritons, all of which run."""
        from tests.network.proxies import Envoy
        from tests.network.tritons import restore

        restore(self.tritons)
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as folder,
            Envoy.before(self.tritons[:number], Path(folder), **settings) as running,
        ):
            yield running.url

    def compare(
        self,
        name: str,
        tritons: int = 2,
        *,
        dead: int = 0,
        clients: int = 1,
        served: str = "accelerator",
        rows: int = ROWS,
        aims: bool = True,
        **settings: Any,
    ) -> None:
        """Compare the rows per second with those of bare clients, in turns.

        Parameters
        ----------
        tritons, dead : int
            How many stand behind the Envoy, and how many of them die once the pool is warm.
        clients : int
            How many pools or bare clients there are.
        served, rows : str and int
            The model, and the rows of its requests.
        aims : bool
            Whether there are targets.
        settings : Any
            Of the Envoy.
        """
        if not self.chosen(name):
            return
        scorer, jets = model(served), jets_of(rows)
        ours: list[float] = []
        peers: dict[int, list[float]] = {n: [] for n in IN_FLIGHT}
        longest, longest_bare, failures = [], [], 0
        with contextlib.ExitStack() as stack:
            url = stack.enter_context(self.envoy(tritons, **settings))
            setting = Settings.make(url, shared_memory=False)
            pools = [stack.enter_context(Pool(setting)) for _ in range(clients)]
            for pool in pools:
                check(scorer(jets, pool=pool), jets)
            for instance in self.tritons[:dead]:
                instance.kill()
            for _ in range(self.turns):
                for number, rates in peers.items():
                    rate, took = self._bare(url, served, rows, number, clients)
                    rates.append(rate)
                    longest_bare.append(took)
                with Load(scorer, jets, pools) as load:
                    ours.append(load.rate(self.seconds))
                longest.append(load.longest_s())
                failures += len(load.failures)
            failures += sum(fails(scorer, jets, pool) for pool in pools)
            retries = sum(pool.statistics.total().retries for pool in pools)
        rate, peer = float(np.median(ours)), max(float(np.median(r)) for r in peers.values())
        self._note(name, rate, peer, max(longest), aims=aims)
        self.results.note(f"{name}: longest request of {BARE}, s", max(longest_bare))
        self.results.note(f"{name}: requests sent again", retries)
        self.results.note(f"{name}: calls that failed", failures, at_most=0)

    def hang(self, name: str, tritons: int, **settings: Any) -> None:
        """Stop one of several Tritons in mid-run, and compare with the share of the others."""
        if not self.chosen(name):
            return
        scorer, jets = model("accelerator"), jets_of(ROWS)
        with (
            self.envoy(tritons, **settings) as url,
            Pool(Settings.make(url, shared_memory=False)) as pool,
        ):
            check(scorer(jets, pool=pool), jets)
            with Load(scorer, jets, [pool]) as load:
                healthy = load.rate(self.seconds)
                self.tritons[0].stop()
                stopped = time.perf_counter()
                time.sleep(self.settle_s)
                after = load.rate(2 * self.seconds)
                self.tritons[0].go_on()
            failures = len(load.failures) + fails(scorer, jets, pool)
        share = healthy * (tritons - 1) / tritons
        self.results.note(f"{name}: rows/s {self.settle_s:g} s later", after)
        self.results.note(f"{name}: the same over the others' share", after / share, at_least=0.8)
        self.results.note(f"{name}: longest call, s", load.longest_s(stopped))
        self.results.note(f"{name}: calls that failed", failures, at_most=0)
        self.rates[name] = {BARE: share, OURS: after}
        print(f"{name}: {after:,.0f} rows/s, the others' share: {share:,.0f}", file=sys.stderr)

    def cluster(self, name: str, tritons: int, **settings: Any) -> None:
        """Compare the tasks of a dask cluster with bare clients, while one Triton is dead."""
        if not self.chosen(name):
            return
        with (
            self.envoy(tritons, **settings) as url,
            LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
            ) as cluster,
            Client(cluster) as client,
            sonic.connect(url, client=client, shared_memory=False),
        ):
            client.gather(client.map(score, range(-4 * SAMPLES, 0)))
            self.tritons[0].kill()
            peer, _ = self._bare(url, SLOW, ROWS, max(IN_FLIGHT), 1)
            took: list[float] = []
            failures, begun = 0, time.perf_counter()
            running = as_completed(client.map(score, range(TASKS)))
            for task in running:
                try:
                    took.append(task.result())
                except sonic.errors.SonicError:
                    failures += 1
                if time.perf_counter() < begun + self.turns * self.seconds:
                    running.add(client.submit(score, TASKS + len(took) + failures))
            rate = len(took) * REQUESTS_A_TASK * ROWS / (time.perf_counter() - begun)
        self._note(name, rate, peer, max(took))
        self.results.note(f"{name}: tasks that failed", failures, at_most=0)

    def _bare(
        self, url: str, served: str, rows: int, in_flight: int, clients: int
    ) -> tuple[float, float]:
        """Run bare clients, and return the rows per second of all, and their longest request."""
        clients = min(clients, in_flight)
        with ThreadPoolExecutor(clients) as executor:
            runs = [
                executor.submit(bare, url, served, rows, in_flight // clients, self.seconds)
                for _ in range(clients)
            ]
            pairs = [run.result() for run in runs]
        return sum(rate for rate, _ in pairs), max(took for _, took in pairs)

    def _note(
        self, name: str, rate: float, peer: float, longest_s: float, *, aims: bool = True
    ) -> None:
        least, most = (0.9, 2.0) if aims else (None, None)
        self.results.note(f"{name}: rows/s", rate)
        self.results.note(f"{name}: rows/s of {BARE}", peer)
        self.results.note(f"{name}: rows/s over those of {BARE}", rate / peer, at_least=least)
        self.results.note(f"{name}: longest call, s", longest_s, at_most=most)
        self.rates[name] = {BARE: peer, OURS: rate}
        print(f"{name}: {rate:,.0f} rows/s, {BARE}: {peer:,.0f}", file=sys.stderr)


def draw(content: dict[str, Any]) -> Figure:
    """Draw the rows per second of both, case by case."""
    rates = content["rows a second"]
    figure = Figure(figsize=(7, 1 + 0.4 * len(rates)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(rates))[::-1]
    for shift, way in ((0.2, BARE), (-0.2, OURS)):
        axes.barh(places + shift, [case[way] for case in rates.values()], height=0.4, label=way)
    axes.set_yticks(places, list(rates))
    axes.set(xlabel="rows a second", xscale="log", xlim=100)
    figure.legend(loc="outside upper right", ncols=2, fontsize="small")
    return figure


def cases(bed: Bed) -> None:
    """Measure each of the troubles."""
    bed.compare("all well")
    bed.compare("all well, 4", 4, served=SLOW)
    for policy in ("LEAST_REQUEST", "ROUND_ROBIN"):
        bed.compare(f"1 of 2 dead, {policy}", 2, dead=1, policy=policy)
        bed.compare(f"1 of 4 dead, {policy}", 4, dead=1, served=SLOW, policy=policy)
    checked = {"health_checks": [HEALTH_CHECK]}
    bed.compare("1 of 2 dead, health checks", dead=1, cluster=checked)
    bed.compare("max_requests: 4", max_requests=4)
    queued = {"served": QUEUED, "rows": QUEUED_ROWS}
    bed.compare(f"a queue of {QUEUE}", 1, **queued)
    # After a refusal, Triton's batcher sleeps for half a second.
    bed.compare(f"8 clients, a queue of {QUEUE}", 1, clients=8, aims=False, **queued)
    for policy in ("LEAST_REQUEST", "ROUND_ROBIN"):
        bed.hang(f"1 of 2 hangs, {policy}", 2, policy=policy)
    bed.cluster("dask, 1 of 2 dead", 2)


def main() -> None:
    """Run it."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--only", default="", help="only cases whose names have this text")
    options = arguments.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.network.tritons import tritons

    # What it says of each failure is not news here.
    logging.getLogger("sonic_coffea").setLevel(logging.ERROR)

    def chosen(name: str) -> bool:
        return name in QUICK if options.quick else options.only in name

    results = Results("Balancer: stand-in accelerators behind the one URL of a real Envoy")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repository = accelerator.write(folder / "repository", length=LENGTH)
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
        number, seconds, turns, settle_s = (2, 0.3, 1, 0.5) if options.quick else (4, 3.0, 3, 5.0)
        with tritons(repository, folder, number) as running:
            bed = Bed(results, running, folder, seconds, turns, settle_s=settle_s, chosen=chosen)
            cases(bed)
        results.numbers["rows a second"] = bed.rates
    finish(results, options, draw)


if __name__ == "__main__":
    main()
