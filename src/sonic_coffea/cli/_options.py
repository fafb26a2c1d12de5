"""Options that commands share, and the plain help of all commands."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from sonic_coffea.cli._output import usage
from sonic_coffea.errors import ConfigError
from sonic_coffea.pool import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Url = Annotated[str, typer.Argument(metavar="URL", help="grpc://host:port, or grpcs:// for TLS.")]
Version = Annotated[
    str | None, typer.Option(metavar="V", help="Version of the model; by default, the latest.")
]

Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Labels of the output, one a line, if weaver's file names none.",
    ),
]


def _file(text: str) -> Any:
    option = typer.Option(metavar="FILE", exists=True, dir_okay=False, help=text)
    return Annotated[Path | None, option]


_CONNECTION = {
    "token_file": _file("File with a bearer token."),
    "header": Annotated[
        list[str] | None,
        typer.Option(
            "--header", metavar="NAME=VALUE", help="Header of each call; may be repeated."
        ),
    ],
    "tls_root": _file("Certificate authorities of the server (PEM)."),
    "tls_cert": _file("Certificate of this client (PEM)."),
    "tls_key": _file("Key of this client's certificate (PEM)."),
}
SettingsOf = Callable[..., Settings]


class _Plain:
    """A command whose help shows no Python types; its metavars say what it wants."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif isinstance(param, TyperArgument):
                # Newer versions of typer show a type beside an argument's metavar.
                vars(param)["display_type_rich"] = lambda ctx: None  # noqa: ARG005
        return params


class Command(_Plain, TyperCommand):
    """A command."""


class Group(_Plain, TyperGroup):
    """Several commands below one name."""


def settings_of(
    url: str | Sequence[str],
    token_file: Path | None,
    header: list[str] | None,
    tls_root: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> Settings:
    """Return a server, or several, and how they are connected."""
    files = {"tls_root": tls_root, "tls_cert": tls_cert, "tls_key": tls_key}
    pem = {name: str(path) for name, path in files.items() if path is not None}
    headers = pairs(header, "NAME=VALUE", "--header", empty=True)
    with usage():
        return Settings.make(url, token=token_file, headers=headers, **pem)


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``settings_of`` with the options of a connection.

    The command gets `settings_of` with these options filled in; it adds the servers.
    """
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name == "settings_of":
            parameters += [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
                )
                for name, kind in _CONNECTION.items()
            ]
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in _CONNECTION}
        command(settings_of=functools.partial(settings_of, **options), **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def pairs(
    texts: Sequence[str] | None, form: str, option: str | None = None, *, empty: bool = False
) -> dict[str, str]:
    """Return the names and values of ``NAME=VALUE``; with `empty`, a value may be empty."""
    named: dict[str, str] = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not (name and separator and (value or empty)):
            raise typer.BadParameter(f"expected {form}, got {text!r}", param_hint=option)
        if name in named:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint=option)
        named[name] = value
    return named


def load(path: str, option: str) -> Any:
    """Return what ``MODULE:NAME`` names; the module is in the current folder, or installed."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise typer.BadParameter(f"expected MODULE:NAME, got {path!r}", param_hint=option)
    sys.path.insert(0, str(Path.cwd()))
    file = module
    try:
        file = getattr(importlib.util.find_spec(module), "origin", None) or module
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's own code raises
        raise ConfigError(f"cannot import {file}: {type(error).__name__}: {error}") from None
    try:
        return getattr(loaded, name)
    except AttributeError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def load_declared(place: str, option: str, model: str | None = None) -> Any:
    """Return the declaration in a YAML file, that of `model` if given, or in a Python module."""
    from sonic_coffea.model import Model

    if Path(place).is_file():
        return Model.from_yaml(place, model)
    if ":" not in place:
        raise typer.BadParameter(
            f"expected a YAML file or MODULE:NAME, got {place!r}", param_hint=option
        )
    return load(place, option)
