"""What all benchmarks share: timing several ways in one run, and showing the results."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from sonic_coffea.reporting import tables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from rich.table import Table

_VERDICTS = {None: "", True: "met", False: "missed"}

PACKAGES = (
    "sonic-coffea",
    "awkward",
    "coffea",
    "distributed",
    "grpcio",
    "numba",
    "numpy",
    "tritonclient",
)


@dataclass
class Result:
    """The time of one way to do something, compared with another way; or another number.

    Attributes
    ----------
    value : float
        The number; of a time, the median seconds of `repeats` calls.
    ratio : float
        The time over that of `against`, measured in the same turns.
    target : str
        The target; empty if the number is only for information.
    """

    name: str
    value: float
    repeats: int = 0
    against: str = ""
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


@dataclass
class Results:
    """The results of one run, on one machine."""

    benchmark: str
    results: list[Result] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        times: Mapping[str, list[float]],
        name: str,
        *,
        called: str = "",
        against: str = "",
        at_most: float | None = None,
        at_least: float | None = None,
        within_s: float | None = None,
    ) -> Result:
        """Add one of the timed ways.

        Parameters
        ----------
        times : mapping
            Of `interleaved`.
        called : str
            Its name in the results; by default its name among the times. Names are unique, because
            later results are compared with these by name.
        against : str
            The way to compare it with.
        at_most, at_least : float, optional
            Target for the ratio; `at_least` says how many times faster it should be.
        within_s : float, optional
            Target for the time.

        Raises
        ------
        ValueError
            If a result has this name already.
        """
        median = statistics.median(times[name])
        ratio = median / statistics.median(times[against]) if against else None
        result = Result(called or name, median, len(times[name]), against, ratio)
        if at_most is not None:
            result.target, result.met = f"≤ {at_most:g} x", result.ratio <= at_most
        if at_least is not None:
            result.target, result.met = f"≥ {at_least:g} x faster", 1 / result.ratio >= at_least
        if within_s is not None:
            result.target, result.met = f"≤ {within_s * 1e6:g} µs", median <= within_s
        return self._append(result)

    def compare(
        self,
        ways: Mapping[str, Callable[[], Any]],
        repeats: int,
        *,
        called: str = "",
        peer: bool = False,
        **target: float,
    ) -> Result:
        """Time a peer and this package's way in turns, in this order, and add the latter.

        Parameters
        ----------
        called, target : str, float
            As of `add`.
        peer : bool
            Whether the time of the peer is added, too.
        """
        first, second = ways
        times = interleaved(ways, repeats, title=called or second)
        if peer:
            self.add(times, first)
        return self.add(times, second, called=called, against=first, **target)

    def note(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Add a number.

        Raises
        ------
        ValueError
            If a result has this name already.
        """
        result = Result(name, float(value))
        if at_least is not None:
            result.target, result.met = f"≥ {at_least:g}", result.value >= at_least
        if at_most is not None:
            result.target, result.met = f"≤ {at_most:g}", result.value <= at_most
        self._append(result)

    def _append(self, result: Result) -> Result:
        if any(other.name == result.name for other in self.results):
            raise ValueError(f"there is a result {result.name!r} already")
        self.results.append(result)
        return result

    def table(self) -> Table:
        """Return the results, for a terminal."""
        rows = []
        for r in self.results:
            value = tables.duration(r.value) if r.repeats else f"{r.value:.3g}"
            ratio = "" if r.ratio is None else f"{r.ratio:.3g}"
            rows.append((r.name, value, ratio, r.against, r.target, _VERDICTS[r.met]))
        header = "", "", "ratio", "to", "target", ""
        return tables.described(self.benchmark, rows, header=header)

    def to_dict(self) -> dict[str, Any]:
        """Return all results, with the machine and the versions of packages."""
        return {
            "benchmark": self.benchmark,
            "results": [asdict(result) for result in self.results],
            **self.numbers,
            "machine": {
                "processor": _processor(),
                "cores": len(os.sched_getaffinity(0)),
                "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
                "system": platform.system(),
                "python": platform.python_version(),
            },
            "packages": {name: version(name) for name in PACKAGES},
        }


def interleaved(
    ways: Mapping[str, Callable[[], Any]], repeats: int, *, title: str = ""
) -> dict[str, list[float]]:
    """Time several ways in turns, so that all of them see the same state of the machine.

    The first call of each is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(title or "measuring", total=repeats + 1)
        gc.collect()
        gc.disable()
        try:
            for turn in range(repeats + 1):
                for name, way in ways.items():
                    start = time.perf_counter()
                    result = way()
                    elapsed = time.perf_counter() - start
                    del result
                    if turn:
                        times[name].append(elapsed)
                progress.advance(task)
        finally:
            gc.enable()
    return times


def common_rates(workers: Sequence[NDArray[np.float64]]) -> list[float]:
    """Return the chunks per second of each worker, while all workers were busy.

    Workers begin and end at different times, and one that is alone has the server to itself. So
    the time from the last begin to the first end counts; of a chunk that is partly outside of it,
    the part inside counts.

    Parameters
    ----------
    workers : sequence of array
        For each worker, two columns: when each chunk began, and when it ended.
    """
    start, stop = max(w[0, 0] for w in workers), min(w[-1, 1] for w in workers)
    parts = [np.diff(np.clip(w, start, stop)) / np.diff(w) for w in workers]
    return [float(part.sum() / (stop - start)) for part in parts]


def peak_bytes(way: Callable[[], Any]) -> int:
    """Return the peak memory of a call, including its result."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        way()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def parser(description: str) -> argparse.ArgumentParser:
    """Return the options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, help="where the results go as JSON")
    options.add_argument("--quick", action="store_true", help="shows that it runs, not how fast")
    return options


def run(doc: str | None, title: str, measure: Callable[..., None]) -> None:
    """Run a benchmark as a command.

    Parameters
    ----------
    doc, title : str
        What it says of itself, and the title of its results.
    measure : callable
        Called with the results, and whether it is to be `quick`.
    """
    options = parser(doc or "").parse_args()
    results = Results(title)
    measure(results, quick=options.quick)
    finish(results, options)


def finish(results: Results, options: argparse.Namespace) -> None:
    """Show the table, and write the file that the options name."""
    Console(width=120).print(results.table())
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(results.to_dict(), indent=1) + "\n"
        options.json.write_text(content, encoding="utf-8")
        print(f"results are in {options.json}", file=sys.stderr)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
