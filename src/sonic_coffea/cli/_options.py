"""Options that commands share: settings of servers, declarations of models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import sonic_coffea as sonic
from sonic_coffea.cli._command import ExistingFile
from sonic_coffea.errors import ConfigError, expect


def connection_options(
    *,
    token_file: ExistingFile = None,
    header: list[str] | None = None,
    tls_root: ExistingFile = None,
    tls_cert: ExistingFile = None,
    tls_key: ExistingFile = None,
) -> dict[str, Any]:
    """Return the options of connections to servers, as `Settings` takes them.

    Parameters
    ----------
    url : URL
        grpc://host:port, or grpcs:// for TLS.
    token_file : FILE
        File with a bearer token.
    header : NAME=VALUE
        Header of each call; may be repeated.
    tls_root : FILE
        Certificate authorities of the server (PEM).
    tls_cert : FILE
        Certificate of this client (PEM).
    tls_key : FILE
        Key of this client's certificate (PEM).
    """
    tls = {"tls_root": tls_root, "tls_cert": tls_cert, "tls_key": tls_key}
    files = {"token_file": token_file, **tls}
    options: dict[str, Any] = {name: str(path) for name, path in files.items() if path}
    if header:
        options["headers"] = pairs(header, "--header NAME=VALUE", secret=True)
    return options


def pairs(texts: Sequence[str] | None, form: str, *, secret: bool = False) -> dict[str, str]:
    """Return the names and values of ``NAME=VALUE``.

    A secret value may be empty, and errors do not show it.
    """
    named: dict[str, str] = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        # In "authorization: Bearer abc==", the text before the first = has most of the token.
        if not (name and separator and (value or secret)) or ":" in name:
            got = "something else, which may hold a secret" if secret else repr(text)
            raise ConfigError(f"expected {form}, got {got}")
        if name in named:
            raise ConfigError(f"{form}: {name!r} is given twice")
        named[name] = value
    return named


def load(place: str, option: str) -> Any:
    """Return an object of ``FILE.py:NAME``, or of ``MODULE:NAME``, installed or in this folder."""
    import cloudpickle

    module, _, name = place.rpartition(":")
    expect(module and name, "FILE.py:NAME or MODULE:NAME", place, option)
    path = Path(module).absolute()
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ConfigError(f"{option}: no file {module!r}")
    sys.path.insert(0, str(path.parent))
    try:
        loaded = importlib.import_module(path.stem if is_file else module)
        value = getattr(loaded, name)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's own code raises
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{option}: cannot import {place}: {problem}") from None
    if is_file and Path(str(loaded.__file__)).resolve() != path.resolve():
        raise ConfigError(f"{option}: {path.name} has the name of another module; rename it")
    # Workers on other machines do not have its file.
    cloudpickle.register_pickle_by_value(loaded)
    return value


def declarations(
    *,
    model: str | None = None,
    version: str | None = None,
    weaver: ExistingFile = None,
    labels: ExistingFile = None,
    declare: str | None = None,
) -> list[Any]:
    """Return the models that weaver's file, a YAML file or a Python module declares.

    Parameters
    ----------
    model : NAME
        Name of the model on the server.
    version : V
        Version of the model; by default, the latest.
    weaver : FILE
        Declaration of the model: weaver's preprocessing.
    labels : FILE
        Labels of the output, one a line, if weaver's file names none.
    declare : PLACE
        A YAML file, or FILE.py:NAME of a Model, Folds, Choice or processor.
    """
    if weaver is not None and declare is not None:
        raise ConfigError("expected either --weaver or --declare, got both")
    if labels is not None and weaver is None:
        raise ConfigError("--labels belongs to --weaver; a declaration has labels of its own")
    if weaver is not None:
        if model is None:
            raise ConfigError("--weaver needs the name of the model on the server")
        return [sonic.Model.from_weaver(model, weaver, version=version, labels=labels)]
    if declare is None:
        return []
    if Path(declare).is_file():
        return [sonic.Model.from_yaml(declare, model)]
    expect(":" in declare, "a YAML file or FILE.py:NAME", declare, "--declare")
    loaded = load(declare, "--declare")
    models = loaded if isinstance(loaded, sonic.Choice) else getattr(loaded, "models", loaded)
    declared = [*models.values()] if isinstance(models, Mapping) else [models]
    are_models = all(
        isinstance(declaration, (sonic.Model, sonic.Choice)) for declaration in declared
    )
    expect(are_models, "a Model or a processor's models", type(loaded).__name__, "--declare")
    return declared


def the_only(declared: Sequence[Any]) -> Any:
    """Return a single declaration; none, or several, are an error."""
    if len(declared) != 1:
        raise ConfigError(
            "expected one Model, by either --weaver or --declare, which say what it takes; "
            f"got {len(declared)}"
        )
    return declared[0]


Connection = Annotated[dict[str, Any], connection_options]
Declared = Annotated[list[Any], declarations]
