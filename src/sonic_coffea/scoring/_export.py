"""`export_files`: from files of events to one file of training data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea import provenance
from sonic_coffea.errors import ConfigError
from sonic_coffea.model import Model, export
from sonic_coffea.processor import Request, run_files
from sonic_coffea.scoring._files import join, located
from sonic_coffea.scoring._processor import Scoring

if TYPE_CHECKING:
    import os


class _Exporting(Scoring):
    """Write the tensors of a chunk to a file of its own; no server is asked."""

    labels: Mapping[str, str]
    weights: str | None

    def process(self, events: Any) -> Any:
        path = self._path(events.metadata)
        sent = self.acquire(events)["scores"]
        sent = sent.objects if isinstance(sent, Request) else sent
        records = self._objects(events), events
        export(self.models["scores"], sent, path, self.labels, self.weights, *records)  # type: ignore[arg-type]
        return super().process(events)  # which finds the file, and counts it


def export_files(  # noqa: PLR0913  independent options, each with a default
    model: Model,
    files: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    collection: str | None = None,
    features: Callable[[Any], Any] | None = None,
    labels: Mapping[str, str] | None = None,
    weights: str | None = None,
    client: Any = None,
    chunksize: int = 20_000,
    progress: bool = False,
) -> int:
    """Write the tensors of NanoAOD files to one Parquet file, as `Model.export` does; return rows.

    Parameters
    ----------
    model : Model
        The declaration.
    files, collection, features, client, chunksize, progress
        As for `score_files`.
    output : path
        The ``.parquet`` file.
    labels, weights
        As for `Model.export`: fields or expressions of the objects, or of the events.

    Raises
    ------
    ConfigError
        If a file cannot be read or written, or a package is missing.
    FieldError, InputError
        If the arrays do not fit the layouts.
    """
    target = Path(output).expanduser().absolute()
    if target.suffix != ".parquet" or not isinstance(model, Model):
        raise ConfigError(
            f"expected a Model, and an output that ends in .parquet, got {type(model).__name__} "
            f"and {target.name}"
        )
    paths = [located(file) for file in files]
    parts = target.with_name(f".{target.name}.parts")
    processor = _Exporting(
        model, parts, collection=collection, features=features, keep=(), on_error="", flat=False
    )
    processor.labels, processor.weights = labels or {}, weights
    shutil.rmtree(parts, ignore_errors=True)
    try:
        parts.mkdir(parents=True)
        out = run_files(
            processor, {"files": paths}, client=client, chunksize=chunksize, progress=progress
        )
        chunks = sorted(out["parts"], key=lambda part: (paths.index(part["file"]), part["start"]))
        joined = [Path(chunk["path"]) for chunk in chunks]
        rows, _ = join(joined, target, provenance.read(joined[0]))
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return rows
