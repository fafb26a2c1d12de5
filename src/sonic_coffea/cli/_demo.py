"""``sonic-coffea demo``: a whole analysis, with a Triton and workers that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sonic_coffea.cli._options import AsJson, Chunksize, Workers, option
from sonic_coffea.cli._output import show
from sonic_coffea.errors import printable


def demo(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="NanoAOD files, v9 to v15; else a sample."),
    ] = None,
    *,
    output: Annotated[Path, option("DIR", "Folder for the results.", "--output", "-o")] = Path(
        "sonic-demo"
    ),
    workers: Workers = 2,
    chunksize: Chunksize = 500,
    as_json: AsJson = False,
) -> None:
    """Score the large-radius jets of NanoAOD files, with a Triton and a dask cluster it starts."""
    from sonic_coffea.demo import run

    result = run(files or (), output=output, workers=workers, chunksize=chunksize)
    shown: list[Any] = [result.report]
    if unscored := result.n_jets - result.n_scored:
        shown.append(f"{unscored:,} jets have no stored constituents, and so no score (None).")
    if result.area_under_roc is not None:
        auc = f"AUC {result.area_under_roc:.3f} ({result.network})"
        shown.append(f"Merged top quarks against other jets: {auc}.")
    plots = ", ".join(map(str, result.plots))
    summary = (
        f"{result.n_scored:,} jets of {result.events:,} events were scored in "
        f"{result.wall_s:.1f} s. The scored jets are in {result.jets}, "
        f"{f'the plots are {plots}' if plots else 'there is nothing to plot'}, the report is "
        f"{result.directory / 'report.html'}."
    )
    show(result.to_dict(), *shown, printable(summary), as_json=as_json)
