"""The processor that writes the scores of each chunk into its own file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import marshal
import operator
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import awkward as ak
import numpy as np
from awkward.types import NumpyType, OptionType
from dask.base import tokenize

from sonic_coffea import provenance
from sonic_coffea._files import FileState
from sonic_coffea._version import __version__
from sonic_coffea.errors import ConfigError, FieldError, InputError, require, shortened
from sonic_coffea.layouts import EVENT_ID, columns_of
from sonic_coffea.model import Choice, Model, constituents, export
from sonic_coffea.pool import declarations_of
from sonic_coffea.processor import Request, SonicProcessor

INDEX = "index"
# A field that tells whether a function of the user has moved objects; no file has it.
_NOTED = "index in score_files"


@dataclass(eq=False)
class Scoring(SonicProcessor):
    """Score a chunk, and write it to a Parquet file named after the chunk and the declaration.

    A chunk whose file exists is not scored again. The output lists the files.
    """

    model: Model | Choice
    parts: Path
    collection: str | None
    features: Callable[[Any], Any] | None
    keep: Sequence[str] = ()
    on_error: str = "raise"
    flat: bool = False
    # When each file was written, and its size, as the run begins: tasks may outlive a run.
    files: Mapping[str, FileState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.models = {"scores": self.model}
        used = None if self.features is None else identity(self.features)
        of_model, self.keep = self.model.config_hash, tuple(self.keep)  # of an iterator, too
        layouts = [type(of) for each in declarations_of(self.model) for of in each.inputs.values()]
        own = [identity(of) for of in layouts if not of.__module__.startswith("sonic_coffea.")]
        declared = (__version__, of_model, own, self.collection, self.keep, self.on_error, used)
        self.digest = hashlib.sha256(repr(declared).encode()).hexdigest()[:8]

    def process(self, events: Any) -> Any:
        """Score a chunk, unless an earlier run has: coffea calls this."""
        path = self._path(events.metadata)
        if path.is_file():
            return self._counted(events, path, resumed=len(events))
        self._checked(events)  # so that what follows is of the model's fields
        try:
            return super().process(events)
        except FieldError as error:
            if self.features is not None or self.collection is None:
                raise
            hint = "constituents.NAME is a field of these; features= makes other inputs"
            raise error.because(hint) from None

    def acquire(self, events: Any) -> dict[str, Any]:
        """Send the objects of the collection, or what the user's function makes of the events."""
        objects = self._checked(events)
        if self.features is not None:
            return {"scores": self._featured(events, objects)}
        return {"scores": _sent(events, objects, self.collection, self.model)}

    def _featured(self, events: Any, objects: Any) -> Any:
        """Return what the user's function makes of the events; refuse objects in another order.

        Their scores would be written beside other objects.
        """
        first: Any = 0
        if self.collection is not None:
            counts = ak.to_numpy(ak.num(objects))
            first = ak.Array(np.cumsum(counts) - counts)
        # Numbers over all events, as whole events may be moved.
        where = first + ak.local_index(objects, axis=0 if self.collection is None else 1)
        noted = ak.with_field(objects, where, _NOTED)
        if self.collection is not None:
            noted = ak.with_field(events, noted, self.collection)
        sent = self.features(noted)  # type: ignore[misc]
        given = sent.objects if isinstance(sent, Request) else sent
        for records in given.values() if isinstance(given, Mapping) else [given]:
            places = records[_NOTED] if _NOTED in getattr(records, "fields", ()) else where
            is_whole = len(places) == len(events)
            if not is_whole or ak.any(places != first + ak.local_index(places), axis=None):
                raise InputError(
                    f"expected a score for each {self.collection or 'event'} in its place, but "
                    "features= cuts or sorts them; ak.mask those that are not to be scored"
                )
        return sent

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        """Write a row for each object, with its place in the event, and its scores."""
        scored = scores["scores"]
        if not isinstance(scored, ak.Array):
            raise ConfigError("score_files scores no Variations; call it once for each")
        depth = 1 if self.collection is None else 2
        objects = self._objects(events)
        fits = scored.ndim >= depth and len(scored) == len(events)
        if depth == 2 and fits:  # awkward would repeat one score, or leave out masked events
            each = (ak.fill_none(ak.num(array), -1).tolist() for array in (objects, scored))
            fits = operator.eq(*each)
        if not fits:
            raise InputError(
                f"expected a score for each {self.collection or 'event'}, got {scored.type}; "
                "features= must return inputs with the same events and objects"
            )
        columns = {name: events[name] for name in EVENT_ID}
        if depth == 2:
            columns[INDEX] = ak.local_index(objects, axis=1)
        for name, column in [*((n, objects[n]) for n in self.keep), *columns_of(scored)]:
            if name in columns:
                raise ConfigError(
                    f"two columns are called {name!r}; rename the label in the declaration, or "
                    "leave the field out of keep"
                )
            columns[name] = column
        # Scores that are None are a row, too.
        table = ak.zip(columns, depth_limit=depth, optiontype_outside_record=False)
        table = ak.drop_none(ak.flatten(table) if depth == 2 else table, axis=0)
        if self.flat:
            _check_flat(table, self.keep, [name for name, _ in columns_of(scored)])
        if not self.parts.is_dir():
            raise ConfigError(
                f"{socket.gethostname()} has no folder {self.parts}; all workers have to see the "
                "folder of the output, and another run with this output removes it as it ends"
            )
        path = self._path(events.metadata)
        provenance.to_parquet(table, path, scored)
        return self._counted(events, path, resumed=0)

    def _checked(self, events: Any) -> Any:
        """Return the objects; refuse events that lack them, their numbers, or a field to keep."""
        if missing := [name for name in EVENT_ID if name not in events.fields]:
            raise FieldError(f"the file has no {', '.join(missing)}, which number the events")
        objects = self._objects(events)
        # Coffea's own indices, such as subJetIdx1G, count within a chunk, whatever its size.
        fields = [name for name in objects.fields if not re.search(r"Idx\w*G$", name)]
        require(self.keep, fields, "keep: there is no field", FieldError)
        return objects

    def _objects(self, events: Any) -> Any:
        name = self.collection
        if name is None:
            return events
        require([name], events.fields, "there is no collection", FieldError)
        return events[name]

    def _path(self, metadata: Any) -> Path:
        # Copies of a file, and a file that was updated, have its uuid, and are other chunks.
        file = metadata["filename"]
        place = hashlib.sha256(repr((file, self.files.get(file))).encode()).hexdigest()[:8]
        chunk = f"{metadata['fileuuid']}-{place}-{metadata['entrystart']}-{metadata['entrystop']}"
        return self.parts / f"{chunk}-{self.digest}.parquet"

    def _counted(self, events: Any, path: Path, *, resumed: int) -> dict[str, Any]:
        chunk = {"file": events.metadata["filename"], "start": events.metadata["entrystart"]}
        return {"parts": [{**chunk, "path": str(path)}], "events": len(events), "resumed": resumed}


@dataclass(eq=False)
class Exporting(Scoring):
    """Write the tensors of a chunk to a file of its own; no server is asked."""

    labels: Mapping[str, str] = field(default_factory=dict)
    weights: str | None = None

    def process(self, events: Any) -> Any:
        path = self._path(events.metadata)
        sent = self.acquire(events)["scores"]
        if isinstance(sent, Request):
            if sent.options.get("mask") is not None:
                raise ConfigError("mask= is not for export; ak.mask the objects themselves")
            sent = sent.objects
        records = self._objects(events), events
        export(self.model, sent, path, self.labels, self.weights, *records)  # type: ignore[arg-type]
        return super().process(events)  # which finds the file, and counts it


def _check_flat(table: Any, kept: Iterable[str], scores: Iterable[str]) -> None:
    """Refuse columns that ROOT does not have, and None where there is a score: its row is lost."""
    absent = {name: ak.is_none(table[name]) for name in (*kept, *scores)}
    unscored = reduce(operator.and_, (absent[name] for name in scores))
    for name, is_none in absent.items():
        kind = table[name].type.content
        number = kind.content if isinstance(kind, OptionType) else kind
        if not isinstance(number, NumpyType):
            raise ConfigError(
                f"{name!r} is no plain number, but {shortened(kind)}; write a .parquet file instead"
            )
        if ak.any(is_none & ~unscored):
            raise ConfigError(
                f"{name!r} is None for objects that have a score, which a ROOT file cannot hold; "
                "write a .parquet file instead"
            )


def _sent(events: Any, objects: Any, collection: str | None, model: Model | Choice) -> Any:
    """Return what a model reads: events or their objects, with ``constituents`` if it reads these.

    Raises
    ------
    FieldError
        If the file has no constituents of the collection.
    """
    paths = [
        path
        for each in declarations_of(model)
        for layout in each.inputs.values()
        for path in layout.columns
    ]
    wants = any(re.match(r"constituents[.\[]", path) for path in paths)
    if not wants or collection is None or "constituents" in objects.fields:
        return objects
    return ak.with_field(objects, constituents(events, collection), "constituents")


def identity(function: Callable[..., Any]) -> str:
    """Return a text that differs between functions that may return different results.

    It covers the module of the function, the arguments of a `partial`, default values, the
    variables of enclosing functions, the globals and modules that the function names, and the
    modules that it imports when it is called; of functions and classes of the same module, too.
    What other modules import is left out. A value that dask cannot hash reproducibly is different
    each time.
    """
    seen: set[int] = set()
    innermost: Any = function
    while isinstance(innermost, partial):
        innermost = innermost.func
    home = getattr(innermost, "__module__", None)

    def texts(value: Any) -> Iterator[str]:
        used: Iterable[Any] = ()
        if isinstance(value, partial):
            used = value.func, value.args, value.keywords
        elif inspect.ismethod(value):
            used = value.__func__, value.__self__
        elif isinstance(value, (list, tuple, dict)):  # dask takes some values in it for the same
            yield f"{type(value)} {len(value)}"
            used = value.items() if isinstance(value, dict) else value
        elif not inspect.isroutine(value) and not isinstance(value, (ModuleType, type)):
            yield tokenize(ak.to_buffers(value) if isinstance(value, ak.Array) else value)
            used = (type(value),)
        elif id(value) not in seen:
            seen.add(id(value))
            yield _source(value)
            if getattr(value, "__module__", None) == home:
                used = _used(value)
        for each in used:
            yield from texts(each)

    return str(tokenize(list(texts(function))))


def _used(function: Any) -> Iterator[Any]:
    """Yield the values that a function reads beside its arguments, or what a class has."""
    if isinstance(function, type):
        for name, member in inspect.getmembers(function):
            # Of abc, a value that is different each time.
            is_own = not name.startswith("__") and name != "_abc_impl"
            if hasattr(member, "__code__") or (is_own and not hasattr(member, "__get__")):
                yield member
        return
    yield getattr(function, "__wrapped__", None)
    if not inspect.isfunction(function):  # as of functools.lru_cache
        return
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents
    for name in dict.fromkeys(_names(function.__code__)):
        yield function.__globals__.get(name)
        yield _text_of_module(name)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function and in those in it: of globals, modules and attributes."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _text_of_module(name: str) -> str | None:
    """Return the text of a module that a function imports when it is called; it is not loaded."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        return str(getattr(spec and spec.loader, "get_source", repr)(name))
    return None


def _source(value: Any) -> str:
    """Return the text of a value's module, or its own in a notebook."""
    written = getattr(value, "__code__", value)  # which knows the file, also after functools.wraps
    for each in (inspect.getmodule(written), written):
        with contextlib.suppress(OSError, TypeError):
            return inspect.getsource(each)  # type: ignore[arg-type]
    return repr(value) if written is value else marshal.dumps(written).hex()
