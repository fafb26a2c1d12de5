"""``sonic-coffea scaffold``: the declaration of a served model, to fill in."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from sonic_coffea.cli._options import AsJson, SettingsOf, Url, Version, connected


@connected
def scaffold(
    url: Url,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to declare.")],
    *,
    version: Version = None,
    settings_of: SettingsOf,
    as_json: AsJson = False,
) -> None:
    """Print a declaration that fits a served model; you fill in the names of fields."""
    from sonic_coffea import tools

    settings = settings_of(url)
    made = tools.scaffold(settings, model, version)
    if not as_json:
        typer.echo(made.text, nl=False)
        return
    contract = dataclasses.asdict(made.contract)
    inputs = [{**spec, "layout": made.layouts[spec["name"]]} for spec in contract["inputs"]]
    outputs = [{**spec, "labels": made.labels.get(spec["name"])} for spec in contract["outputs"]]
    described = {
        "url": settings.servers[0],
        **{name: contract[name] for name in ("model", "version", "max_rows")},
        "inputs": inputs,
        "outputs": outputs,
        "declaration": made.text,
    }
    typer.echo(json.dumps(described))
