"""``sonic-coffea score``: score NanoAOD files into one file."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonic_coffea.cli._options import (
    AsJson,
    Labels,
    SettingsOf,
    Version,
    connected,
    load,
    load_declared,
)
from sonic_coffea.cli._output import UsageError, literal, stdout, usage
from sonic_coffea.errors import SonicError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sonic_coffea.model import Model


@connected
def score(
    *,
    file: Annotated[
        list[str],
        typer.Option(
            "--file", "-f", metavar="FILE", help="NanoAOD file, or its URL; may be repeated."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File for the scores: .parquet or .root."
        ),
    ],
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            "-s",
            metavar="URL",
            help="Server; may be repeated. By default, the servers in dask's configuration.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model on the server.")
    ] = None,
    version: Version = None,
    weaver: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, help="Declare the model by weaver's preprocess.json."
        ),
    ] = None,
    labels: Labels = None,
    declare: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Declare the model by a YAML file, or by a Model in Python, as MODULE:NAME.",
        ),
    ] = None,
    collection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Collection to score, such as FatJet; by default, the events."
        ),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME", help="Function of the events that returns the model's inputs."
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD", help="Also write this field of the objects; may be repeated."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Number of worker processes on this machine."),
    ] = 1,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the dask cluster with this scheduler."),
    ] = None,
    chunksize: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of events per chunk.")
    ] = 20_000,
    mask: Annotated[
        bool, typer.Option("--mask", help="Write None for rows that no server scores.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Do not resume: score everything again.")
    ] = False,
    settings_of: SettingsOf,
    as_json: AsJson = False,
) -> None:
    """Score NanoAOD files: one row for each object, with run, block, event and index."""
    from sonic_coffea.pool import install
    from sonic_coffea.scoring import check_output, kept_chunks, score_files

    with usage():
        check_output(output)
    declared = _declared(model, version, weaver, labels, declare)
    function = None
    if features is not None:
        function = load(features, "--features")
        _send(features)
    settings = settings_of(server) if server else _configured()
    try:
        with _cluster(workers, scheduler) as client:
            if client is not None:
                from sonic_coffea.dask import register

                client.sync(register, client, settings)
            else:
                install(settings)
            scored = score_files(
                declared,
                file,
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
    except (SonicError, KeyboardInterrupt):
        kept = kept_chunks(output)
        if kept:
            typer.echo(
                f"chunks that are scored: {kept}; the same command scores the others", err=True
            )
        raise
    if as_json:
        typer.echo(json.dumps(scored.to_dict()))
        return
    console = stdout()
    console.print(scored.report)
    again = f" ({scored.resumed:,} of an earlier run)" if scored.resumed else ""
    console.print(
        literal(
            f"{scored.scored:,} of {scored.rows:,} rows of {scored.events:,} events{again} have "
            f"scores; they are in {scored.path}"
        ),
        soft_wrap=True,
    )


def _declared(
    model: str | None,
    version: str | None,
    weaver: Path | None,
    labels: Path | None,
    declare: str | None,
) -> Model:
    from sonic_coffea.model import Model

    if (weaver is None) == (declare is None):
        raise UsageError("expected either --weaver or --declare, which say what the model takes")
    if weaver is None:
        if labels is not None:
            raise UsageError("--labels belongs to --weaver; a declaration has labels of its own")
        assert declare is not None  # noqa: S101  one of the two
        declared = load_declared(declare, "--declare", model)
        if not isinstance(declared, Model):
            raise UsageError(f"expected a Model as --declare, got {type(declared).__name__}")
        if not Path(declare).is_file():
            _send(declare)
        declared.name = model or declared.name
        declared.version = version or declared.version
        return declared
    if model is None:
        raise UsageError("--weaver needs --model, the name that the server knows")
    return Model.from_weaver(model, weaver, version=version, labels=labels)


def _send(place: str) -> None:
    """Pickle a module by value: workers on other machines do not have its file."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[place.partition(":")[0]])


def _configured() -> Any:
    from sonic_coffea.pool import Settings

    settings = Settings.from_config()
    if settings is None:
        raise UsageError("no server is named: expected --server URL")
    return settings


@contextlib.contextmanager
def _cluster(workers: int, scheduler: str | None) -> Iterator[Any]:
    """Yield the client of a cluster; None if this process works alone."""
    if scheduler is None and workers == 1:
        yield None
        return
    from sonic_coffea.dask import cluster

    if scheduler is not None and workers > 1:
        raise UsageError("--workers are of this machine, and --scheduler has its own; choose one")
    with cluster(workers, scheduler) as client:
        yield client
