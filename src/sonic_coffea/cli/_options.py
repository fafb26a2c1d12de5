"""Options that commands share: settings of servers, declarations of models."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonic_coffea.cli._output import UsageError, usage
from sonic_coffea.errors import ConfigError
from sonic_coffea.pool import Settings

if TYPE_CHECKING:
    from sonic_coffea.model import Choice, Model


def option(metavar: str, text: str, *names: str, **rules: Any) -> Any:
    """Return an option that help shows with a name of its value, not with a type of Python."""
    return typer.Option(*names, metavar=metavar, help=text, **rules)


def flag(name: str, text: str, *names: str, **rules: Any) -> Any:
    """Return an option without a value, and without an opposite if none is named."""
    return typer.Option(name, *names, metavar="", help=text, **rules)


def existing(text: str) -> Any:
    """Return an option for a file that is there."""
    return option("FILE", text, exists=True, dir_okay=False)


AsJson = Annotated[bool, flag("--json", "Print the result as JSON, and nothing else.")]
Url = Annotated[str, typer.Argument(metavar="URL", help="grpc://host:port, or grpcs:// for TLS.")]
UrlOrFile = Annotated[
    str, typer.Argument(metavar="URL|FILE", help="A server, or a model file such as tagger.onnx.")
]
Version = Annotated[str | None, option("V", "Version of the model; by default, the latest.")]
Servers = Annotated[
    list[str] | None,
    option("URL", "Server; may be repeated. By default, that of dask's config.", "--server", "-s"),
]
Workers = Annotated[int, option("N", "Number of worker processes on this machine.", min=1)]
Chunksize = Annotated[int, option("N", "Number of events per chunk.", min=1)]
Weaver = Annotated[Path | None, existing("Declaration of the model: weaver's preprocessing.")]
Labels = Annotated[
    Path | None, existing("Labels of the output, one a line, if weaver's file names none.")
]
Declaration = Annotated[
    str | None,
    option("PLACE", "A YAML file, or FILE.py:NAME of a Model, Folds, Choice or processor."),
]
# The type of the first argument of a command that is `connected`.
ServerSettings = Settings
ServerSettingsOrFile = Settings | Path
_CONNECTION = {
    "token_file": Annotated[Path | None, existing("File with a bearer token.")],
    "header": Annotated[
        list[str] | None, option("NAME=VALUE", "Header of each call; may be repeated.")
    ],
    "tls_root": Annotated[Path | None, existing("Certificate authorities of the server (PEM).")],
    "tls_cert": Annotated[Path | None, existing("Certificate of this client (PEM).")],
    "tls_key": Annotated[Path | None, existing("Key of this client's certificate (PEM).")],
}


def settings_of(
    servers: str | Sequence[str] | None, *, header: list[str] | None, **files: Path | None
) -> Settings:
    """Return the settings of servers and connections; by default, dask's configuration has them."""
    options: dict[str, Any] = {name: str(path) for name, path in files.items() if path}
    if header:
        options["headers"] = pairs(header, "--header NAME=VALUE", empty=True, secret=True)
    with usage():
        if servers:
            return Settings.make(servers, **options)
        settings = Settings.from_config()
        if settings is None:
            raise UsageError("no server is named: expected --server URL")
        return settings.with_options(**options)


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``settings`` with the options of a connection.

    They name the server by an argument, or, where ``settings`` is keyword-only, by ``--server``.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.copy()
    place = parameters["settings"]
    if place.kind is place.KEYWORD_ONLY:
        servers = place.replace(name="server", annotation=Servers, default=None)
    else:
        kind = UrlOrFile if place.annotation == ServerSettingsOrFile else Url
        servers = place.replace(name="url", annotation=kind)
    options = [
        inspect.Parameter(name, place.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _CONNECTION.items()
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        connection = {name: arguments.pop(name) for name in _CONNECTION}
        named = arguments.pop(servers.name)
        is_file = servers.annotation == UrlOrFile and Path(named).is_file()
        settings = Path(named) if is_file else settings_of(named, **connection)
        command(settings=settings, **arguments)

    own = [servers if parameter is place else parameter for parameter in parameters.values()]
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
    return run


def pairs(
    texts: Sequence[str] | None, form: str, *, empty: bool = False, secret: bool = False
) -> dict[str, str]:
    """Return the names and values of ``NAME=VALUE``; with `empty`, a value may be empty.

    With `secret`, no error shows a text, in which there may be a token.
    """
    named: dict[str, str] = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        # Of "authorization: Bearer abc==", the token would be taken for a part of the name.
        is_pair = name and separator and (value or empty) and not (secret and ":" in name)
        if not is_pair:
            got = "something else, not shown as it may hold a secret" if secret else repr(text)
            raise UsageError(f"expected {form}, got {got}")
        if name in named:
            raise UsageError(f"{form}: {name!r} is given twice")
        named[name] = value
    return named


def load(place: str, option: str) -> Any:
    """Return an object of ``FILE.py:NAME``, or of ``MODULE:NAME``, installed or in this folder."""
    import cloudpickle

    module, _, name = place.rpartition(":")
    if not module or not name:
        raise UsageError(f"{option}: expected FILE.py:NAME or MODULE:NAME, got {place!r}")
    path = Path(module).absolute()
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise UsageError(f"{option}: no file {module!r}")
    sys.path.insert(0, str(path.parent))
    if is_file:
        module = path.stem
    file = module
    try:
        file = getattr(importlib.util.find_spec(module), "origin", None) or module
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's own code raises
        raise ConfigError(f"cannot import {file}: {type(error).__name__}: {error}") from None
    if is_file and Path(str(loaded.__file__)).resolve() != path.resolve():
        raise UsageError(f"{option}: {path.name} has the name of another module; rename it")
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
) -> list[Model | Choice]:
    """Return the models that weaver's file, and a YAML file or a Python module, declare."""
    from sonic_coffea.model import Choice, Model

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
        raise UsageError(f"{option}: expected a YAML file or FILE.py:NAME, got {place!r}")
    loaded = load(place, option)
    models = loaded if isinstance(loaded, Choice) else getattr(loaded, "models", loaded)
    declared += models.values() if isinstance(models, Mapping) else [models]
    if not all(isinstance(declaration, (Model, Choice)) for declaration in declared):
        got = type(loaded).__name__
        raise UsageError(f"expected a Model or a processor's models as {option}, got {got}")
    return declared
