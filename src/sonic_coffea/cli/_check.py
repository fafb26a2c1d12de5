"""``sonic-coffea check``, ``wake`` and ``models``: try a server, and list its models."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sonic_coffea.cli._options import (
    AsJson,
    Labels,
    SettingsOf,
    Url,
    Version,
    connected,
    load_declared,
)
from sonic_coffea.cli._output import literal, print_table, stdout, tensors
from sonic_coffea.errors import SonicError
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    from sonic_coffea.model import Model
    from sonic_coffea.tools import Checks, Step
    from sonic_coffea.transport import Contract, ModelEntry

_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}


@connected
def check(
    url: Url,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model to try.")] = None,
    *,
    version: Version = None,
    weaver: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, help="Compare MODEL with weaver's preprocess.json."
        ),
    ] = None,
    labels: Labels = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Compare with a YAML file, or with a Model or a processor's models, as "
            "MODULE:NAME.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Try from one worker of each host of this dask scheduler's cluster, such as "
            "tcp://host:8786.",
        ),
    ] = None,
    settings_of: SettingsOf,
    as_json: AsJson = False,
) -> None:
    """Try a server step by step, from its name to an inference, and say what helps."""
    from sonic_coffea import tools

    settings = settings_of(url)
    declared = _declared(model, weaver, labels, against)
    console = Console(quiet=as_json, soft_wrap=True)
    if scheduler is not None:
        from sonic_coffea.dask import check_cluster

        with console.status("trying"):
            checks = check_cluster(scheduler, settings, model, version, declared)
        if as_json:
            typer.echo(json.dumps(checks.to_dict()))
        else:
            stdout().print(_table(checks))
        raise typer.Exit(0 if checks.ok else 1)
    steps: list[Step] = []
    with console.status("trying"):
        for step in tools.check(settings, model, version, declared):
            steps.append(step)
            # As one, since the status takes the place of a line that has not ended.
            detail = literal(step.detail or "not tried", lines=True)
            console.print(_MARKS[step.ok], literal(f"{step.name}: ") + detail)
            if step.remedy:
                console.print(literal(f"  → {step.remedy}"))
    ok = all(step.ok for step in steps)
    if as_json:
        tried = [dataclasses.asdict(step) for step in steps]
        typer.echo(json.dumps({"url": settings.servers[0], "ok": ok, "steps": tried}))
    raise typer.Exit(0 if ok else 1)


def _table(checks: Checks) -> Table:
    table = Table(title="the server, as hosts see it", title_justify="left", show_lines=True)
    for column in checks.header:
        table.add_column(column, overflow="fold")
    for row in checks.rows():
        table.add_row(*(literal(cell, lines=True) for cell in row))
    return table


def _declared(
    model: str | None, weaver: Path | None, labels: Path | None, against: str | None
) -> list[Model]:
    """Return the declarations to compare with."""
    from sonic_coffea.model import Model

    declared: list[Model] = []
    if weaver is not None:
        if model is None:
            raise typer.BadParameter("--weaver needs a MODEL to compare with")
        declared.append(Model.from_weaver(model, weaver, labels=labels))
    elif labels is not None:
        raise typer.BadParameter("--labels belongs to --weaver")
    if against is not None:
        named = load_declared(against, "--against", model)
        models = getattr(named, "models", named)
        models = list(models.values()) if isinstance(models, Mapping) else [models]
        if not all(isinstance(declaration, Model) for declaration in models):
            problem = f"{against} is neither a Model nor has models"
            raise typer.BadParameter(problem, param_hint="--against")
        declared += models
    return declared


@connected
def wake(
    url: Url,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Also wait for this model.")
    ] = None,
    *,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest time to wait.")
    ] = 600.0,
    settings_of: SettingsOf,
    as_json: AsJson = False,
) -> None:
    """Start a service that sleeps, and wait until a server is ready."""
    from sonic_coffea.pool import Pool

    settings = settings_of(url)
    with Pool(settings) as pool:
        seconds = pool.wake(*([model] if model else []), timeout_s=timeout, progress=not as_json)
    if as_json:
        typer.echo(json.dumps({"url": settings.servers[0], "seconds": seconds}))
    else:
        Console(soft_wrap=True).print(
            literal(f"{settings.servers[0]} is ready, after {seconds:.0f} s")
        )


@connected
def models(
    url: Url,
    *,
    settings_of: SettingsOf,
    as_json: AsJson = False,
) -> None:
    """List the models of a server: versions, inputs and outputs."""
    settings = settings_of(url)
    connection = connect_transport(url, options=settings.connection_options())
    listed: list[tuple[ModelEntry, Contract | None]] = []
    with contextlib.closing(connection):
        for entry in connection.models():
            contract = None
            with contextlib.suppress(SonicError):
                contract = connection.contract(entry.name, entry.version or None)
            listed.append((entry, contract))
    if as_json:
        typer.echo(json.dumps([_described(entry, contract) for entry, contract in listed]))
        return
    rows = []
    for entry, contract in listed:
        described = [literal(t) for t in (entry.name, entry.version, entry.reason or entry.state)]
        if contract is not None:
            described += [
                tensors((s.name, s.datatype, s.shape) for s in specs)
                for specs in (contract.inputs, contract.outputs)
            ]
            described.append(literal(str(contract.max_rows or "any")))
        rows.append(described)
    columns = ("model", "version", "state", "inputs", "outputs", "most rows")
    print_table(f"models of {settings.servers[0]}", columns, rows)


def _described(entry: ModelEntry, contract: Contract | None) -> dict[str, Any]:
    described = dataclasses.asdict(entry)
    described = {"model": described.pop("name"), **described}
    if contract is not None:
        of_contract = dataclasses.asdict(contract)
        described |= {name: of_contract[name] for name in ("max_rows", "inputs", "outputs")}
    return described
