"""``sonic-coffea score``, ``export`` and ``demo``: files of events."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import sonic_coffea as sonic
from sonic_coffea.cli._command import Number
from sonic_coffea.cli._options import Connection, Declared, load, pairs, the_only
from sonic_coffea.cli._output import json_only, show
from sonic_coffea.errors import ConfigError, printable
from sonic_coffea.pool import Settings, install


def files_options(
    files: list[str],
    *,
    output: Path,
    collection: str | None = None,
    features: str | None = None,
    chunksize: Number = 20_000,
) -> dict[str, Any]:
    """Return which objects of which files are scored or exported, and to which file.

    Parameters
    ----------
    files : FILE
        NanoAOD files, or their URLs.
    output : FILE
        The file to write: .parquet, or .root for scores.
    collection : NAME
        Collection, such as FatJet; by default, the events.
    features : FILE.py:NAME
        Function of the events that returns the model's inputs.
    chunksize : N
        Number of events per chunk.
    """
    return {
        "files": files,
        "output": output,
        "collection": collection,
        "features": None if features is None else load(features, "--features"),
        "chunksize": chunksize,
        "progress": not json_only.get(),
    }


Files = Annotated[dict[str, Any], files_options]


def score(
    options: Files,
    *,
    server: list[str] | None = None,
    model: str | None = None,
    version: str | None = None,
    declared: Declared,
    keep: list[str] | None = None,
    workers: Number = 1,
    scheduler: str | None = None,
    mask: bool = False,
    restart: bool = False,
    connection: Connection,
) -> None:
    """Score NanoAOD files: one row for each object, with run, block, event and index.

    Parameters
    ----------
    server : URL
        Server; may be repeated. By default, that of dask's config.
    keep : FIELD
        Also write this field of the objects; may be repeated.
    workers : N
        Number of worker processes on this machine.
    scheduler : ADDRESS
        Run on the dask cluster with this scheduler.
    mask
        Write None for rows that no server scores.
    restart
        Do not resume: score everything again.
    """
    declaration = the_only(declared)
    if isinstance(declaration, sonic.Model):
        declaration.name = model or declaration.name
        declaration.version = version or declaration.version
    elif model or version:
        raise ConfigError("--model and --version are of one Model, not of Folds or a Choice")
    if scheduler is not None and workers > 1:
        raise ConfigError("--workers are of this machine, and --scheduler has its own; choose one")
    settings = Settings.make(server) if server else Settings.from_config()
    if settings is None:
        raise ConfigError("no server is named: expected --server URL")
    settings = settings.with_options(**connection)
    client: Any = None
    with contextlib.ExitStack() as stack:
        pool = install(settings)
        if scheduler is not None or workers > 1:
            client = stack.enter_context(sonic.dask.cluster(workers, scheduler))
            client.sync(sonic.dask.register, client, pool)
        scored = sonic.score_files(
            declaration,
            **options,
            keep=keep or (),
            client=client,
            on_error="mask" if mask else "raise",
            resume=not restart,
        )
    again = f" ({scored.resumed:,} of an earlier run)" if scored.resumed else ""
    summary = (
        f"{scored.scored:,} of {scored.rows:,} rows of {scored.events:,} events{again} have "
        f"scores; they are in {printable(str(scored.path))}"
    )
    show(scored.to_dict(), scored.report, summary)


def export(
    options: Files, *, declared: Declared, label: list[str] | None = None, weight: str | None = None
) -> None:
    """Write training data of NanoAOD files: the tensors exactly as they would be sent.

    Parameters
    ----------
    label : NAME=EXPRESSION
        Also write this, of the objects or the events; repeatable.
    weight : EXPRESSION
        Also write this, as weight.
    """
    labels = pairs(label, "--label NAME=EXPRESSION")
    declaration = the_only(declared)
    rows = sonic.scoring.export_files(declaration, **options, labels=labels, weights=weight)
    path = str(options["output"])
    show({"path": path, "rows": rows}, f"{rows:,} rows are in {printable(path)}")


def demo(
    files: list[Path] | None = None,
    *,
    output: Path = Path("sonic-demo"),
    workers: Number = 2,
    chunksize: Number = 500,
) -> None:
    """Score the large-radius jets of NanoAOD files, with a Triton and a dask cluster it starts.

    Parameters
    ----------
    files : [FILE]
        NanoAOD files, v9 to v15; else a sample.
    output : DIR
        Folder for the results: a new one, or that of an earlier demo.
    workers : N
        Number of worker processes on this machine.
    chunksize : N
        Number of events per chunk.
    """
    how: dict[str, Any] = {"output": output, "workers": workers, "chunksize": chunksize}
    result, report = sonic.demo.run(files or (), **how)
    shown: list[Any] = [report]
    if unscored := result["n_jets"] - result["n_scored"]:
        shown.append(f"{unscored:,} jets have no stored constituents, and so no score (None).")
    if result["area_under_roc"] is not None:
        auc = f"AUC {result['area_under_roc']:.3f} ({result['network']})"
        shown.append(f"Merged top quarks against other jets: {auc}.")
    plots = ", ".join(result["plots"])
    summary = (
        f"{result['n_scored']:,} jets of {result['events']:,} events were scored in "
        f"{result['wall_s']:.1f} s. The scored jets are in {result['jets']}, "
        f"{f'the plots are {plots}' if plots else 'there is nothing to plot'}, the report is "
        f"{Path(result['directory'], 'report.html')}."
    )
    show(result, *shown, printable(summary))
