"""The commands, and how they fail: one line on standard error, and an exit code."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Annotated

import dask.config
import typer
from rich.console import Console

from sonic_coffea import __version__
from sonic_coffea.cli._check import check, models
from sonic_coffea.cli._plan import bench, plan
from sonic_coffea.cli._repository import repository_app
from sonic_coffea.cli._status import status
from sonic_coffea.errors import ServerError, SonicError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Score jagged awkward arrays on shared inference servers from coffea and dask.",
)
server_app = typer.Typer(no_args_is_help=True, help="The real Triton that local servers run.")
app.add_typer(server_app, name="server")
app.add_typer(repository_app, name="repository")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]

app.command()(check)
app.command()(models)
app.command()(status)
app.command()(bench)
app.command()(plan)


def _show_version(value: bool) -> None:  # noqa: FBT001 - typer calls it so
    if value:
        typer.echo(f"sonic-coffea {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log more; twice for debugging.")
    ] = 0,
) -> None:
    del version
    level = {0: logging.ERROR, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logger = logging.getLogger("sonic_coffea")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)


@app.command()
def demo(
    *,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Your own NanoAOD file, v9 to v15, MC or data."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where results go.")] = Path(
        "sonic-demo"
    ),
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    chunksize: Annotated[int, typer.Option(min=1, help="Events a chunk.")] = 500,
    as_json: AsJson = False,
) -> None:
    """Score the large-radius jets of NanoAOD files with a Triton and a dask cluster of its own."""
    try:
        from sonic_coffea.demo import run
    except ImportError as error:
        raise typer.BadParameter(
            f"the demo needs {error.name}: pip install 'sonic-coffea[demo]'"
        ) from None
    result = run(file or (), output=output, workers=workers, chunksize=chunksize)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
        return
    console = Console()
    console.print(result.report)
    unscored = result.n_jets - result.n_scored
    if unscored:
        console.print(f"{unscored:,} jets have no stored constituents, and so no score (None).")
    if result.area_under_roc is not None:
        console.print(
            f"Merged top quarks against other jets: AUC {result.area_under_roc:.3f} "
            f"({result.network})."
        )
    plots = ", ".join(_shown(p) for p in result.plots)
    console.print(
        f"{result.n_scored:,} jets of {result.events:,} events were scored in "
        f"{result.wall_s:.1f} s. The scored jets are in {_shown(result.jets)}, "
        f"{f'the plots are {plots}' if plots else 'there is nothing to plot'}, the report is "
        f"{_shown(result.directory / 'report.html')}.",
        soft_wrap=True,
    )


@app.command()
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
                restart=True,
                progress=status.update,
            )
        server.start()
    with server:
        models = [f"{m.name} v{m.version}" for m in server.metadata.models]
        if as_json:
            typer.echo(json.dumps({"url": server.url, "models": models}))
        else:
            typer.echo(f"{', '.join(models) or 'no model'} at {server.url}; Ctrl-C stops it")
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
        installed = ensure(progress=status.update, extras=extras or ())
    if as_json:
        description = {"version": installed.version, "root": str(installed.root)}
        typer.echo(json.dumps({**description, "extras": installed.extras}))
    else:
        added = f" with {', '.join(installed.extras)}" if installed.extras else ""
        typer.echo(f"Triton {installed.version}{added} is in {installed.root}")


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def main() -> None:
    """Run the command line; errors of this package are one message, without a traceback."""
    try:
        app()
    except SonicError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {type(error).__name__}: ", end="")
        typer.echo(str(error), err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
