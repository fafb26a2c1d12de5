"""``sonic-coffea serve`` and ``server install``: a Triton on this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import dask.config
import typer
from rich.console import Console

from sonic_coffea.cli._options import AsJson
from sonic_coffea.cli._output import literal
from sonic_coffea.errors import ServerError, printable

server_app = typer.Typer(no_args_is_help=True, help="The real Triton that local servers run.")


def serve(
    repository: Annotated[Path, typer.Argument(help="A Triton model repository.")],
    *,
    port: Annotated[int | None, typer.Option(help="By default a free one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the models.")] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="auto, pip, apptainer, singularity, podman, docker; or in-process: onnxruntime in "
            "place of a Triton."
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="The container's image: a name, a file, a directory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model repository on this machine's loopback, until Ctrl-C or `status --stop`."""
    from sonic_coffea.server import InProcessServer, LocalServer

    errors = Console(stderr=True)
    with errors.status("starting Triton") as status:
        server: LocalServer | InProcessServer
        if (runtime or dask.config.get("sonic.local.runtime", None)) == "in-process":
            server = InProcessServer(repository, threads=threads, port=port)
        else:
            server = LocalServer(
                repository,
                port=port,
                threads=threads,
                runtime=runtime,
                image=image,
                progress=lambda text: status.update(literal(text)),
            )
        server.start()
    with server:
        models = [f"{m.name} v{m.version}" for m in server.metadata.models]
        if as_json:
            typer.echo(json.dumps({"url": server.url, "models": models}))
        else:
            shown = printable(", ".join(models)) or "no model"
            typer.echo(f"{shown} at {server.url}; Ctrl-C stops it")
        if isinstance(server, InProcessServer):
            while True:  # Ctrl-C that is pressed as a wait begins is heard when that ends
                time.sleep(0.2)
        else:
            server.wait()
            if not server.ended_on_request:
                raise ServerError(f"the server ended again and again; its log: {server.log_path}")
            typer.echo(f"{server.url} was stopped on request", err=True)


@server_app.command()
def install(
    *,
    extras: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="PACKAGE", help="Add what models need: xgboost, lightgbm, torch, …"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Install Triton in a place of its own, where it changes no other package."""
    from sonic_coffea.server import ensure

    errors = Console(stderr=True)
    with errors.status("installing Triton") as status:
        installed = ensure(progress=lambda text: status.update(literal(text)), extras=extras or ())
    if as_json:
        extras = list(installed.extras)
        result = {"version": installed.version, "root": str(installed.root), "extras": extras}
        typer.echo(json.dumps(result))
    else:
        added = f" with {', '.join(installed.extras)}" if installed.extras else ""
        typer.echo(printable(f"Triton {installed.version}{added} is in {installed.root}"))
