"""The mixins: `acquire` returns the objects to score, and `produce` gets the scores."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from types import MappingProxyType
from typing import Any

import awkward as ak
import numpy as np

from sonic_coffea.errors import (
    ConfigError,
    FieldError,
    InputError,
    brief,
    expect,
    nearest,
    require,
    shortened,
)
from sonic_coffea.layouts import has_no_data, is_lazy, is_tracer
from sonic_coffea.model import Choice, Folds, Model, Pending, recorded
from sonic_coffea.pool import WithPool, current, using
from sonic_coffea.reporting import STATISTICS_KEY, Statistics


class Request:
    """Objects that `acquire` sends, and how: the options of `Model.submit` and `Folds.submit`.

    Parameters
    ----------
    objects : ak.Array, dict or Variations
        The objects.
    **options
        ``fold``, of `Folds`: the fold of each event or object, an expression, or None for the mean
        of all models; ``version``, ``deduplicate``, ``mask`` and ``default``.

    Examples
    --------
    ``return {"dnn": sonic.Request(objects, fold=events.event % 3)}``
    """

    def __init__(self, objects: Any, **options: Any) -> None:
        self.objects = objects
        self.options = options


class Scores(dict[str, Any]):
    """Scores by model; ``overlap`` has the return value of the processor's `overlap`.

    In a `SonicFilter`, ``passed`` is one boolean for each event of the chunk.
    """

    overlap: Any = None
    passed: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in self:
            raise AttributeError(f"expected scores[{name!r}], got scores.{name}")
        raise AttributeError(f"scores have no attribute {name!r}; {nearest(name, self)}")

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
    # Names of those that the user had unpickled, and that keep their servers.
    _pickled_models: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        base: Any = super(cls, cls)
        models = vars(cls).get("models")
        if isinstance(models, Mapping):
            pickled = {name for name, model in models.items() if _is_pickled(model)}
            # Models of the base class may be there by coffea's unpickling; it knows which are not.
            of_base = {n for n in pickled if models[n] is base.models.get(n)}
            cls._pickled_models = frozenset(pickled - (of_base - base._pickled_models))  # noqa: SLF001
        process: Any = inspect.unwrap(cls.process)
        if getattr(process, "__isabstractmethod__", False):
            raise ConfigError(
                f"{cls.__name__}: name the mixin before coffea's class, as in class "
                f"{cls.__name__}(sonic.SonicProcessor, processor.ProcessorABC)"
            )
        code = getattr(process, "__code__", None)
        if process is inspect.unwrap(SonicProcessor.process) or code is None:
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
        """Return the output of a run, as the class after the mixin makes it, or as it is.

        coffea before 2025.10 wants the method.
        """
        own: Any = getattr(super(), "postprocess", None)
        output = own and own(accumulator)
        return accumulator if output is None else output

    @brief
    def process(self, events: Any) -> Any:
        """Score a chunk: coffea calls this."""
        outputs: list[Any] = []
        with using(self.pool_of_pickle, of_processor=True), ExitStack() as stack:
            blocks = [SonicProcessor._score(*each) for each in _blocks(self, events)]
            for block in blocks:
                stack.enter_context(closing(block))
            # The next block is sent before the scores of this one are waited for.
            for sent, due in zip([*blocks, None], [None, *blocks], strict=True):
                if sent is not None:
                    next(sent)
                if due is not None:
                    outputs.append(next(due))
                    due.close()
        if len(outputs) == 1:
            return outputs[0]
        from coffea.processor import accumulate

        return accumulate(outputs)

    def _passing(self, events: Any, scores: Scores) -> tuple[Any, Scores]:
        """Return the events and scores that `produce` gets."""
        return events, scores

    def _score(self, events: Any, chunks: int) -> Generator[Any]:
        """Send a block's requests and do the work that needs no scores, then yield its output.

        Yields None in between. Closed, or on an error, it cancels what is not answered yet.
        """
        calls: list[Pending] = []
        try:
            with recorded(calls), _nearest_fields_named():
                pending = _submit(self, "acquire", self.acquire(events), events, calls)
                overlap = self.overlap(events)
            yield None
            scores = Scores({name: call.result() for name, call in pending.items()})
            scores.overlap = overlap
            with recorded(calls), _nearest_fields_named():
                seen, scores = self._passing(events, scores)
                output = self.produce(seen, scores)
                if inspect.isgenerator(output):
                    output = _stages(self, output, seen, calls)
        finally:
            for call in calls:
                call.cancel()
        if type(output) is dict and not has_no_data(events):
            if STATISTICS_KEY in output:
                raise ConfigError(
                    f"{type(self).__name__}.produce returns {STATISTICS_KEY!r}, which the mixin "
                    "adds for all calls of the chunk; leave it out, or give it another name"
                )
            dataset = (getattr(events, "metadata", None) or {}).get("dataset")
            datasets = {} if dataset is None else {str(dataset): len(events)}
            statistics = Statistics(chunks=chunks, events=len(events), datasets=datasets)
            for call in calls:
                statistics += call.statistics
            output = {**output, STATISTICS_KEY: statistics.to_plain()}
        yield output


def _blocks(processor: SonicProcessor, events: Any) -> Iterator[tuple[SonicProcessor, Any, int]]:
    """Yield the processor that works on each block, its events, and 1 for the chunk's first."""
    size = processor.block_size
    is_size = size is None or (type(size) is int and size >= 1)
    expect(is_size, "at least 1 event, or None", size, "block_size")
    if size is None or has_no_data(events) or len(events) <= size:
        yield processor, events, 1
        return
    metadata = ak.parameters(events).get("metadata")
    for start in range(0, len(events), size):
        block = events[start : start + size]
        if isinstance(metadata, Mapping) and "entrystart" in metadata:  # say where they are
            first = metadata["entrystart"] + start
            own = {**metadata, "entrystart": first, "entrystop": first + len(block)}
            block = ak.with_parameter(block, "metadata", own)
        # The next block's acquire runs before the produce of this one.
        yield copy(processor), block, int(start == 0)


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
        del sent  # the next stage may take long, and needs none of it
        scores = Scores({name: call.result() for name, call in pending.items()})


def _submit(
    processor: SonicProcessor, method: str, sent: Any, events: Any, calls: list[Pending]
) -> dict[str, Pending]:
    """Send what a method has returned or yielded, objects by model, and append the calls."""
    models, kind = processor.models, type(processor).__name__
    name = getattr(models, "name", "name")
    is_dict = isinstance(models, Mapping)
    expect(is_dict, f"a dict, such as models = {{{name!r}: model}}", models, f"{kind}.models")
    expected = "a dict of model name and objects"
    expect(isinstance(sent, Mapping), expected, sent, f"what {kind}.{method} sends")
    pending: dict[str, Pending] = {}
    for name, objects in sent.items():
        require([name], models, f"{kind}.{method} names model")
        model: Any = models[name]
        request = objects if isinstance(objects, Request) else Request(objects)
        options = {"on_error": processor.on_error, **request.options}
        has_fold = "fold" in options
        is_model = isinstance(model, Folds) if has_fold else hasattr(model, "submit")
        expected = "Folds, as fold= is sent to it," if has_fold else "a sonic.Model"
        expect(is_model, f"{expected} as {name!r}", model, f"{kind}.models")
        if isinstance(model, Choice):
            options.setdefault("events", events)
        # coffea pickles a class of a notebook, and unpickling it here replaces its attributes: its
        # models would stay with the servers of that run.
        is_of_class = "models" not in vars(processor)
        keeps_servers = is_of_class and name in processor._pickled_models  # noqa: SLF001
        is_replaced = is_of_class and not keeps_servers and _is_pickled(model)
        if is_replaced and not is_tracer(events):
            options.setdefault("pool", current())
        try:
            # A block of its own does not compare the servers of a model that keeps them.
            with using(processor.pool_of_pickle if keeps_servers else None):
                pending[name] = model.submit(request.objects, **options)
        except InputError as error:
            where = f"{kind}.{method}"
            raise error.because(f"in what {where} sends to {name!r}") from error.__cause__
        if pending[name] not in calls:  # a model of another package
            calls.append(pending[name])
    return pending


def _is_pickled(model: Any) -> bool:
    """Whether a pickle has brought a model, or some of `Folds` or `Choice`, with its servers."""
    each = model.models if isinstance(model, Choice) else [model]
    return any(isinstance(value, WithPool) and value.pool_of_pickle is not None for value in each)


@contextmanager
def _nearest_fields_named() -> Iterator[None]:
    """Name the nearest fields where the user's code asks for a field that is missing."""
    try:
        yield
    except AttributeError as error:
        # awkward names the missing field, not the others; or one that is there, and cannot be read.
        if not isinstance(error.obj, ak.Array) or error.name in (None, *error.obj.fields):
            raise
        missing = FieldError(
            f"there is no field {error.name!r}; {nearest(error.name, error.obj.fields)}"
        )
        raise missing.with_traceback(error.__traceback__) from None  # at the user's line


class SonicFilter(SonicProcessor):
    """Mixin for processors that continue only with events whose scores pass a decision.

    Write `acquire`, `decide` and `produce`. `produce` gets only the events that passed, and their
    scores. If `overlap` returned an array with an entry for each event, ``scores.overlap`` has only
    the events that passed, too; other arrays can be cut by ``scores.passed``. If no event of a
    chunk passes, `produce` gets no events, and its columns are not read. The mixin does not work
    with dask-awkward arrays::

        class TopFilter(sonic.SonicFilter, processor.ProcessorABC):
            models = {"top": model}

            def acquire(self, events):
                return {"top": events.FatJet}

            def decide(self, events, scores):
                return ak.any(scores["top"].top > 0.9, axis=1)

            def produce(self, events, scores):
                return {"met": ak.sum(events.MET.pt)}
    """

    def decide(self, events: Any, scores: Scores) -> Any:
        """Return which events pass: ``events * bool``, without None.

        The scores of masked rows (``on_error = "mask"``) are None: replace them by `ak.fill_none`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define decide(self, events, scores)")

    def _passing(self, events: Any, scores: Scores) -> tuple[Any, Scores]:
        if is_lazy(events):
            raise ConfigError(
                f"{type(self).__name__}: a SonicFilter does not filter dask-awkward arrays; use a "
                "SonicProcessor, and cut in its produce"
            )
        decided = self.decide(events, scores)
        if is_tracer(events):
            # The trace has to find all that produce reads if events pass.
            ak.typetracer.touch_data(decided)
            scores.passed = decided
            return events, scores
        try:
            passed = ak.Array(decided)
            got = passed.type
        except (TypeError, ValueError):  # such as the one bool of `ak.any` without axis
            got = repr(decided)
        # Numbers would select events by index, and None would be kept.
        if got != ak.types.ArrayType(ak.types.NumpyType("bool"), len(events)):
            raise InputError(
                f"{type(self).__name__}.decide must return one bool for each of {len(events)} "
                f"events, got {shortened(got)}"
            )
        overlap = scores.overlap
        kept = Scores({name: _cut(score, passed) for name, score in scores.items()})
        is_column = isinstance(overlap, (ak.Array, np.ndarray)) and overlap.ndim > 0
        is_column = is_column and len(overlap) == len(events)
        kept.overlap, kept.passed = overlap[passed] if is_column else overlap, passed
        if ak.any(passed):
            return events[passed], kept
        # An array of the same type without events, for which nothing is read.
        empty = events.layout.form.length_zero_array()
        return ak.Array(empty, behavior=events.behavior, attrs=events.attrs), kept


def _cut(scores: Any, passed: ak.Array) -> Any:
    if isinstance(scores, dict):  # of variations, or of columns
        return {name: _cut(each, passed) for name, each in scores.items()}
    return scores[ak.to_numpy(passed)]
