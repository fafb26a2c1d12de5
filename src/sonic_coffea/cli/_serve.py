"""``sonic-coffea serve`` and ``server install``: a Triton on this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import dask.config
import typer
from rich.console import Console

from sonic_coffea.cli._options import AsJson, Command, Group
from sonic_coffea.cli._output import literal
from sonic_coffea.errors import ServerError, printable

server_app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Install the Triton that local servers run."
)


def serve(
    repository: Annotated[
        Path, typer.Argument(metavar="REPOSITORY", help="A Triton model repository.")
    ],
    *,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port of gRPC; by default, a free port.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads of the models.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="auto, pip, apptainer, singularity, podman or docker; in-process runs onnxruntime "
            "instead of a Triton.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Image of the container: a name, file or folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model repository on loopback, until Ctrl-C or `status --stop`."""
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


@server_app.command(cls=Command)
def install(
    *,
    extras: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="PACKAGE",
            help="Also install a package that models need, such as xgboost; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Install Triton in an environment of its own, so that your packages stay as they are."""
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
