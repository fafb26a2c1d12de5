"""``sonic-coffea check``, ``wake``, ``models`` and ``scaffold``: questions to one server."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sonic_coffea.cli._options import (
    AsJson,
    Declaration,
    Labels,
    ServerSettings,
    ServerSettingsOrFile,
    Version,
    Weaver,
    connected,
    declarations,
    option,
)
from sonic_coffea.cli._output import literal, show, tensors
from sonic_coffea.errors import SonicError
from sonic_coffea.reporting import tables
from sonic_coffea.transport import connect_transport

_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}


@connected
def check(
    settings: ServerSettings,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model to try.")] = None,
    *,
    version: Version = None,
    weaver: Weaver = None,
    labels: Labels = None,
    against: Declaration = None,
    trained_on: Annotated[
        Path | None, option("FILE", "Compare the declaration with that of this training data.")
    ] = None,
    scheduler: Annotated[
        str | None,
        option("ADDRESS", "Try from one worker of each host of this dask scheduler's cluster."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try a server step by step, from its name to an inference, and say what helps."""
    from sonic_coffea import tools

    declared: list[Any] = [
        each
        for one in declarations(model, version, weaver, labels, against, "--against")
        for each in getattr(one, "models", (one,))
    ]
    if trained_on is not None:
        for each in declared:
            each.check_export(trained_on)
    console = Console(quiet=as_json, soft_wrap=True)
    result: dict[str, Any]
    shown = []
    with console.status("trying"):
        if scheduler is not None:
            from sonic_coffea.dask import check_cluster

            checks = check_cluster(scheduler, settings, model, version, declared)
            result = checks.to_dict()
            title = "the server, as hosts see it"
            shown.append(tables.Table(title, [*checks.rows()], checks.header))
        else:
            steps = []
            for step in tools.check(settings, model, version, declared):
                steps.append(step)
                # In a single call, as the status overwrites a line that has not ended.
                detail = literal(step.detail or "not tried", lines=True)
                console.print(_MARKS[step.ok], literal(f"{step.name}: ") + detail)
                if step.remedy:
                    console.print(literal(f"  → {step.remedy}"))
            ok = all(step.ok for step in steps)
            result = {"url": settings.servers[0], "ok": ok, "steps": [*map(asdict, steps)]}
    show(result, *shown, as_json=as_json)
    raise typer.Exit(0 if result["ok"] else 1)


@connected
def wake(
    settings: ServerSettings,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Also wait for this model.")
    ] = None,
    *,
    timeout: Annotated[float, option("SECONDS", "Longest time to wait.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Start a service that sleeps, and wait until a server is ready."""
    from sonic_coffea.pool import Pool

    with Pool(settings) as pool:
        seconds = pool.wake(*([model] if model else []), timeout_s=timeout, progress=not as_json)
    url = settings.servers[0]
    ready = f"{url} is ready, after {seconds:.0f} s"
    show({"url": url, "seconds": seconds}, ready, as_json=as_json)


@connected
def models(settings: ServerSettings, *, as_json: AsJson = False) -> None:
    """List the models of a server: versions, inputs and outputs."""
    options = settings.connection_options()
    described, rows = [], []
    with connect_transport(settings.servers[0], options=options) as connection:
        for entry in connection.models():
            plain = asdict(entry)
            plain = {"model": plain.pop("name"), **plain}
            row: list[Any] = [[entry.name], [entry.version], [entry.reason or entry.state]]
            with contextlib.suppress(SonicError):
                contract = connection.contract(entry.name, entry.version or None)
                specs = asdict(contract)
                plain |= {name: specs[name] for name in ("max_rows", "inputs", "outputs")}
                row += [
                    tensors((s.name, s.datatype, s.shape) for s in side)
                    for side in (contract.inputs, contract.outputs)
                ]
                row.append(str(contract.max_rows or "any"))
            described.append(plain)
            rows.append(row)
    columns = ("model", "version", "state", "inputs", "outputs", "most rows")
    table = tables.Table(f"models of {settings.servers[0]}", rows, columns)
    show(described, table, as_json=as_json)


@connected
def scaffold(
    settings: ServerSettingsOrFile,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The model to declare; a file's is named as it is."),
    ] = None,
    *,
    version: Version = None,
    as_json: AsJson = False,
) -> None:
    """Print a declaration that fits a served model, or a file's; you fill in names of fields."""
    from sonic_coffea import tools

    scaffolded = tools.scaffold(settings, model, version)
    if not as_json:
        typer.echo(scaffolded.text, nl=False)
        return
    contract = asdict(scaffolded.contract)
    for spec in contract["outputs"]:
        spec["labels"] = scaffolded.labels.get(spec["name"])
    names = ("model", "version", "max_rows", "inputs", "outputs")
    described = {"url": scaffolded.server, **{name: contract[name] for name in names}}
    typer.echo(json.dumps({**described, "declaration": scaffolded.text}))
