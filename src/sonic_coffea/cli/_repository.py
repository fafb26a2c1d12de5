"""``sonic-coffea repository``: build model repositories, and list their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from sonic_coffea.cli._options import AsJson, Command, Group, pairs
from sonic_coffea.cli._output import literal, print_table, tensors
from sonic_coffea.errors import ConfigError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sonic_coffea.server import ModelVersion

repository_app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Build and list model repositories for Triton."
)

Root = Annotated[Path, typer.Argument(metavar="PATH", help="The model repository.")]


@repository_app.command(cls=Command)
def build(
    path: Root,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=FILE",
            help="Models: ONNX (.onnx), TorchScript (.pt), XGBoost (.json, .ubj), LightGBM (.txt), "
            "or FILE.py:FUNCTION.",
        ),
    ],
    *,
    version: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Write this version, and keep all others."),
    ] = None,
    add_version: Annotated[
        bool,
        typer.Option("--add-version", help="Write the version after the latest."),
    ] = False,
    max_batch_size: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Greatest number of rows in a batch; 0: no batching."
        ),
    ] = 1024,
    platform: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="python, onnxruntime or pytorch; by default, onnxruntime for ONNX files.",
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--labels", metavar="NAME=A,B", help="Labels of a model's only output."),
    ] = None,
    declare: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON",
            help="File with what cannot be read from a model file, as "
            '{"NAME": {"inputs": {"x": ["float32", [-1, 8]]}, "outputs": ..., "files": [...]}}.',
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Entry for the manifest; may be repeated."),
    ] = None,
    user: Annotated[
        bool, typer.Option("--user/--no-user", help="Whether the manifest names you.")
    ] = True,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace models, or versions, of the same name."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write models into a repository, and create the repository if it does not exist."""
    from sonic_coffea.server import Served, build_repository, read_repository

    sources = pairs(models, "NAME=FILE")
    declared = {} if declare is None else _declarations(declare, sources)
    build_repository(
        path,
        {name: Served(source, **declared.get(name, {})) for name, source in sources.items()},
        version=version,
        add_version=add_version,
        max_batch_size=max_batch_size,
        platform=platform,  # type: ignore[arg-type]
        labels={name: text.split(",") for name, text in pairs(labels, "NAME=A,B").items()},
        metadata=pairs(metadata, "KEY=VALUE"),
        record_user=user,
        overwrite=overwrite,
    )
    _print([entry for entry in read_repository(path) if entry.model in sources], as_json=as_json)


@repository_app.command(cls=Command)
def show(path: Root, *, as_json: AsJson = False) -> None:
    """List models, versions and tensors, and verify that no file was changed."""
    from sonic_coffea.server import read_repository

    entries = read_repository(path)
    _print(entries, as_json=as_json)
    changes = [change for entry in entries for change in entry.changes]
    if changes:
        typer.echo(printable(f"error: {'; '.join(changes)} since it was built"), err=True)
        raise typer.Exit(1)


def _declarations(path: Path, models: Iterable[str]) -> dict[str, dict[str, Any]]:
    known = {"inputs", "outputs", "files", "max_batch_size", "platform", "warmup"}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        unknown = set(content) - set(models) | {k for v in content.values() for k in set(v) - known}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"expected declarations as JSON in {path}: {error}") from None
    if unknown:
        raise ConfigError(
            f"expected models of this build with {', '.join(sorted(known))} in {path}, "
            f"got {', '.join(map(repr, sorted(unknown)))}"
        )
    return dict(content)


def _print(entries: Sequence[ModelVersion], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([entry.to_dict() for entry in entries]))
        return
    rows = []
    for entry in entries:
        manifest, name = entry.manifest, literal(entry.model)
        if manifest is None:
            unknown = [*["?"] * 4, "no manifest"]
            rows.append([name, Text(str(entry.version)), *map(Text, unknown)])
            continue
        built = f"{manifest['built'][:16].replace('T', ' ')} {manifest.get('user') or ''}".strip()
        rows.append(
            [
                name,
                Text(str(entry.version)),
                literal(manifest["kind"]),
                _tensors(manifest["inputs"]),
                _tensors(manifest["outputs"]),
                literal(built),
                Text(f"{len(entry.changes)} changed" if entry.changes else "as built"),
            ]
        )
    columns = ("model", "version", "kind", "inputs", "outputs", "built", "files")
    print_table("", columns, rows, ["red" if entry.changes else "" for entry in entries])


def _tensors(declared: Sequence[Mapping[str, Any]]) -> Text:
    def shape(first: int, *others: int) -> list[int | str]:
        return ["N" if first < 0 else first, *others]

    return tensors((t["name"], t["dtype"], shape(*t["shape"])) for t in declared)
