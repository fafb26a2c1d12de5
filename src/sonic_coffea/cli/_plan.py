"""``sonic-coffea bench`` and ``plan``: measure a served model, and size a facility by it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sonic_coffea.cli._options import AsJson, ServerSettings, Version, connected, option
from sonic_coffea.cli._output import show, usage, working
from sonic_coffea.reporting import tables


@connected
def bench(
    settings: ServerSettings,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to measure.")],
    *,
    version: Version = None,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "Write the curve as JSON, for `plan`.",
            "--output",
            "-o",
            dir_okay=False,
            writable=True,
        ),
    ] = None,
    length: Annotated[
        int, option("N", "Length of axes of variable length, such as constituents.", min=1)
    ] = 64,
    seconds: Annotated[float, option("SECONDS", "Duration of each point.", min=0.01)] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Measure how a server serves a model: the time of requests, and the greatest rate."""
    from sonic_coffea.tools import measure

    with working("measuring") as progress:
        curve = measure(settings, model, version, length=length, seconds=seconds, progress=progress)
    points = [
        (f"{rows:,}", f"{took_s * 1e3:.2f}", f"{rows / took_s:,.0f}")
        for rows, took_s in zip(curve.rows, curve.seconds, strict=True)
    ]
    title = f"{curve.model} v{curve.version} on {curve.server}"
    show(
        asdict(curve),
        tables.Table(title, points, header=("rows", "time, ms", "rows/s"), numbers=True),
        f"saturated with {curve.in_flight} in flight: {curve.rows_per_s:,.0f} rows/s, "
        f"{curve.rows_per_s * curve.row_bytes / 1e6:,.1f} MB/s",
        as_json=as_json,
    )
    if output is not None:
        curve.save(output)


def plan(
    curve: Annotated[
        Path,
        typer.Argument(metavar="CURVE", exists=True, help="The file that bench --output wrote."),
    ],
    *,
    cores: Annotated[int, option("N", "Number of workers with one thread each.", min=1)],
    cpu_ms: Annotated[float, option("MS", "CPU time of an event without inference, in ms.")],
    rows_per_event: Annotated[float, option("N", "Mean number of scored objects per event.")],
    events: Annotated[float, option("N", "Number of events of the run.", show_default="1e9")] = 1e9,
    servers: Annotated[
        int | None, option("N", "Number of servers; by default, as many as needed.", min=1)
    ] = None,
    gbps: Annotated[float | None, option("G", "Capacity of the network, in Gb/s.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan how many servers a run needs, with network traffic and bottleneck."""
    from sonic_coffea import tools

    measured = tools.Curve.load(curve)
    with usage():
        planned = tools.plan(
            measured,
            cores=cores,
            cpu_s=cpu_ms / 1e3,
            rows_per_event=rows_per_event,
            events=events,
            servers=servers,
            bytes_per_s=None if gbps is None else gbps * 1e9 / 8,
        )
    rows = [
        ("servers", f"{planned.servers:,}"),
        ("cores a server", f"{cores / planned.servers:,.0f}"),
        ("utilisation of a server", f"{planned.utilisation:.0%}"),
        ("network, to the servers and back", f"{planned.sent_bytes_per_s * 8 / 1e9:,.3g} Gb/s"),
        ("events/s", f"{planned.events_per_s:,.0f}"),
        ("time to solution", tables.duration(planned.seconds)),
        ("bottleneck", planned.bottleneck),
    ]
    for name, rate in planned.capacities.items():
        rows.append((f"  capacity of the {name}", f"{rate:,.0f} events/s"))
    show(asdict(planned), tables.Table("", rows), as_json=as_json)
