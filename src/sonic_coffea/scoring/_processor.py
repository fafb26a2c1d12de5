"""The processor that writes the scores of each chunk into its own file."""

from __future__ import annotations

import hashlib
import inspect
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import awkward as ak

from sonic_coffea import provenance
from sonic_coffea.demo.features import CONSTITUENT_FEATURES, constituent_features
from sonic_coffea.errors import ConfigError, FieldError, nearest
from sonic_coffea.model import Model, constituents, has_constituents
from sonic_coffea.processor import SonicProcessor, chunk_name

IDENTITY = ("run", "luminosityBlock", "event")
INDEX = "index"


class Scoring(SonicProcessor):
    """Score a chunk, and write it to a Parquet file whose name tells chunk and declaration.

    A chunk whose file is there is not scored again. The output names the files, in order of the
    events by `key`.
    """

    def __init__(
        self,
        model: Model,
        parts: Path,
        *,
        collection: str | None,
        features: Callable[[Any], Any] | None,
        keep: Sequence[str],
        on_error: str,
    ) -> None:
        self.models = {"scores": model}
        self.parts = parts
        self.collection = collection
        self.features = features
        self.keep = tuple(keep)
        self.on_error = on_error
        declared = (model.config_hash, collection, *self.keep, _source(features))
        self.kind = hashlib.sha256(repr(declared).encode()).hexdigest()[:8]

    def process(self, events: Any) -> Any:
        """Score a chunk, unless an earlier run has: coffea calls this."""
        path = self._path(events.metadata)
        if path.is_file():
            return self._counted(events, path, resumed=len(events))
        return super().process(events)

    def acquire(self, events: Any) -> dict[str, Any]:
        """Send the objects of the collection, or what the user's function makes of the events."""
        objects = self._objects(events)
        for name in self.keep:
            if name not in objects.fields:
                problem = f"keep: there is no field {name!r}; {nearest(name, objects.fields)}"
                raise FieldError(problem)
        if self.features is not None:
            return {"scores": self.features(events)}
        return {"scores": _sent(events, objects, self.collection, self.models["scores"])}

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        """Write a row for each object, with its place in the event, and its scores."""
        scored = scores["scores"]
        columns = {name: events[name] for name in IDENTITY}
        objects = self._objects(events)
        if self.collection is not None:
            columns[INDEX] = ak.local_index(objects.pt if "pt" in objects.fields else objects)
        for name, column in [*((n, objects[n]) for n in self.keep), *_flat(scored)]:
            if name in columns:
                raise ConfigError(
                    f"two columns are called {name!r}; rename the labels in the declaration"
                )
            columns[name] = column
        depth = 1 if self.collection is None else 2
        # Scores that are None are a row, too.
        table = ak.zip(columns, depth_limit=depth, optiontype_outside_record=False)
        table = ak.drop_none(ak.flatten(table) if depth == 2 else table, axis=0)
        path = self._path(events.metadata)
        try:
            provenance.to_parquet(table, path, scored)
        except OSError as error:
            raise ConfigError(
                f"{socket.gethostname()} cannot write in {path.parent}: {error.strerror or error}; "
                "all workers have to see the folder of the output"
            ) from None
        return self._counted(events, path, resumed=0)

    def _objects(self, events: Any) -> Any:
        name = self.collection
        if name is None:
            return events
        if name not in events.fields:
            raise FieldError(f"there is no collection {name!r}; {nearest(name, events.fields)}")
        return events[name]

    def _path(self, metadata: Any) -> Path:
        return self.parts / f"{chunk_name(metadata)}-{self.kind}.parquet"

    def _counted(self, events: Any, path: Path, *, resumed: int) -> dict[str, Any]:
        chunk = {"file": events.metadata["filename"], "start": events.metadata["entrystart"]}
        return {"parts": [{**chunk, "path": str(path)}], "events": len(events), "resumed": resumed}


def _source(features: Callable[[Any], Any] | None) -> str:
    """Return what tells an edited function of the user from what it was: its module's text."""
    if features is None:
        return ""
    for written in (inspect.getmodule(features), features):
        try:
            return inspect.getsource(written)  # type: ignore[arg-type]
        except (OSError, TypeError):  # such as in a notebook, or a callable object
            continue
    return repr(features)


def _flat(scores: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the columns of scores: labels, after the output's name where there are several."""
    if not scores.fields:
        return [(prefix or "score", scores)]
    columns = []
    for name in scores.fields:
        columns += _flat(scores[name], f"{prefix}_{name}" if prefix else name)
    return columns


def _sent(events: Any, objects: Any, collection: str | None, model: Model) -> Any:
    """Return what a model reads: events, their objects, or the constituents of their jets.

    Constituents come where the model reads what the objects do not have: under ``constituents``,
    if it reads that; else with the features that the demo's network has, if it reads these; else as
    the file has them. Where they lack it, too, the objects come, whose fields an error then names.
    """
    columns = {column for layout in model.inputs.values() for column in layout.columns}
    roots = {column.partition(".")[0].partition("[")[0] for column in columns}
    elsewhere = roots - set(objects.fields)
    if collection is None or not elsewhere or not has_constituents(events, collection):
        return objects
    inner = constituents(events, collection)
    if "constituents" in roots:
        return ak.with_field(objects, inner, "constituents")
    if not columns & set(CONSTITUENT_FEATURES):
        return inner if elsewhere & set(inner.fields) else objects
    # NanoAOD keeps no constituents of the softest jets: these have no score.
    return ak.mask(constituent_features(objects, inner), ak.num(inner, axis=2) > 0)
