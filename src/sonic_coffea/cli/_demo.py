"""``sonic-coffea demo``: a whole analysis, with a Triton and workers that it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sonic_coffea.cli._options import AsJson, Chunksize, Workers, option
from sonic_coffea.cli._output import stdout
from sonic_coffea.errors import printable


def demo(
    *,
    file: Annotated[
        list[Path] | None,
        option("FILE", "NanoAOD file, v9 to v15; may be repeated; else a sample.", "--file", "-f"),
    ] = None,
    output: Annotated[Path, option("DIR", "Folder for the results.", "--output", "-o")] = Path(
        "sonic-demo"
    ),
    workers: Workers = 2,
    chunksize: Chunksize = 500,
    as_json: AsJson = False,
) -> None:
    """Score the large-radius jets of NanoAOD files, with a Triton and a dask cluster it starts."""
    from sonic_coffea.demo import run

    result = run(file or (), output=output, workers=workers, chunksize=chunksize)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
        return
    stdout().print(result.report)
    unscored = result.n_jets - result.n_scored
    if unscored:
        typer.echo(f"{unscored:,} jets have no stored constituents, and so no score (None).")
    if result.area_under_roc is not None:
        typer.echo(
            f"Merged top quarks against other jets: AUC {result.area_under_roc:.3f} "
            f"({result.network})."
        )
    plots = ", ".join(map(str, result.plots))
    summary = (
        f"{result.n_scored:,} jets of {result.events:,} events were scored in "
        f"{result.wall_s:.1f} s. The scored jets are in {result.jets}, "
        f"{f'the plots are {plots}' if plots else 'there is nothing to plot'}, the report is "
        f"{result.directory / 'report.html'}."
    )
    typer.echo(printable(summary))
