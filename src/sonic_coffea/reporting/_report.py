"""`report`: the requests of a run, where their time went, and advice."""

from __future__ import annotations

import json
import math
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from sonic_coffea import provenance
from sonic_coffea._files import replacing
from sonic_coffea.errors import ConfigError, expect, printable
from sonic_coffea.reporting import _tables as tables
from sonic_coffea.reporting._plots import draw
from sonic_coffea.reporting._tally import STAGES, STATISTICS_KEY, Statistics, Tally, TallyKey
from sonic_coffea.transport import ModelStatistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

Timings = Mapping[TallyKey, ModelStatistics]
"""What servers count themselves, by server, model and version."""

# For servers without statistics.
_UNKNOWN = ModelStatistics(requests=1)


@dataclass(eq=False, repr=False)
class Report:
    """A report on the requests of a run: a table in a terminal and in a notebook.

    Attributes
    ----------
    statistics : Statistics
        The numbers.
    wall_s : float or None
        Duration of the run, for rates; without it, rates are not shown.
    timings : mapping
        The servers' model statistics, by server, model and version, over all clients; if they are
        known.
    date : datetime
        Time at which the report was made.
    """

    statistics: Statistics
    _: KW_ONLY
    wall_s: float | None = None
    timings: Timings = field(default_factory=dict)
    date: datetime = field(default_factory=lambda: datetime.now().astimezone())

    @property
    def title(self) -> str:
        """Which models have scored which datasets."""
        models = sorted({model for (_, model, _), _ in self.statistics})
        title = f"Scores of {_listed(models, 'models')}" if models else "Scores"
        datasets = sorted(self.statistics.datasets)
        return f"{title} for {_listed(datasets, 'datasets')}" if datasets else title

    @property
    def advice(self) -> list[str]:
        """What slows the run down, and the remedies."""
        return list(advise(self.statistics, self.timings))

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and words, for JSON."""
        servers = [
            {"server": server, "model": model, "version": version, **asdict(timings)}
            for (server, model, version), timings in self.timings.items()
        ]
        return {
            "title": self.title,
            "date": self.date.isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "versions": provenance.versions(),
            **self.statistics.to_dict(),
            "wall_s": self.wall_s,
            "servers": servers,
            "advice": self.advice,
        }

    def plot(self) -> Figure:
        """Draw where the time of requests went, and how long they took.

        Raises
        ------
        ConfigError
            If there is no matplotlib.
        """
        return draw(self.statistics)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file: ``.html``, a page without other files, or ``.json``.

        Raises
        ------
        ConfigError
            If the name ends otherwise, the file cannot be written, or a page has requests to plot
            and there is no matplotlib.
        """
        target = Path(path)
        if target.suffix == ".json":
            text = json.dumps(self.to_dict(), indent=2)
        elif target.suffix == ".html":
            made_by = ", ".join(f"{name} {n}" for name, n in provenance.versions().items())
            origin = f"{self.date:%Y-%m-%d %H:%M %Z} on {socket.gethostname()}, {made_by}"
            shown = tables.html(*self._tables(), notes=[*self.advice, origin])
            text = tables.page(self.title, shown, self.plot() if self.statistics.tallies else None)
        else:
            raise ConfigError(f"expected a name that ends in .html or .json, got {target.name}")
        with replacing(target) as half:
            half.write_text(text, encoding="utf-8")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield from self._tables()
        for advice in self.advice:
            yield Text(f"• {advice}", style="yellow")

    def _repr_html_(self) -> str:
        return tables.html(*self._tables(), notes=self.advice)

    def __repr__(self) -> str:
        total = self.statistics.total()
        return f"<Report: {total.rows} rows in {total.requests} requests, {total.retries} retries>"

    def _tables(self) -> Iterator[Table]:
        """Yield the table of all requests, and one with a column for each model and server."""
        s, total, served = self.statistics, self.statistics.total(), sorted(self.statistics)
        rate = total.rows / self.wall_s if self.wall_s else 0
        run = {
            "datasets": [f"{name} ({n:,} events)" for name, n in sorted(s.datasets.items())],
            "chunks": _count(s.chunks),
            "events": _count(s.events),
            "objects scored": f"{s.scored:,} of {s.objects:,}",
            "masked (None)": _count(s.masked),
            "deduplicated": _count(s.deduplicated),
            "cache hits": _count(s.cache_hits),
            "requests": f"{total.requests:,}",
            "rows a request": _count(total.rows / max(total.requests, 1)),
            "duration": tables.duration(self.wall_s) if self.wall_s else "",
            "rows/s": _count(rate),
            "padding": _share(s.padding, s.padding + s.elements),
            "truncated": _share(s.truncated, s.truncated + s.elements),
            "sent, received": f"{decimal(total.sent_bytes)}, {decimal(total.received_bytes)}",
            "retries": f"{total.retries:,}",
        }
        known = [row for row in run.items() if row[1]]
        yield tables.described("Scoring", known, numbers=True)
        if not served:
            return
        header = ["", *([f"{model} v{version}", server] for (server, model, version), _ in served)]
        columns = [_column(tally, self.timings.get(key)) for key, tally in served]
        labels = dict.fromkeys(label for column in columns for label in column)
        rows = [[label, *(column.get(label, "") for column in columns)] for label in labels]
        title = "A request's time, by model and server (mean)"
        yield tables.described(title, rows, header=header, numbers=True)


def report(source: Any, *, wall_s: float | None = None, pool: Any = None) -> Report:
    """Report on a run's output, a pool or a pending call.

    Parameters
    ----------
    source : output of a coffea Runner, Pool, Pending or Statistics
        An output carries its statistics if its processor is a `SonicProcessor` that returns a dict.
        With ``use_result_type``, the runner's ``Ok``, or an ``Err`` with a part of the output.
    wall_s : float, optional
        Duration of the run, for rates.
    pool : Pool, optional
        Pool whose servers are asked for their model statistics; by default `source`, if that is a
        pool.

    Raises
    ------
    ConfigError
        If `source` carries no statistics, or the duration is below 0 or not finite.
    """
    is_duration = wall_s is None or 0 <= wall_s < math.inf
    expect(is_duration, "a finite number of seconds from 0", wall_s, "wall_s")
    pool = source if pool is None else pool
    statistics = _statistics(source).copy()
    timings = pool.timings([key for key, _ in statistics]) if hasattr(pool, "timings") else {}
    return Report(statistics, wall_s=wall_s, timings=timings)


def _statistics(source: Any) -> Statistics:
    """Return the statistics of an output, in whatever coffea has wrapped it, a pool or a call."""
    if isinstance(source, tuple) and source:  # with savemetrics
        return _statistics(source[0])
    if callable(getattr(source, "is_ok", None)):  # coffea's result type
        if source.value is None and not source.is_ok():
            raise ConfigError(f"the run failed, and has no output: {source.exception!r}")
        return _statistics(source.value)
    if isinstance(source, Mapping):
        if {"served", "objects"} <= source.keys():
            return Statistics.from_plain(source)
        for key in (STATISTICS_KEY, "out"):
            if key in source:
                return _statistics(source[key])
    statistics = source if isinstance(source, Statistics) else getattr(source, "statistics", None)
    if not isinstance(statistics, Statistics):
        raise ConfigError(
            f"{type(source).__name__} carries no statistics; expected the output of a Runner "
            "with a SonicProcessor that returns a dict, a pool, or a pending call"
        )
    return statistics


def _column(tally: Tally, timings: ModelStatistics | None) -> dict[str, str]:
    """Return the tally of a model on a server, and the server's statistics of all clients."""
    seconds: dict[str, float] = {}
    for stage, label in STAGES.items() if tally.requests else ():
        seconds[label] = getattr(tally, stage) / tally.requests
        if stage == "trip_s" and tally.has_quantiles:
            seconds |= {"  p50": tally.latency_s(0.5), "  p99": tally.latency_s(0.99)}
    column = {label: tables.duration(took_s) for label, took_s in seconds.items()}
    column |= {name: f"{getattr(tally, name):,}" for name in ("rows", "requests", "retries")}
    if timings is not None:
        requests = max(timings.requests, 1)
        queue_s, work_s = timings.queue_s / requests, timings.work_s / requests
        column["the server says, of all clients: queue"] = tables.duration(queue_s)
        column["  inference"] = tables.duration(work_s)
        column["  mean batch size"] = f"{timings.rows / max(timings.executions, 1):.1f}"
    return column


def _count(number: float) -> str:
    return f"{number:,.0f}" if number else ""


def _listed(names: Sequence[str], noun: str) -> str:
    """Return up to three names, or the number of names."""
    if len(names) > 3:
        return f"{len(names)} {noun}"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def advise(statistics: Statistics, timings: Timings) -> Iterator[str]:
    """Yield what slows a run down, by statistics of its clients and its servers, and the remedy."""
    s, total = statistics, statistics.total()
    padding = _ratio(s.padding, s.padding + s.elements)
    truncated = _ratio(s.truncated, s.truncated + s.elements)
    retried = _ratio(total.retries, total.requests + total.retries)
    rows = _ratio(total.rows, total.requests)
    # The first requests wait for code that is compiled, and for servers that warm up.
    warm = total.requests > 50
    files = Counter((model, version) for model, version, _ in s.digests)
    yield from _that_apply(
        {
            f"{printable(model)} v{printable(version)} had {number} files: it was replaced during "
            "the run, and the result mixes their scores; give each file a version of its own, and "
            "run again": number > 1
            for (model, version), number in sorted(files.items())
        }
    )
    yield from _that_apply(
        {
            f"{s.masked:,} rows are masked (None), as no server scored them: the log says "
            "why; set a longer retry_timeout_s, or a fallback": s.masked,
            f"{padding:.0%} of the elements that are sent are padding: Bucketed sends "
            "rows of like length together, Flat sends none": padding > 0.5,
            f"{truncated:.0%} of the constituents are truncated: compare the "
            "length with that of the network's training": truncated > 0.05,
            f"{retried:.0%} of the requests were sent again: servers are "
            "lost or overloaded; the log says which": retried > 0.01,
            f"a request holds {rows:.0f} rows: larger chunks, or a "
            "larger max_batch_size of the model, spare servers and network": warm and rows < 32,
            "packing and unpacking take longer than the servers: add cores; more servers would not "
            "help": warm and total.pack_s + total.unpack_s > total.trip_s > 0,
        }
    )
    for key, tally in statistics:
        if tally.requests > 50:
            server, model, version = key
            name = printable(f"{model} v{version} on {server}")
            timing = timings.get(key, _UNKNOWN)
            yield from _of_server(name, tally, timing if timing.requests else _UNKNOWN)


def _of_server(model: str, tally: Tally, timings: ModelStatistics) -> Iterator[str]:
    # A time must be twice as long as another to count as the cause of a delay. A request that waits
    # while others are packed does not wait for servers.
    packs = tally.pack_s + tally.unpack_s > tally.trip_s
    waits = tally.wait_s > 2 * tally.trip_s and not packs
    queue_s, work_s = timings.queue_s / timings.requests, timings.work_s / timings.requests
    network_s, server_s = tally.trip_s / tally.requests - queue_s - work_s, queue_s + work_s
    is_slow = waits and timings is _UNKNOWN
    has_empty_queue = waits and queue_s < 0.1 * work_s
    is_saturated = queue_s > 2 * work_s > 0
    is_far = network_s > 2 * server_s > 0
    p50, p99 = tally.latency_s(0.5), tally.latency_s(0.99)
    yield from _that_apply(
        {
            f"requests wait here while {model} has an empty queue: allow more in "
            "flight (max_in_flight, max_in_flight_bytes)": has_empty_queue,
            f"requests for {model} wait there {_ratio(queue_s, work_s):.0f} times as long as their "
            "inference takes: the server is saturated; add instances or servers": is_saturated,
            f"the network takes {_ratio(network_s, server_s):.0f} times as long as {model}: "
            "smaller types (dtype='float16'), Bucketed, or compression send less": is_far,
            f"requests wait here for {model} {_ratio(tally.wait_s, tally.trip_s):.0f} times "
            "as long as their round trip takes: add servers or instances": is_slow,
            f"the p99 of requests for {model} is {_ratio(p99, p50):.0f} times their p50: "
            "hedge_after_s sends slow ones to another server, too": p99 > 10 * p50,
        }
    )


def _that_apply(sentences: Mapping[str, Any]) -> Iterator[str]:
    return (sentence for sentence, applies in sentences.items() if applies)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
