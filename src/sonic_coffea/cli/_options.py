"""Options that commands share, and the plain help of all commands."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from sonic_coffea.cli._output import UsageError, usage
from sonic_coffea.errors import ConfigError
from sonic_coffea.pool import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sonic_coffea.model import Model


def option(metavar: str, text: str, *names: str, **rules: Any) -> Any:
    """Return an option that help shows with what it takes, not with a type of Python."""
    return typer.Option(*names, metavar=metavar, help=text, **rules)


def flag(name: str, text: str) -> Any:
    """Return an option without a value, and without an opposite if none is named."""
    return typer.Option(name, help=text)


AsJson = Annotated[bool, flag("--json", "Print the result as JSON, and nothing else.")]
Url = Annotated[str, typer.Argument(metavar="URL", help="grpc://host:port, or grpcs:// for TLS.")]
Version = Annotated[str | None, option("V", "Version of the model; by default, the latest.")]
Workers = Annotated[int, option("N", "Number of worker processes on this machine.", min=1)]
Chunksize = Annotated[int, option("N", "Number of events per chunk.", min=1)]
Weaver = Annotated[
    Path | None, option("FILE", "Declaration of the model: weaver's preprocessing.", exists=True)
]
Labels = Annotated[
    Path | None,
    option(
        "FILE",
        "Labels of the output, one a line, if weaver's file names none.",
        exists=True,
        dir_okay=False,
    ),
]
Declaration = Annotated[
    str | None,
    option(
        "PLACE",
        "Declaration of the model: a YAML file, or, as MODULE:NAME, a Model or a processor.",
    ),
]


def _file(text: str) -> Any:
    return Annotated[Path | None, option("FILE", text, exists=True, dir_okay=False)]


_CONNECTION = {
    "token_file": _file("File with a bearer token."),
    "header": Annotated[
        list[str] | None, option("NAME=VALUE", "Header of each call; may be repeated.")
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
    servers: str | Sequence[str] | None, *, header: list[str] | None, **files: Path | None
) -> Settings:
    """Return servers, by default those of dask's configuration, and how they are connected."""
    options: dict[str, Any] = {name: str(path) for name, path in files.items() if path}
    if header:
        options["headers"] = pairs(header, "NAME=VALUE", "--header", empty=True)
    with usage():
        if servers:
            return Settings.make(servers, **options)
        settings = Settings.from_config()
        if settings is None:
            raise UsageError("no server is named: expected --server URL")
        return settings.with_options(**options)


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``settings_of`` with the options of a connection.

    The command gets `settings_of` with these options filled in; it adds the servers.
    """
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    place = parameters.pop("settings_of")
    options = [place.replace(name=n, default=None, annotation=a) for n, a in _CONNECTION.items()]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        connection = {name: given.pop(name) for name in _CONNECTION}
        command(settings_of=functools.partial(settings_of, **connection), **given)

    signature = inspect.Signature([*parameters.values(), *options])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def pairs(
    texts: Sequence[str] | None, form: str, option: str = "", *, empty: bool = False
) -> dict[str, str]:
    """Return the names and values of ``NAME=VALUE``; with `empty`, a value may be empty."""
    named: dict[str, str] = {}
    where = f"{option}: " if option else ""
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not (name and separator and (value or empty)):
            raise UsageError(f"{where}expected {form}, got {text!r}")
        if name in named:
            raise UsageError(f"{where}{name!r} is given twice")
        named[name] = value
    return named


def load(path: str, option: str) -> Any:
    """Return what ``MODULE:NAME`` names; the module is in the current folder, or installed."""
    import cloudpickle

    module, _, name = path.partition(":")
    if not module or not name:
        raise UsageError(f"{option}: expected MODULE:NAME, got {path!r}")
    sys.path.insert(0, str(Path.cwd()))
    file = module
    try:
        file = getattr(importlib.util.find_spec(module), "origin", None) or module
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's own code raises
        raise ConfigError(f"cannot import {file}: {type(error).__name__}: {error}") from None
    # Workers on other machines do not have its file.
    cloudpickle.register_pickle_by_value(loaded)
    try:
        return getattr(loaded, name)
    except AttributeError as error:
        raise UsageError(f"{option}: {error}") from None


def declarations(
    model: str | None,
    version: str | None,
    weaver: Path | None,
    labels: Path | None,
    place: str | None,
    option: str,
) -> list[Model]:
    """Return what weaver's file and a YAML file, or a Python module, declare."""
    from sonic_coffea.model import Model

    if labels is not None and weaver is None:
        raise UsageError("--labels belongs to --weaver; a declaration has labels of its own")
    declared: list[Any] = []
    if weaver is not None:
        if model is None:
            raise UsageError("--weaver needs the name of the model on the server")
        declared.append(Model.from_weaver(model, weaver, version=version, labels=labels))
    if place is None:
        return declared
    if Path(place).is_file():
        return [*declared, Model.from_yaml(place, model)]
    if ":" not in place:
        raise UsageError(f"{option}: expected a YAML file or MODULE:NAME, got {place!r}")
    loaded = load(place, option)
    models = getattr(loaded, "models", loaded)
    declared += models.values() if isinstance(models, Mapping) else [models]
    if not all(isinstance(declaration, Model) for declaration in declared):
        got = type(loaded).__name__
        raise UsageError(f"expected a Model or a processor's models as {option}, got {got}")
    return declared
