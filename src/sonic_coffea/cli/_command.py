"""Commands from functions: signatures have arguments and options, docstrings their help."""

from __future__ import annotations

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.console import Console

from sonic_coffea.cli._output import json_only
from sonic_coffea.errors import ConfigError, SonicError

# An annotation has rules of typer, or a function, whose parameters become options of the command.
Number = Annotated[int, {"min": 1}]
OptionalNumber = Annotated[int | None, {"min": 1}]
ExistingFile = Annotated[Path | None, {"exists": True, "dir_okay": False}]

_SHORT = {"output": "-o", "server": "-s"}
_JSON = typer.Option("--json", metavar="", help="Print the result as JSON, and nothing else.")


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function as typer wants it, with the option ``--json``.

    An error of this package is one message on standard error, without a traceback.

    Parameters by position are arguments, and keywords are options. A parameter that is
    ``Annotated`` with a function gets what the function returns, and the command has the parameters
    of that function; a parameter of the same name is one option for both. A docstring describes a
    parameter as ``name : VALUE``, with the help below it.
    """
    own = inspect.signature(function, eval_str=True).parameters
    makers = {name: rule for name, p in own.items() if callable(rule := _hint_and_rule(p)[1])}
    # python -OO leaves docstrings out.
    texts = defaultdict[str, tuple[str, str]](lambda: ("", ""))
    for documented in (*makers.values(), function):
        texts.update(_documented(documented))
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in own.items():
        maker = makers.get(name)
        own_parameters = {name: parameter} if maker is None else _parameters(maker)
        parameters |= {n: _for_typer(own.get(n, p), *texts[n]) for n, p in own_parameters.items()}

    @functools.wraps(function)
    def run(*, as_json: bool, **arguments: Any) -> None:
        json_only.set(as_json)
        try:
            for name, make in makers.items():
                arguments[name] = make(**{n: arguments[n] for n in _parameters(make)})
            function(**{name: arguments[name] for name in own})
        except SonicError as error:
            Console(stderr=True).print("[bold red]error:[/] ", end="")
            typer.echo(str(error), err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None

    parameters["as_json"] = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, _JSON]
    )
    ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
    run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    run.__doc__ = (inspect.getdoc(function) or "").partition("\n\nParameters\n")[0]
    return run


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


def _hint_and_rule(parameter: inspect.Parameter) -> tuple[Any, Any]:
    annotation = parameter.annotation
    is_annotated = get_origin(annotation) is Annotated
    return get_args(annotation) if is_annotated else (annotation, {})


def _for_typer(parameter: inspect.Parameter, metavar: str, text: str) -> inspect.Parameter:
    """Return the parameter, annotated as an argument, or as an option without an opposite."""
    hint, rules = _hint_and_rule(parameter)
    rules = {**rules, "metavar": "" if hint is bool else metavar, "help": text}
    if parameter.kind is not parameter.KEYWORD_ONLY:
        return parameter.replace(annotation=Annotated[hint, typer.Argument(**rules)])
    names = [f"--{parameter.name.rstrip('_').replace('_', '-')}"]
    if parameter.name in _SHORT:
        names.append(_SHORT[parameter.name])
    return parameter.replace(annotation=Annotated[hint, typer.Option(*names, **rules)])


def _documented(function: Callable[..., Any]) -> list[tuple[str, tuple[str, str]]]:
    """Return the names of parameters in a docstring, each with the name of its value and help."""
    form = re.compile(r"^(\w+)(?: : (.+))?\n((?:    .+\n?)+)", re.MULTILINE)
    described = form.findall(inspect.getdoc(function) or "")
    return [(name, (metavar, " ".join(text.split()))) for name, metavar, text in described]
