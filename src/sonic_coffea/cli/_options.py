"""Options that commands share, and how they reach a server."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sonic_coffea.cli._output import usage
from sonic_coffea.errors import ConfigError
from sonic_coffea.pool import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

# Without a metavar, typer shows a flag as if it took a value.
FLAG = ""
AsJson = Annotated[
    bool, typer.Option("--json", metavar=FLAG, help="Print the result as JSON, and nothing else.")
]
Url = Annotated[str, typer.Argument(metavar="URL", help="grpc://host:port, or grpcs:// for TLS.")]
_Pem = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A PEM file, for TLS.")
]
_CONNECTION = {
    "token_file": Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with a bearer token.")
    ],
    "header": Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="A header of each call."),
    ],
    "tls_root": _Pem,
    "tls_cert": _Pem,
    "tls_key": _Pem,
}
SettingsOf = Callable[..., Settings]


def settings_of(
    url: str | Sequence[str],
    token_file: Path | None,
    header: list[str] | None,
    tls_root: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> Settings:
    """Return a server, or several, and how they are connected."""
    named = {}
    for named_value in header or ():
        name, equals, value = named_value.partition("=")
        if not equals:
            raise typer.BadParameter(
                f"expected NAME=VALUE, got {named_value!r}", param_hint="--header"
            )
        named[name] = value
    files = {"tls_root": tls_root, "tls_cert": tls_cert, "tls_key": tls_key}
    pem = {name: str(path) for name, path in files.items() if path is not None}
    with usage():
        return Settings.make(url, token=token_file, headers=named, **pem)


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a connection, in the place of its ``settings_of``.

    What it gets there is `settings_of` with these options, which lacks the servers.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name == "settings_of":
            parameters += [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
                )
                for name, kind in _CONNECTION.items()
            ]
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in _CONNECTION}
        command(settings_of=functools.partial(settings_of, **options), **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def load(path: str, option: str) -> Any:
    """Return what ``MODULE:NAME`` names, of the current folder or of what is installed."""
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
