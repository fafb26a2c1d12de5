"""`report`: the requests of a run, where their time went, and advice."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from sonic_coffea import provenance
from sonic_coffea.errors import ConfigError
from sonic_coffea.reporting import _tables as tables
from sonic_coffea.reporting._advice import advise
from sonic_coffea.reporting._plots import draw
from sonic_coffea.reporting._tally import STAGES, STATISTICS_KEY, Statistics, Tally

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

    from sonic_coffea.transport import ModelStatistics


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
        The servers' model statistics, by server and model, over all clients; if they are known.
    date : datetime
        Time at which the report was made.
    """

    statistics: Statistics
    _: KW_ONLY
    wall_s: float | None = None
    timings: Mapping[tuple[str, str], ModelStatistics] = field(default_factory=dict)
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
            {"server": server, "model": model, **asdict(timings)}
            for (server, model), timings in self.timings.items()
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
        """Draw where the time of requests went, how long they took, and when they were in flight.

        Raises
        ------
        ImportError
            If there is no matplotlib.
        """
        return draw(self.statistics)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file: ``.html``, a page without other files, or ``.json``.

        Raises
        ------
        ConfigError
            If the name ends otherwise.
        """
        target = Path(path)
        if target.suffix == ".json":
            target.write_text(json.dumps(self.to_dict(), indent=2), encoding="utf-8")
        elif target.suffix == ".html":
            plots = draw(self.statistics) if self.statistics.tallies else None
            shown = self._html([self._run_table(), *self._tables()])
            text = tables.page(self.title, shown, plots)
            target.write_text(text, encoding="utf-8")
        else:
            raise ConfigError(f"expected a name that ends in .html or .json, got {target.name}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield from self._tables()
        for advice in self.advice:
            yield Text(f"• {advice}", style="yellow")

    def _repr_html_(self) -> str:
        return self._html(self._tables())

    def __repr__(self) -> str:
        total = self.statistics.total()
        return f"<Report: {total.rows} rows in {total.requests} requests, {total.retries} retries>"

    def _html(self, shown: Iterable[tables.Table]) -> str:
        return "".join(table.html() for table in shown) + tables.notes_below(self.advice)

    def _run_table(self) -> tables.Table:
        """Return when and where the run was."""
        workers = sorted({span.worker for span in self.statistics.spans})
        hosts = sorted({worker.rpartition(":")[0] or worker for worker in workers})
        rows = [
            ("date", f"{self.date:%Y-%m-%d %H:%M %Z}"),
            ("duration", tables.duration(self.wall_s) if self.wall_s else ""),
            ("processes", f"{len(workers)} on {_listed(hosts, 'hosts')}" if workers else ""),
            ("host of this report", socket.gethostname()),
            ("versions", ", ".join(f"{k} {v}" for k, v in provenance.versions().items())),
        ]
        return tables.Table("Run", [row for row in rows if row[1]])

    def _tables(self) -> Iterator[tables.Table]:
        """Yield the table of all requests, and one with a column for each model and server."""
        s, total = self.statistics, self.statistics.total()
        datasets = [f"{name} ({events:,} events)" for name, events in sorted(s.datasets.items())]
        rows = [
            ("datasets", datasets),
            ("chunks", f"{s.chunks:,}" if s.chunks else ""),
            ("events", f"{s.events:,}" if s.events else ""),
            ("objects scored", f"{s.scored:,} of {s.objects:,}"),
            ("masked (None)", f"{s.masked:,}" if s.masked else ""),
            ("deduplicated", f"{s.deduplicated:,}" if s.deduplicated else ""),
            ("cache hits", f"{s.cache_hits:,}" if s.cache_hits else ""),
            ("requests", f"{total.requests:,}"),
            ("rows a request", f"{total.rows / total.requests:.0f}" if total.requests else ""),
            ("rows/s", f"{total.rows / self.wall_s:,.0f}" if self.wall_s else ""),
            ("padding", _share(s.padding, s.padding + s.elements)),
            ("truncated", _share(s.truncated, s.truncated + s.elements)),
            ("sent, received", f"{decimal(total.sent_bytes)}, {decimal(total.received_bytes)}"),
            ("retries", f"{total.retries:,}"),
        ]
        yield tables.Table("Scoring", [row for row in rows if row[1]], numbers=True)
        served = sorted(s)
        if not served:
            return
        header = ["", *([f"{model} v{version}", server] for (server, model, version), _ in served)]
        columns = [
            _column(tally, self.timings.get((server, model)))
            for (server, model, _), tally in served
        ]
        labels = dict.fromkeys(label for column in columns for label in column)
        times = [[label, *(column.get(label, "") for column in columns)] for label in labels]
        yield tables.Table(
            "A request's time, by model and server (mean)",
            [row for row in times if any(row[1:])],
            header=header,
            numbers=True,
        )


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
        If `source` carries no statistics.
    """
    if isinstance(source, tuple) and source:  # with savemetrics
        source = source[0]
    if callable(getattr(source, "is_ok", None)):  # coffea's result type
        if source.value is None and not source.is_ok():
            raise ConfigError(f"the run failed, and has no output: {source.exception!r}")
        source = source.value
    if isinstance(source, Mapping) and "out" in source and STATISTICS_KEY not in source:
        source = source["out"]
    if isinstance(source, Mapping):
        source = source.get(STATISTICS_KEY, source)
    statistics = source if isinstance(source, Statistics) else getattr(source, "statistics", None)
    if isinstance(source, Mapping) and {"served", "spans"} <= source.keys():
        statistics = Statistics.from_plain(source)
    if not isinstance(statistics, Statistics):
        raise ConfigError(
            f"a {type(source).__name__} carries no statistics; expected the output of a Runner "
            "with a SonicProcessor that returns a dict, a pool, or a pending call"
        )
    timings: dict[tuple[str, str], ModelStatistics] = {}
    pool = source if pool is None else pool
    for (server, (model, _)), of_version in getattr(pool, "timings", dict)().items():
        before = timings.get((server, model))
        timings[server, model] = of_version if before is None else before + of_version
    return Report(statistics.copy(), wall_s=wall_s, timings=timings)


def _column(tally: Tally, timings: ModelStatistics | None) -> dict[str, str]:
    """Return the tally of a model on a server, and the server's statistics of all clients."""
    column = {}
    for stage, label in STAGES.items():
        mean_s = getattr(tally, stage) / max(tally.requests, 1)
        column[label] = tables.duration(mean_s) if tally.requests else ""
        if stage == "trip_s":
            for name, quantile in (("  p50", 0.5), ("  p99", 0.99)):
                shown = tables.duration(tally.latency_s(quantile)) if tally.has_quantiles else ""
                column[name] = shown
    column |= {name: f"{getattr(tally, name):,}" for name in ("rows", "requests", "retries")}
    if timings is not None:
        requests = max(timings.requests, 1)
        column["the server says, of all clients: queue"] = tables.duration(
            timings.queue_s / requests
        )
        column["  inference"] = tables.duration(timings.work_s / requests)
        column["  mean batch size"] = f"{timings.rows / max(timings.executions, 1):.1f}"
    return column


def _listed(names: Sequence[str], noun: str) -> str:
    """Return up to three names, or the number of names."""
    if len(names) > 3:
        return f"{len(names)} {noun}"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
