"""The processor that writes the scores of each chunk into its own file."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import awkward as ak
from awkward.types import ListType, NumpyType, OptionType

from sonic_coffea import provenance
from sonic_coffea._version import __version__
from sonic_coffea.errors import ConfigError, FieldError, InputError, nearest
from sonic_coffea.layouts import columns_of
from sonic_coffea.model import Choice, Model, constituents, export, has_constituents
from sonic_coffea.processor import EVENT_ID, Request, SonicProcessor, chunk_name
from sonic_coffea.scoring._identity import identity

INDEX = "index"


class Scoring(SonicProcessor):
    """Score a chunk, and write it to a Parquet file whose name tells chunk and declaration.

    A chunk whose file is there is not scored again. The output names the files, in order of the
    events by `key`.
    """

    def __init__(
        self,
        model: Model | Choice,
        parts: Path,
        *,
        collection: str | None,
        features: Callable[[Any], Any] | None,
        keep: Sequence[str],
        on_error: str,
        flat: bool,
    ) -> None:
        self.models = {"scores": model}
        self.parts = parts
        self.collection = collection
        self.features = features
        self.keep = tuple(keep)
        self.on_error = on_error
        self.flat = flat
        used = None if features is None else identity(features)
        declared = (__version__, model.config_hash, collection, self.keep, on_error, used)
        self.kind = hashlib.sha256(repr(declared).encode()).hexdigest()[:8]

    def process(self, events: Any) -> Any:
        """Score a chunk, unless an earlier run has: coffea calls this."""
        path = self._path(events.metadata)
        if path.is_file():
            return self._counted(events, path, resumed=len(events))
        return super().process(events)

    def acquire(self, events: Any) -> dict[str, Any]:
        """Send the objects of the collection, or what the user's function makes of the events."""
        if missing := [name for name in EVENT_ID if name not in events.fields]:
            raise FieldError(f"the file has no {', '.join(missing)}, which number the events")
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
        if not isinstance(scored, ak.Array):
            raise ConfigError("score_files scores no Variations; call it once for each")
        depth = 1 if self.collection is None else 2
        columns = {name: events[name] for name in EVENT_ID}
        objects = self._objects(events)
        if self.collection is not None:
            columns[INDEX] = ak.local_index(objects.pt if "pt" in objects.fields else objects)
        for name, column in [*((n, objects[n]) for n in self.keep), *columns_of(scored)]:
            if name in columns:
                raise ConfigError(
                    f"two columns are called {name!r}; rename the labels in the declaration"
                )
            if self.flat and not _is_number(column.type.content, depth):
                raise ConfigError(
                    f"{name!r} is no plain number, but {column.type.content}: write it to a "
                    ".parquet file"
                )
            columns[name] = column
        misfit = InputError(
            f"expected a score for each {self.collection or 'event'}, got {scored.type}; features= "
            "must return inputs with the same events and objects"
        )
        if scored.ndim < depth:
            raise misfit
        try:
            # Scores that are None are a row, too.
            table = ak.zip(columns, depth_limit=depth, optiontype_outside_record=False)
        except ValueError:
            raise misfit from None
        table = ak.drop_none(ak.flatten(table) if depth == 2 else table, axis=0)
        # Of an event that is None, the objects would be lost.
        if len(table) != (len(events) if depth == 1 else ak.count(columns[INDEX])):
            raise misfit
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


class Exporting(Scoring):
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


def _is_number(kind: Any, depth: int) -> bool:
    """Return whether a type is that of numbers, or None, in lists around it."""
    while isinstance(kind, OptionType) or (depth > 1 and isinstance(kind, ListType)):
        depth -= isinstance(kind, ListType)
        kind = kind.content
    return depth == 1 and isinstance(kind, NumpyType)


def _sent(events: Any, objects: Any, collection: str | None, model: Model | Choice) -> Any:
    """Return what a model reads: events or their objects, with ``constituents`` if it reads these.

    Raises
    ------
    FieldError
        If the model reads what the objects do not have.
    """
    models = model.models if isinstance(model, Choice) else (model,)
    layouts = [layout for each in models for layout in each.inputs.values()]
    paths = {path for layout in layouts for path in layout.columns}
    roots = {path.partition(".")[0].partition("[")[0] for path in paths}
    if "constituents" in roots - set(objects.fields) and collection is not None:
        objects = ak.with_field(objects, constituents(events, collection), "constituents")
    for name in sorted(roots - set(objects.fields)):
        if hasattr(type(objects), name):  # such as a vector's energy
            continue
        remedy = "pass features=, a function of the events that returns the model's inputs"
        if collection is not None and has_constituents(events, collection):
            remedy = f"read constituents as 'constituents.{name}', or {remedy}"
        raise FieldError(
            f"{collection or 'the events'}: there is no field {name!r}; "
            f"{nearest(name, objects.fields)} Else {remedy}"
        )
    return objects
