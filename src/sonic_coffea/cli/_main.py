"""The commands, and how they fail: one line on standard error, and an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from sonic_coffea import __version__
from sonic_coffea.cli._check import check, models, scaffold, wake
from sonic_coffea.cli._demo import demo
from sonic_coffea.cli._local import serve, server_app, status
from sonic_coffea.cli._options import flag
from sonic_coffea.cli._output import UsageError
from sonic_coffea.cli._plan import bench, plan
from sonic_coffea.cli._repository import repository_app
from sonic_coffea.cli._score import export, score
from sonic_coffea.errors import SonicError

# A command is registered here, and written in a module of this folder.
COMMANDS: tuple[Callable[..., None], ...] = (
    demo,
    score,
    export,
    serve,
    check,
    models,
    wake,
    scaffold,
    status,
    bench,
    plan,
)
GROUPS = {"server": server_app, "repository": repository_app}


class _Main(TyperGroup):
    """All commands; an error of this package is one message, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (SonicError, ImportError) as error:
            # If an extra would install the missing package, the message names the extra.
            if not isinstance(error, SonicError) and "pip install" not in str(error):
                raise
            Console(stderr=True).print("[bold red]error:[/] ", end="")
            typer.echo(str(error), err=True)
            sys.exit(2 if isinstance(error, UsageError) else 1)


app = typer.Typer(
    cls=_Main,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Score jagged awkward arrays on shared inference servers from coffea and dask.",
)
for command in COMMANDS:
    app.command()(command)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def _show_version(value: bool) -> None:  # noqa: FBT001 - typer calls it so
    if value:
        typer.echo(f"sonic-coffea {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        flag("--version", "Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
    verbose: Annotated[
        int,
        flag(
            "--verbose",
            "Log more; -vv for debugging.",
            "-v",
            count=True,
            show_default=False,
        ),
    ] = 0,
) -> None:
    del version
    logger = logging.getLogger("sonic_coffea")
    handler = _Echo()
    where = " %(name)s" if verbose else ""
    handler.setFormatter(logging.Formatter(f"%(levelname)s{where}: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG))


class _Echo(logging.StreamHandler):  # type: ignore[type-arg]  # none where Python 3.10 runs
    """Writes to the current standard error, which a progress bar replaces to stay at the bottom."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)
