"""The commands, and the options of all of them."""

from __future__ import annotations

import contextlib
import logging
from typing import Annotated

import typer

from sonic_coffea import __version__
from sonic_coffea.cli._analysis import demo, export, score
from sonic_coffea.cli._command import command
from sonic_coffea.cli._machine import build, install, serve, show_models, status
from sonic_coffea.cli._servers import bench, check, models, plan, scaffold

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Score jagged awkward arrays on shared inference servers from coffea and dask.",
)
server = typer.Typer(no_args_is_help=True, help="Install the Triton that local servers run.")
repository = typer.Typer(no_args_is_help=True, help="Build and list model repositories for Triton.")
app.add_typer(server, name="server")
app.add_typer(repository, name="repository")

# A command is registered here, and written in a module of this folder.
for function in (demo, score, export, serve, check, models, scaffold, status, bench, plan):
    app.command()(command(function))
server.command()(command(install))
repository.command()(command(build))
repository.command("show")(command(show_models))


def _show_version(value: bool) -> None:  # noqa: FBT001 - typer calls it so
    if value:
        typer.echo(f"sonic-coffea {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", help="Show the version.", callback=_show_version, metavar="")
_VERBOSE = typer.Option("-v", "--verbose", help="Log more; -vv for debugging.", count=True)


@app.callback()
def _options(
    *, version: Annotated[bool, _VERSION] = False, verbose: Annotated[int, _VERBOSE] = 0
) -> None:
    del version
    logger = logging.getLogger("sonic_coffea")
    handler = _Echo()
    where = " %(name)s" if verbose else ""
    handler.setFormatter(logging.Formatter(f"%(levelname)s{where}: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG))


class _Echo(logging.Handler):
    """Writes to the current standard error, which a progress bar replaces to stay at the bottom."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a full disk, or a pipe that nobody reads
            typer.echo(self.format(record), err=True)
