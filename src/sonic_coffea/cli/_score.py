"""``sonic-coffea score``: one's own files, scored into one file."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonic_coffea.cli._options import (
    FLAG,
    AsJson,
    SettingsOf,
    connected,
    load,
)
from sonic_coffea.cli._output import UsageError, literal, stdout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sonic_coffea.model import Model


@connected
def score(
    *,
    file: Annotated[
        list[str], typer.Option("--file", "-f", metavar="FILE", help="A NanoAOD file, or a URL.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where scores go: .parquet or .root.")
    ],
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server", "-s", metavar="URL", help="By default what dask's configuration names."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, as the server calls it.")] = None,
    version: Annotated[str | None, typer.Option(help="Version of the model.")] = None,
    weaver: Annotated[
        Path | None, typer.Option(exists=True, help="weaver's preprocess.json, as declaration.")
    ] = None,
    declare: Annotated[
        Path | None, typer.Option(exists=True, help="A declaration in YAML.")
    ] = None,
    collection: Annotated[
        str | None, typer.Option(help="Whose objects are scored; by default events.")
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A function of the events: what is sent."),
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="Write this field of objects, too.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes on this machine, if more than this one.")
    ] = 1,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A dask cluster's scheduler.")
    ] = None,
    chunksize: Annotated[int, typer.Option(min=1, help="Events a chunk.")] = 20_000,
    mask: Annotated[
        bool, typer.Option("--mask", metavar=FLAG, help="Rows that no server scores become None.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", metavar=FLAG, help="Forget what an interrupted run has scored."),
    ] = False,
    settings_of: SettingsOf,
    as_json: AsJson = False,
) -> None:
    """Score the objects of NanoAOD files: a row for each, with run, block, event and index."""
    from sonic_coffea.pool import install
    from sonic_coffea.scoring import score_files

    declared = _declared(model, version, weaver, declare)
    function = None
    if features is not None:
        import cloudpickle

        function = load(features, "--features")
        # Workers elsewhere do not have the file that it is in.
        cloudpickle.register_pickle_by_value(sys.modules[features.partition(":")[0]])
    settings = None
    if server:
        settings = settings_of(server)
    with _cluster(workers, scheduler) as client:
        if client is not None:
            from sonic_coffea.dask import register

            client.sync(register, client, settings or _configured())
        elif settings is not None:
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
    model: str | None, version: str | None, weaver: Path | None, declare: Path | None
) -> Model:
    from sonic_coffea.model import Model

    if (weaver is None) == (declare is None):
        raise UsageError("expected either --weaver or --declare, which say what the model takes")
    if weaver is None:
        assert declare is not None  # noqa: S101  one of the two
        declared = Model.from_yaml(declare, model)
        declared.version = version or declared.version
        return declared
    if model is None:
        raise UsageError("--weaver needs --model, the name that the server knows")
    return Model.from_weaver(model, weaver, version=version)


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
