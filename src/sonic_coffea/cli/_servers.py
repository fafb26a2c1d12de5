"""``sonic-coffea check``, ``models``, ``scaffold``, ``bench`` and ``plan``: a server."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import sonic_coffea as sonic
from sonic_coffea.cli._command import Number, OptionalNumber
from sonic_coffea.cli._options import Connection, Declared
from sonic_coffea.cli._output import json_only, literal, show, tensors, working
from sonic_coffea.errors import ConfigError, SonicError
from sonic_coffea.pool import Settings, declarations_of, open_transport
from sonic_coffea.reporting import tables

_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]"}


def check(
    url: str,
    model: str | None = None,
    *,
    version: str | None = None,
    declared: Declared,
    trained_on: Path | None = None,
    scheduler: str | None = None,
    connection: Connection,
) -> None:
    """Try a server step by step, from its name to an inference, and say what helps.

    Parameters
    ----------
    model : MODEL
        The model to try.
    trained_on : FILE
        Compare the declaration with that of this training data.
    scheduler : ADDRESS
        Try from one worker of each host of this dask scheduler's cluster.
    """
    settings = Settings.make(url, **connection)
    models = declarations_of(*declared)
    if version is not None and model is None:
        raise ConfigError("--version is of the model that is tried: give its name, too")
    if trained_on is not None and not models:
        raise ConfigError("--trained-on compares a declaration: give --declare or --weaver, too")
    for each in models if trained_on is not None else ():
        each.check_export(trained_on)
    console = Console(quiet=json_only.get(), soft_wrap=True)
    with console.status("trying"):
        if scheduler is not None:
            with sonic.dask.cluster(0, scheduler) as client:
                hosts = sonic.dask.check_workers(client, settings, model, version, models)
            checks = sonic.tools.Checks(hosts)
            result = checks.to_dict()
            console.print(checks)
        else:
            steps = []
            for step in sonic.tools.check(settings, model, version, models):
                steps.append(step)
                # In a single call, as the status overwrites a line that has not ended.
                detail = literal(step.detail, lines=True)
                console.print(_MARKS[step.ok], literal(f"{step.name}: ") + detail)
                if step.remedy:
                    console.print(literal(f"  → {step.remedy}"))
            ok = all(step.ok for step in steps)
            result = {"url": settings.servers[0], "ok": ok, "steps": [*map(asdict, steps)]}
    show(result)
    raise typer.Exit(0 if result["ok"] else 1)


def models(url: str, *, connection: Connection) -> None:
    """List the models of a server: versions, inputs and outputs."""
    settings = Settings.of(Settings.make(url, **connection))
    options = settings.connection_options()
    described, rows = [], []
    with open_transport(settings.servers[0], options=options) as server:
        for entry in server.index():
            plain = {"model": entry.name, **entry._asdict()}
            del plain["name"]
            row: list[Any] = [[entry.name], [entry.version], [entry.reason or entry.state]]
            with contextlib.suppress(SonicError):
                contract = asdict(server.metadata(entry.name, entry.version or None))
                plain |= {name: contract[name] for name in ("max_rows", "inputs", "outputs")}
                row += [tensors(contract[side]) for side in ("inputs", "outputs")]
                row.append(str(contract["max_rows"] or "any"))
            described.append(plain)
            rows.append(row)
    columns = ("model", "version", "state", "inputs", "outputs", "most rows")
    show(described, tables.described(f"models of {settings.servers[0]}", rows, header=columns))


def scaffold(
    url: str, model: str | None = None, *, version: str | None = None, connection: Connection
) -> None:
    """Print a declaration that fits a served model, or a file's; you fill in names of fields.

    Parameters
    ----------
    url : URL|FILE
        A server, or a model file such as tagger.onnx.
    model : MODEL
        The model to declare; a file's is named as it is.
    version : V
        Version of the model; by default, the latest.
    """
    source = Path(url) if Path(url).is_file() else Settings.make(url, **connection)
    declaration = sonic.tools.scaffold(source, model, version)
    show({"declaration": declaration}, declaration.removesuffix("\n"))


def bench(
    url: str,
    model: str,
    *,
    version: str | None = None,
    output: Path | None = None,
    length: Number = 64,
    seconds: Annotated[float, {"min": 0.01}] = 1.0,
    connection: Connection,
) -> None:
    """Measure how a server serves a model: the time of requests, and the greatest rate.

    Parameters
    ----------
    model : MODEL
        The model to measure.
    version : V
        Version of the model; by default, the latest.
    output : FILE
        Write the curve as JSON, for `plan`.
    length : N
        Length of axes of variable length, such as constituents.
    seconds : SECONDS
        Duration of each point.
    """
    settings = Settings.make(url, **connection)
    with working("measuring") as progress:
        how: Any = {"length": length, "seconds": seconds, "progress": progress}
        curve = sonic.tools.measure(settings, model, version, **how)
    points = [
        (f"{rows:,}", f"{took_s * 1e3:.2f}", f"{rows / took_s:,.0f}")
        for rows, took_s in zip(curve.rows, curve.seconds, strict=True)
    ]
    title = f"{curve.model} v{curve.version} on {curve.server}"
    show(
        asdict(curve),
        tables.described(title, points, header=("rows", "time, ms", "rows/s"), numbers=True),
        f"saturated with {curve.in_flight} in flight: {curve.rows_per_s:,.0f} rows/s, "
        f"{curve.rows_per_s * curve.row_bytes / 1e6:,.1f} MB/s",
    )
    if output is not None:
        curve.save(output)


def plan(
    curve: Path,
    *,
    cores: Number,
    cpu_ms: float,
    rows_per_event: float,
    events: float = 1e9,
    servers: OptionalNumber = None,
    gbps: float | None = None,
) -> None:
    """Plan how many servers a run needs, with network traffic and bottleneck.

    Parameters
    ----------
    curve : CURVE
        The file that bench --output wrote.
    cores : N
        Number of workers with one thread each.
    cpu_ms : MS
        CPU time of an event without inference, in ms.
    rows_per_event : N
        Mean number of scored objects per event.
    events : N
        Number of events of the run.
    servers : N
        Number of servers; by default, as many as needed.
    gbps : G
        Capacity of the network, in Gb/s.
    """
    planned = sonic.tools.plan(
        sonic.tools.Curve.load(curve),
        cores=cores,
        cpu_s=cpu_ms / 1e3,
        rows_per_event=rows_per_event,
        events=events,
        servers=servers,
        bytes_per_s=None if gbps is None else gbps * 1e9 / 8,
    )
    rows = [
        ("servers", f"{planned.servers:,}"),
        ("cores a server", f"{cores / planned.servers:,.1f}"),
        ("utilisation of a server", f"{planned.utilisation:.0%}"),
        ("network, to the servers and back", f"{planned.sent_bytes_per_s * 8 / 1e9:,.3g} Gb/s"),
        ("events/s", f"{planned.events_per_s:,.1f}"),
        ("time to solution", tables.duration(planned.seconds)),
        ("bottleneck", planned.bottleneck),
    ]
    for name, rate in planned.capacities.items():
        rows.append((f"  capacity of the {name}", f"{rate:,.1f} events/s"))
    show(asdict(planned), tables.described("", rows))
