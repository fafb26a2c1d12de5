"""``sonic-coffea score`` and ``export``: NanoAOD files into one file of scores or tensors."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from sonic_coffea.cli._options import (
    AsJson,
    Chunksize,
    Declaration,
    Labels,
    ServerSettings,
    Version,
    Weaver,
    Workers,
    connected,
    declarations,
    flag,
    load,
    option,
    pairs,
)
from sonic_coffea.cli._output import UsageError, show, usage
from sonic_coffea.errors import printable

Files = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="NanoAOD files, or their URLs.")
]
Collection = Annotated[
    str | None, option("NAME", "Collection, such as FatJet; by default, the events.")
]
Features = Annotated[
    str | None, option("FILE.py:NAME", "Function of the events that returns the model's inputs.")
]


@connected
def score(
    files: Files,
    *,
    output: Annotated[
        Path, option("FILE", "File for the scores: .parquet or .root.", "--output", "-o")
    ],
    settings: ServerSettings,
    model: Annotated[str | None, option("NAME", "Name of the model on the server.")] = None,
    version: Version = None,
    weaver: Weaver = None,
    labels: Labels = None,
    declare: Declaration = None,
    collection: Collection = None,
    features: Features = None,
    keep: Annotated[
        list[str] | None, option("FIELD", "Also write this field of the objects; may be repeated.")
    ] = None,
    workers: Workers = 1,
    scheduler: Annotated[
        str | None, option("ADDRESS", "Run on the dask cluster with this scheduler.")
    ] = None,
    chunksize: Chunksize = 20_000,
    mask: Annotated[bool, flag("--mask", "Write None for rows that no server scores.")] = False,
    restart: Annotated[bool, flag("--restart", "Do not resume: score everything again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score NanoAOD files: one row for each object, with run, block, event and index."""
    from sonic_coffea.model import Model
    from sonic_coffea.pool import install
    from sonic_coffea.scoring import check_output, score_files

    with usage():
        check_output(output)
    if (weaver is None) == (declare is None):
        raise UsageError("expected either --weaver or --declare, which say what the model takes")
    models = declarations(model, version, weaver, labels, declare, "--declare")
    if len(models) != 1:
        raise UsageError(f"expected one Model as --declare, got {len(models)}")
    declared: Any = models[0]
    if isinstance(declared, Model):
        declared.name = model or declared.name
        declared.version = version or declared.version
    elif model or version:
        raise UsageError("--model and --version are of one Model, not of Folds or a Choice")
    function = None if features is None else load(features, "--features")
    if scheduler is not None and workers > 1:
        raise UsageError("--workers are of this machine, and --scheduler has its own; choose one")
    client: Any = None
    with contextlib.ExitStack() as stack:
        if scheduler is None and workers == 1:
            install(settings)
        else:
            from sonic_coffea.dask import cluster, register

            client = stack.enter_context(cluster(workers, scheduler))
            client.sync(register, client, settings)
        scored = score_files(
            declared,
            files,
            output,
            collection=collection,
            features=function,
            keep=keep or (),
            client=client,
            chunksize=chunksize,
            on_error="mask" if mask else "raise",
            resume=not restart,
            progress=not as_json,
        )
    again = f" ({scored.resumed:,} of an earlier run)" if scored.resumed else ""
    summary = (
        f"{scored.scored:,} of {scored.rows:,} rows of {scored.events:,} events{again} have "
        f"scores; they are in {printable(str(scored.path))}"
    )
    show(scored.to_dict(), scored.report, summary, as_json=as_json)


def export(
    files: Files,
    *,
    output: Annotated[Path, option("FILE", "The .parquet file.", "--output", "-o")],
    model: Annotated[str | None, option("NAME", "Name of the model, with --weaver.")] = None,
    weaver: Weaver = None,
    labels: Labels = None,
    declare: Declaration = None,
    collection: Collection = None,
    features: Features = None,
    label: Annotated[
        list[str] | None,
        option("NAME=EXPRESSION", "Also write this, of the objects or the events; repeatable."),
    ] = None,
    weight: Annotated[str | None, option("EXPRESSION", "Also write this, as weight.")] = None,
    chunksize: Chunksize = 20_000,
    as_json: AsJson = False,
) -> None:
    """Write training data of NanoAOD files: the tensors exactly as they would be sent."""
    from sonic_coffea.scoring import export_files

    models: Any = declarations(model, None, weaver, labels, declare, "--declare")
    if len(models) != 1:
        raise UsageError(f"expected one Model as --declare or --weaver, got {len(models)}")
    rows = export_files(
        models[0],
        files,
        output,
        collection=collection,
        features=None if features is None else load(features, "--features"),
        labels=pairs(label, "--label NAME=EXPRESSION"),
        weights=weight,
        chunksize=chunksize,
        progress=not as_json,
    )
    summary = f"{rows:,} rows are in {printable(str(output))}"
    show({"path": str(output), "rows": rows}, summary, as_json=as_json)
