"""``sonic-coffea repository``: build model repositories, and list their models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonic_coffea.cli._options import AsJson, flag, option, pairs
from sonic_coffea.cli._output import show, tensors
from sonic_coffea.errors import ConfigError, printable
from sonic_coffea.reporting import tables

if TYPE_CHECKING:
    from sonic_coffea.server import ModelVersion, Served

repository_app = typer.Typer(
    no_args_is_help=True, help="Build and list model repositories for Triton."
)

Root = Annotated[Path, typer.Argument(metavar="PATH", help="The model repository.")]


@repository_app.command()
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
        str | None,
        option("N|next", "Write this version, or the one after the latest; keep all others."),
    ] = None,
    max_batch_size: Annotated[
        int | None, option("N", "Greatest number of rows in a batch; 0: no batching.", min=0)
    ] = None,
    platform: Annotated[
        str | None,
        option("NAME", "python, onnxruntime or pytorch; by default, onnxruntime for ONNX."),
    ] = None,
    labels: Annotated[
        list[str] | None, option("NAME=A,B", "Labels of a model's only output.")
    ] = None,
    declare: Annotated[
        Path | None,
        option(
            "JSON",
            "File with what cannot be read from a model file, as "
            '{"NAME": {"inputs": {"x": ["float32", [-1, 8]]}, "outputs": ..., "files": [...]}}.',
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None, option("KEY=VALUE", "Entry for the manifest; may be repeated.")
    ] = None,
    user: Annotated[bool, flag("--user/--no-user", "Whether the manifest names you.")] = True,
    overwrite: Annotated[
        bool, flag("--overwrite", "Replace models, or versions, of the same name.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write models into a repository, and create the repository if it does not exist."""
    from sonic_coffea.server import build_repository, read_repository

    sources = pairs(models, "NAME=FILE")
    build_repository(
        path,
        _served(sources, declare),
        version=int(version) if version and version.isdigit() else version,  # type: ignore[arg-type]
        max_batch_size=max_batch_size,
        platform=platform,  # type: ignore[arg-type]
        labels={name: text.split(",") for name, text in pairs(labels, "NAME=A,B").items()},
        metadata=pairs(metadata, "KEY=VALUE"),
        record_user=user,
        overwrite=overwrite,
    )
    _show([entry for entry in read_repository(path) if entry.model in sources], as_json=as_json)


@repository_app.command("show")
def show_models(path: Root, *, as_json: AsJson = False) -> None:
    """List models, versions and tensors, and verify that no file was changed."""
    from sonic_coffea.server import read_repository

    entries = read_repository(path)
    _show(entries, as_json=as_json)
    changes = [change for entry in entries for change in entry.changes]
    if changes:
        typer.echo(printable(f"error: {'; '.join(changes)} since it was built"), err=True)
        raise typer.Exit(1)


def _served(sources: Mapping[str, str], declare: Path | None) -> dict[str, Served]:
    """Return the models to be built, with the declarations of a JSON file."""
    from sonic_coffea.server import Served

    try:
        declared = {} if declare is None else json.loads(declare.read_text(encoding="utf-8"))
        served = {
            name: Served(source, **declared.get(name, {})) for name, source in sources.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"expected declarations as JSON in {declare}: {error}") from None
    if unknown := set(declared) - set(sources):
        raise ConfigError(
            f"expected models of this build in {declare}, got {', '.join(map(repr, unknown))}"
        )
    return served


def _show(entries: Sequence[ModelVersion], *, as_json: bool) -> None:
    rows = []
    for entry in entries:
        cells: list[Any] = [*["?"] * 4, "no manifest"]
        if (manifest := entry.manifest) is not None:
            built = f"{manifest['built'][:16].replace('T', ' ')} {manifest.get('user') or ''}"
            cells = [
                [manifest["kind"]],
                _tensors(manifest["inputs"]),
                _tensors(manifest["outputs"]),
                [built.strip()],
                f"{len(entry.changes)} changed" if entry.changes else "as built",
            ]
        rows.append([[entry.model], str(entry.version), *cells])
    columns = ("model", "version", "kind", "inputs", "outputs", "built", "files")
    plain = [entry.to_dict() for entry in entries]
    show(plain, tables.Table("", rows, columns), as_json=as_json)


def _tensors(declared: Sequence[Mapping[str, Any]]) -> list[str]:
    def shape(first: int, *others: int) -> list[int | str]:
        return ["N" if first < 0 else first, *others]

    return tensors((t["name"], t["dtype"], shape(*t["shape"])) for t in declared)
