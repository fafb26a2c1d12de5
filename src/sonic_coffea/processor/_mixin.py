"""The mixin: `acquire` returns the objects to score, and `produce` gets the scores."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import awkward as ak

from sonic_coffea.errors import ConfigError, FieldError, nearest
from sonic_coffea.layouts import is_lazy, is_tracer
from sonic_coffea.model import Choice, Folds, recorded
from sonic_coffea.pool import WithPool, using
from sonic_coffea.reporting import STATISTICS_KEY, Statistics

if TYPE_CHECKING:
    from sonic_coffea.model import Model, Pending

# Of a request that does not say it: as the model's `submit` has it.
_LEFT_OUT: Any = ...


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Objects that `acquire` sends, and how: the options of `Model.submit` and `Folds.submit`.

    Parameters
    ----------
    objects : ak.Array, dict or Variations
        The objects.
    fold : array of int, str or None, optional
        Of `Folds`: the fold of each event or object, an expression, or None for the mean of all
        models. By default, as the `Folds` are declared.
    version : int, str or array, optional
        Of a `Model`: the version that scores the objects, or the version for each event or object.
    deduplicate : bool
        Whether rows that are equal in all inputs are sent once.
    mask : array of bool, optional
        Which objects are scored.
    default : float, optional
        The score of objects that the mask leaves out; by default, None.

    Examples
    --------
    ``return {"dnn": sonic.Request(objects, fold=events.event % 3)}``
    """

    objects: Any
    _: KW_ONLY
    fold: Any = _LEFT_OUT
    version: Any = _LEFT_OUT
    deduplicate: bool = False
    mask: Any = None
    default: float | None = None


class Scores(dict[str, Any]):
    """Scores by model; ``overlap`` has the return value of the processor's `overlap`.

    In a `SonicFilter`, ``passed`` is one boolean for each event of the chunk.
    """

    passed: Any = None

    def __init__(
        self, scores: Mapping[str, Any] = MappingProxyType({}), overlap: Any = None
    ) -> None:
        super().__init__(scores)
        self.overlap = overlap

    def __missing__(self, name: str) -> Any:
        raise FieldError(f"acquire sent nothing to a model {name!r}; {nearest(name, self)}")


class SonicProcessor(WithPool):
    """Mixin for coffea processors that score objects on servers.

    Write `acquire` and `produce`, and leave `process` to the mixin::

        class TopAnalysis(sonic.SonicProcessor, processor.ProcessorABC):
            models = {"top": model}

            def acquire(self, events):
                return {"top": events.FatJet}

            def produce(self, events, scores):
                return {"n_top": ak.sum(scores["top"].top > 0.9)}

    Requests leave when `acquire` returns; while the servers infer, `overlap` runs. A dict that
    `produce` returns comes with the statistics of its requests under ``"sonic_statistics"``, as
    plain numbers that coffea adds up and `sonic_coffea.report` shows.

    Attributes
    ----------
    models : mapping
        The models, `Folds` or `Choice`, by the names that `acquire` and `produce` call them.
    on_error : {"raise", "mask"}
        Whether rows that no server scores raise an error, or become None; see `Model.submit`.
    block_size : int or None
        Events of a block. With coffea's local executors, a chunk may be processed in blocks: the
        next block is sent before the mixin waits for the scores of this block, so that the core
        works while the servers infer. `acquire`, `overlap` and `produce` get one block at a time,
        with its own ``entrystart`` and ``entrystop`` in the metadata, and the outputs of `produce`
        are accumulated. Each block has its own copy of the processor, so attributes that it sets
        on ``self`` are lost. On dask, chunks are suspended instead.
    """

    models: Mapping[str, Model | Choice] = MappingProxyType({})
    on_error: str = "raise"
    block_size: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        process: Any = inspect.unwrap(cls.process)
        if getattr(process, "__isabstractmethod__", False):
            raise ConfigError(
                f"{cls.__name__}: name the mixin before coffea's class, as in class "
                f"{cls.__name__}(sonic.SonicProcessor, processor.ProcessorABC)"
            )
        code = getattr(process, "__code__", None)
        if process is SonicProcessor.process or code is None:
            return
        # A method that calls super() has the variable __class__.
        if not {"process", "__class__"} & {*code.co_names, *code.co_freevars}:
            raise ConfigError(
                f"{cls.__name__} overrides process, which calls acquire and produce: move its code "
                "into these, or return super().process(events)"
            )

    def acquire(self, events: Any) -> Mapping[str, Any]:
        """Return the objects to score: for each model, an array or a dict of its inputs.

        A `Request` has options beside the objects, such as the fold of each event. A model may be
        left out; then `produce` gets no scores of it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define acquire(self, events)")

    def overlap(self, events: Any) -> Any:
        """Do work that needs no scores, while the servers infer; by default, nothing.

        The return value is ``scores.overlap`` in `produce`.
        """

    def produce(self, events: Any, scores: Scores) -> Any:
        """Return the accumulator of the chunk.

        Parameters
        ----------
        events : NanoEvents
            The chunk.
        scores : mapping
            For each model that `acquire` named, the scores, in the structure of its objects.

        Notes
        -----
        It may be a generator, for models that need the scores of others. What it yields is sent as
        what `acquire` returns, and the scores come back, any number of times::

            more = yield {"id": corrected(events.Photon, scores["regression"])}
            return {"n_photons": ak.sum(more["id"].signal > 0.5)}
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define produce(self, events, scores)"
        )

    def postprocess(self, accumulator: Any) -> Any:
        """Return the output of a run as it is; coffea before 2025.10 wants the method."""
        return accumulator

    def process(self, events: Any) -> Any:
        """Score a chunk: coffea calls this."""
        with using(self.pool_of_pickle):
            return self._process(events)

    def _process(self, events: Any) -> Any:
        started: deque[Generator[Any]] = deque()
        outputs: list[Any] = []
        try:
            for number, (owner, block) in enumerate(_blocks(self, events)):
                started.append(SonicProcessor._score(owner, block, chunks=int(number == 0)))
                next(started[-1])
                if len(started) > 1:
                    outputs.append(next(started.popleft()))
            outputs += [next(scoring) for scoring in started]
        finally:
            for scoring in started:
                scoring.close()
        if len(outputs) == 1:
            return outputs[0]
        from coffea.processor import accumulate

        return accumulate(outputs)

    def _produce(self, events: Any, scores: Scores) -> tuple[Any, Any]:
        """Return the events that `produce` gets, and what it returns."""
        return events, self.produce(events, scores)

    def _score(self, events: Any, *, chunks: int) -> Generator[Any]:
        """Send a block's requests and do the work that needs no scores, then yield its output.

        Yields None in between. Closed, or on an error, it cancels what is not answered yet.
        """
        calls: list[Pending] = []
        try:
            with recorded(calls), _nearest_fields_named():
                pending = _submit(self, "acquire", self.acquire(events), events, calls)
                overlap = self.overlap(events)
            yield None
            scores = Scores({name: call.result() for name, call in pending.items()}, overlap)
            with recorded(calls), _nearest_fields_named():
                seen, output = self._produce(events, scores)
                if inspect.isgenerator(output):
                    output = _stages(self, output, seen, calls)
        finally:
            for call in calls:
                call.cancel()
        if type(output) is dict and not _has_no_data(events):
            statistics = Statistics(chunks=chunks, events=len(events))
            dataset = _dataset_of(events)
            if dataset is not None:
                statistics.datasets[str(dataset)] = len(events)
            for call in calls:
                statistics += call.statistics
            output = {**output, STATISTICS_KEY: statistics.to_plain()}
        yield output


def _blocks(processor: SonicProcessor, events: Any) -> Iterator[tuple[SonicProcessor, Any]]:
    """Yield the events in blocks, and the processor that works on each."""
    size = processor.block_size
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigError(f"block_size: expected at least 1 event, or None, got {size!r}")
    if size is None or _has_no_data(events) or len(events) <= size:
        yield processor, events
        return
    for start in range(0, len(events), size):
        # The next block's acquire runs before the produce of this one.
        yield copy(processor), _block_of(events, start, min(start + size, len(events)))


def _dataset_of(events: Any) -> Any:
    return (getattr(events, "metadata", None) or {}).get("dataset")


def _stages(
    processor: SonicProcessor, stages: Generator[Any, Any, Any], events: Any, calls: list[Pending]
) -> Any:
    """Send what `produce` yields, give it the scores, and return what it returns."""
    scores: Any = None
    while True:
        try:
            sent = stages.send(scores)
        except StopIteration as end:
            return end.value
        pending = _submit(processor, "produce", sent, events, calls)
        scores = Scores({name: call.result() for name, call in pending.items()})


def _submit(
    processor: SonicProcessor, method: str, sent: Any, events: Any, calls: list[Pending]
) -> dict[str, Pending]:
    """Send what a method has returned or yielded, objects by model, and append the calls."""
    _check(processor, method, sent)
    pending = {}
    for name, objects in sent.items():
        pending[name] = _submit_to(processor, name, objects, events)
        if pending[name] not in calls:  # a model that is none of ours
            calls.append(pending[name])
    return pending


def _check(processor: SonicProcessor, method: str, sent: Any) -> None:
    """Raise unless a method has given objects by model."""
    models, kind = processor.models, type(processor).__name__
    if not isinstance(models, Mapping):
        raise ConfigError(
            f"{kind}.models must be a dict of name and sonic.Model, got {type(models).__name__}"
        )
    who = f"{kind}.{method}"
    if not isinstance(sent, Mapping):
        gives = "return" if method == "acquire" else "yield"
        raise ConfigError(
            f"{who} must {gives} a dict of model name and objects, got {type(sent).__name__}"
        )
    for name in sent:
        if name not in models:
            raise ConfigError(f"{who} names model {name!r}; {nearest(str(name), models)}")
        if not hasattr(models[name], "submit"):
            raise ConfigError(
                f"{kind}.models: expected a sonic.Model as {name!r}, got "
                f"{type(models[name]).__name__}"
            )


def _submit_to(processor: SonicProcessor, name: str, sent: Any, events: Any) -> Pending:
    """Send the objects for a model."""
    request = sent if isinstance(sent, Request) else Request(sent)
    model: Any = processor.models[name]
    options: dict[str, Any] = {"on_error": processor.on_error}
    if isinstance(model, Choice):
        options["events"] = events
    for option, takes in (
        ("fold", isinstance(model, Folds)),
        ("version", not isinstance(model, Choice)),
    ):
        value = getattr(request, option)
        if value is _LEFT_OUT:
            continue
        if not takes:
            raise ConfigError(
                f"{type(processor).__name__} sends {option}= to {name!r}, but a "
                f"{type(model).__name__} takes none"
            )
        options[option] = value
    for option in ("deduplicate", "mask", "default"):
        value = getattr(request, option)
        if value is not None and value is not False:
            options[option] = value
    pending: Pending = model.submit(request.objects, **options)
    return pending


def _has_no_data(events: Any) -> bool:
    """Return whether events are of a graph or of a trace, which have no length."""
    return is_lazy(events) or is_tracer(events)


def _block_of(events: Any, start: int, stop: int) -> Any:
    """Return the events of a block, with metadata that say where in the file they are."""
    block = events[start:stop]
    metadata = ak.parameters(events).get("metadata")
    if not isinstance(metadata, Mapping) or "entrystart" not in metadata:
        return block
    first = metadata["entrystart"]
    own = {**metadata, "entrystart": first + start, "entrystop": first + stop}
    return ak.with_parameter(block, "metadata", own)


@contextmanager
def _nearest_fields_named() -> Iterator[None]:
    """Name the nearest fields where the user's code asks for a field that is missing."""
    try:
        yield
    except AttributeError as error:
        # awkward names the missing field, not the others.
        if not isinstance(error.obj, ak.Array) or not error.name:
            raise
        raise FieldError(
            f"there is no field {error.name!r}; {nearest(error.name, error.obj.fields)}"
        ) from None
