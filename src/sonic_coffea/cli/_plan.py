"""``sonic-coffea bench`` and ``plan``: measure a served model, and size a facility by it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dask.utils import format_time
from rich.console import Console
from rich.table import Table

from sonic_coffea.cli._options import AsJson, SettingsOf, Url, Version, connected
from sonic_coffea.cli._output import literal, make_place, stdout, usage, writing
from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    from sonic_coffea.tools import Formats


def _finite(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"expected a finite number above 0, got {value:g}")
    return value


@connected
def bench(
    url: Url,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to measure.")],
    *,
    version: Version = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the curve as JSON, for `plan`."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curve: PNG, PDF or SVG.")
    ] = None,
    length: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Length of axes of variable length, such as constituents."
        ),
    ] = 64,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.01, help="Duration of each point.")
    ] = 1.0,
    formats: Annotated[
        bool,
        typer.Option(
            "--formats", help="Also measure what is best for the link, such as compression."
        ),
    ] = False,
    filled: Annotated[
        float | None,
        typer.Option(
            metavar="PART",
            min=0.01,
            max=1.0,
            show_default="0.5",
            help="With --formats: the part of the tensors that is not padding.",
        ),
    ] = None,
    settings_of: SettingsOf,
    as_json: AsJson = False,
) -> None:
    """Measure how a server serves a model: the time of requests, and the greatest rate."""
    from sonic_coffea.reporting.plots import check_name, save
    from sonic_coffea.tools import compare_formats, measure

    if filled is not None and not formats:
        raise typer.BadParameter("it needs --formats", param_hint="--filled")
    settings = settings_of(url)
    # Now, and not when there is a measurement to lose.
    with usage():
        if output is not None:
            make_place(output)
        if plot is not None:
            check_name(plot)
            make_place(plot)
    with Console(stderr=True).status("measuring") as status:
        curve = measure(
            settings, model, version, length=length, seconds=seconds, progress=status.update
        )
        found = (
            compare_formats(
                settings, curve, filled=filled or 0.5, seconds=seconds, progress=status.update
            )
            if formats
            else None
        )
    if output is not None:
        with writing(output):
            curve.save(output)
    if plot is not None:
        with writing(plot):
            save(curve.plot(), plot)
    if as_json:
        typer.echo(json.dumps(asdict(curve) | ({"formats": asdict(found)} if found else {})))
        return
    table = Table("rows", "time, ms", "rows/s")
    for column in table.columns:
        column.justify = "right"
    for rows, took_s in zip(curve.rows, curve.seconds, strict=True):
        table.add_row(f"{rows:,}", f"{took_s * 1e3:.2f}", f"{rows / took_s:,.0f}")
    console = stdout()
    title = literal(f"{curve.model} v{curve.version} on {curve.server}")
    console.print(title, style="italic", soft_wrap=True)
    console.print(table)
    console.print(
        f"saturated with {curve.in_flight} in flight: {curve.rows_per_s:,.0f} rows/s, "
        f"{curve.rows_per_s * curve.row_bytes / 1e6:,.1f} MB/s"
    )
    if found is not None:
        _show(found, console)


def _show(found: Formats, console: Console) -> None:
    """Print the ways to send rows, and which is best."""
    table = Table(title="formats on this link", title_justify="left")
    for column in ("way", "option", "bytes/row", "rows/s", ""):
        table.add_column(column, justify="right" if column.endswith(("row", "/s")) else "left")
    for way in found.ways:
        how = "measured" if way.measured else "estimated by the bytes"
        table.add_row(
            way.name, literal(way.option), f"{way.row_bytes:,.0f}", f"{way.rows_per_s:,.0f}", how
        )
    console.print(table)
    factor = found.server_rows_per_s / found.ways[0].rows_per_s
    if not found.link_limits:
        console.print("no format sends more rows: not the link is the limit, but server or client")
    elif found.best is found.ways[0]:
        console.print(f"the server would score {factor:.1f} times as many rows; no format helps")
    else:
        gain = found.best.rows_per_s / found.ways[0].rows_per_s
        console.print(
            f"the link is the limit, as the server would score {factor:.1f} times as many rows. "
            f"Best: {literal(found.best.option)}, {gain:.1f} times as many"
        )


def plan(
    curve: Annotated[
        Path,
        typer.Argument(metavar="CURVE", exists=True, help="The file that bench --output wrote."),
    ],
    *,
    cores: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of workers with one thread each.")
    ],
    cpu_ms: Annotated[
        float,
        typer.Option(
            metavar="MS", callback=_finite, help="CPU time of an event without inference, in ms."
        ),
    ],
    rows_per_event: Annotated[
        float,
        typer.Option(
            metavar="N", callback=_finite, help="Mean number of scored objects per event."
        ),
    ],
    events: Annotated[
        float,
        typer.Option(
            metavar="N",
            callback=_finite,
            show_default="1e9",
            help="Number of events of the run.",
        ),
    ] = 1e9,
    servers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Number of servers; by default, as many as are needed."
        ),
    ] = None,
    gbps: Annotated[
        float | None,
        typer.Option(metavar="G", callback=_finite, help="Capacity of the network, in Gb/s."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the plan for fewer and more servers: PNG, PDF or SVG."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan how many servers a run needs, with network traffic and bottleneck."""
    from sonic_coffea import tools
    from sonic_coffea.reporting.plots import check_name, save
    from sonic_coffea.tools import Curve

    measured = Curve.load(Path(curve))
    # They are as the file has them, which may be anything.
    points: list[Any] = [measured.rows_per_s, measured.row_bytes, *measured.rows]
    points += measured.seconds
    if not all(isinstance(n, int | float) and 0 < n < math.inf for n in points):
        raise ConfigError(f"expected finite numbers above 0 in the curve {curve}, got {points}")
    with usage():
        if plot is not None:
            check_name(plot)
            make_place(plot)
    numbers: dict[str, Any] = {
        "cores": cores,
        "cpu_s": cpu_ms / 1e3,
        "rows_per_event": rows_per_event,
        "events": events,
        "bytes_per_s": None if gbps is None else gbps * 1e9 / 8,
    }
    planned = tools.plan(measured, servers=servers, **numbers)
    if plot is not None:
        with writing(plot):
            save(tools.plot(planned, measured, **numbers), plot)
    if as_json:
        typer.echo(json.dumps(planned.to_dict()))
        return
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, value in (
        ("servers", f"{planned.servers:,}"),
        ("cores a server", f"{planned.cores / planned.servers:,.0f}"),
        ("utilisation of a server", f"{planned.utilisation:.0%}"),
        ("network, to the servers and back", f"{planned.sent_bytes_per_s * 8 / 1e9:,.3g} Gb/s"),
        ("events/s", f"{planned.events_per_s:,.0f}"),
        ("time to solution", format_time(planned.seconds)),
        ("bottleneck", planned.bottleneck),
        *(
            (f"  capacity of the {name}", f"{rate:,.0f} events/s")
            for name, rate in planned.capacities.items()
        ),
    ):
        table.add_row(label, value)
    if planned.request_s is not None:
        table.add_row("mean time of a request", f"{planned.request_s * 1e3:,.1f} ms")
        table.add_row("requests in flight", f"{planned.in_flight:,.1f}")
    stdout().print(table)
