"""The mixin: `acquire` says what to score, `produce` gets the scores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np

from sonic_coffea.errors import ConfigError, FieldError, InputError, nearest
from sonic_coffea.layouts import is_lazy, is_tracer
from sonic_coffea.pool import Settings, adopt, carried
from sonic_coffea.reporting import STATISTICS_KEY, Statistics

if TYPE_CHECKING:
    from sonic_coffea.model import Model, Pending


class Scores(dict[str, Any]):
    """Scores by model; ``overlap`` holds what the processor's `overlap` returned.

    In a `SonicFilter`, ``passed`` says which events of the chunk passed.
    """

    passed: Any = None

    def __init__(
        self, scores: Mapping[str, Any] = MappingProxyType({}), overlap: Any = None
    ) -> None:
        super().__init__(scores)
        self.overlap = overlap

    def __missing__(self, name: str) -> Any:
        raise FieldError(f"acquire sent nothing to a model {name!r}; {nearest(name, self)}")


@dataclass(slots=True)
class _Block:
    """Events whose scores are on their way, and the processor that works on them."""

    owner: SonicProcessor
    events: Any
    pending: dict[str, Pending]
    scores: Scores
    first: bool

    def cancel(self) -> None:
        """Abandon what is not answered yet."""
        for one in self.pending.values():
            one.cancel()


class SonicProcessor:
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
        The models, by the names that `acquire` and `produce` call them.
    on_error : {"raise", "mask"}
        What becomes of rows that servers lose for good, as in `Model.submit`.
    block_size : int or None
        With coffea's local executors, a chunk may be worked on in blocks of so many events: the
        next one is sent before the scores of one are waited for, so that the core works while the
        servers infer. `acquire`, `overlap` and `produce` see a block at a time, with its own
        ``entrystart`` and ``entrystop`` in the metadata, and what `produce` returns is accumulated.
        Each block has a copy of the processor: what is set on ``self`` is not there in the next.
        On dask, waiting chunks lend their threads instead.
    """

    models: Mapping[str, Model] = MappingProxyType({})
    on_error: str = "raise"
    block_size: int | None = None

    def acquire(self, events: Any) -> Mapping[str, Any]:
        """Return what to score: for each model, objects or a dict of its inputs.

        A model may be left out, and is then not in the scores of `produce`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define acquire(self, events)")

    def overlap(self, events: Any) -> Any:
        """Do work that needs no scores, while the servers infer; by default none.

        What it returns is ``scores.overlap`` in `produce`.
        """

    def produce(self, events: Any, scores: Scores) -> Any:
        """Return the accumulator of the chunk.

        Parameters
        ----------
        events : NanoEvents
            The chunk.
        scores : mapping
            For each model that `acquire` named, the scores, aligned with what was sent.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define produce(self, events, scores)"
        )

    def process(self, events: Any) -> Any:
        """Score a chunk: coffea calls this."""
        started: deque[_Block] = deque()
        outputs: list[Any] = []
        try:
            for owner, some in self._blocks(events):
                first = not started and not outputs
                started.append(SonicProcessor._start(owner, some, first=first))
                if len(started) > 1:
                    block = started.popleft()
                    outputs.append(SonicProcessor._finish(block.owner, block))
            outputs += [SonicProcessor._finish(block.owner, block) for block in started]
        finally:
            for block in started:
                block.cancel()
        if len(outputs) == 1:
            return outputs[0]
        from coffea.processor import accumulate

        return accumulate(outputs)

    def _blocks(self, events: Any) -> Iterator[tuple[SonicProcessor, Any]]:
        """Yield the events in blocks, and the processor that works on each."""
        size = self.block_size
        if size is None or _has_no_data(events) or len(events) <= size:
            yield self, events
            return
        if size < 1:
            raise ConfigError(f"block_size: expected at least 1 event, or None, got {size}")
        for start in range(0, len(events), size):
            yield self._twin(), _block_of(events, start, min(start + size, len(events)))

    def _twin(self) -> SonicProcessor:
        """Return a copy, as the next block's acquire runs before the produce of one.

        Not by `copy.copy`, which would take the pickle's ways.
        """
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def _start(self, events: Any, *, first: bool) -> _Block:
        """Send what a block's events have, and do what needs no scores."""
        with _missing_fields_explained():
            sent = self.acquire(events)
        block = _Block(self, events, self._submit(sent), Scores(), first)
        try:
            with _missing_fields_explained():
                block.scores.overlap = self.overlap(events)
        except BaseException:
            block.cancel()
            raise
        return block

    def _finish(self, block: _Block) -> Any:
        """Wait for a block's scores, and make its output."""
        try:
            for name, one in block.pending.items():
                block.scores[name] = one.result()
            with _missing_fields_explained():
                output = self._produce(block.events, block.scores)
        finally:
            block.cancel()
        if type(output) is not dict or _has_no_data(block.events):
            return output
        statistics = Statistics(chunks=int(block.first), events=len(block.events))
        for one in block.pending.values():
            statistics += one.statistics
        return {**output, STATISTICS_KEY: statistics.to_plain()}

    def _produce(self, events: Any, scores: Scores) -> Any:
        return self.produce(events, scores)

    def _submit(self, sent: Any) -> dict[str, Pending]:
        if not isinstance(sent, Mapping):
            raise ConfigError(
                f"{type(self).__name__}.acquire must return a dict of model name and objects, "
                f"got {type(sent).__name__}"
            )
        for name in sent:
            if name not in self.models:
                raise ConfigError(
                    f"{type(self).__name__}.acquire names model {name!r}; "
                    f"{nearest(name, self.models)}"
                )
        pending: dict[str, Pending] = {}
        try:
            for name, objects in sent.items():
                pending[name] = self.models[name].submit(objects, on_error=self.on_error)
        except BaseException:
            for one in pending.values():
                one.cancel()
            raise
        return pending

    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": self.__dict__, "settings": carried()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings: Settings | None = state["settings"]
        adopt(settings)
        self.__dict__.update(state["attributes"])


class SonicFilter(SonicProcessor):
    """Mixin for processors that only go on with events whose scores pass a decision.

    Write `acquire`, `decide` and `produce`. Where no event of a chunk passes, `produce` gets events
    of length zero, for which nothing is read: neither are the columns that only it needs. The
    scores are those of the events that passed, and so is what `overlap` returned, if that is an
    array of one for each event; ``scores.passed`` cuts anything else. Not for dask-awkward arrays::

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
        """Return which events pass: ``events * bool``, never None.

        Where rows were lost with ``on_error = "mask"``, say by `ak.fill_none` what becomes of them.
        """
        raise NotImplementedError(f"{type(self).__name__} must define decide(self, events, scores)")

    def _produce(self, events: Any, scores: Scores) -> Any:
        if is_lazy(events):
            raise ConfigError(
                f"{type(self).__name__} filters events that are read; on dask-awkward arrays, cut "
                "in the produce of a SonicProcessor"
            )
        decided = self.decide(events, scores)
        if is_tracer(events):
            # All that produce reads, were there events that pass.
            ak.typetracer.touch_data(decided)
            scores.passed = decided
            return self.produce(events, scores)
        passed = ak.Array([] if decided is None else decided)
        # Of numbers, or with None, the cut would be another one than was meant.
        if str(passed.type) != f"{len(events)} * bool":
            raise InputError(
                f"{type(self).__name__}.decide must return one bool for each of {len(events)} "
                f"events, got {passed.type}"
            )
        of_events = isinstance(scores.overlap, (ak.Array, np.ndarray))
        of_events = of_events and len(scores.overlap) == len(events)
        kept = Scores(
            {name: _cut(score, passed) for name, score in scores.items()},
            scores.overlap[passed] if of_events else scores.overlap,
        )
        kept.passed = passed
        return self.produce(events[passed] if ak.any(passed) else _nothing_of(events), kept)


def _has_no_data(events: Any) -> bool:
    """Whether events are those of a graph or of a trace, which have no length."""
    return is_lazy(events) or is_tracer(events)


def _block_of(events: Any, start: int, stop: int) -> Any:
    """Return some events, with metadata that say where in the file they are."""
    some = events[start:stop]
    metadata = ak.parameters(events).get("metadata")
    if not isinstance(metadata, Mapping) or "entrystart" not in metadata:
        return some
    first = metadata["entrystart"]
    own = {**metadata, "entrystart": first + start, "entrystop": first + stop}
    return ak.with_parameter(some, "metadata", own)


def _cut(scores: Any, passed: ak.Array) -> Any:
    if isinstance(scores, dict):  # of Variations
        return {name: one[passed] for name, one in scores.items()}
    return scores[passed]


def _nothing_of(events: ak.Array) -> ak.Array:
    """Return no events of the same type, without reading any."""
    empty = events.layout.form.length_zero_array()
    return ak.Array(empty, behavior=events.behavior, attrs=events.attrs)


@contextmanager
def _missing_fields_explained() -> Iterator[None]:
    """Name the nearest fields where the user's code asks for one that is not there."""
    try:
        yield
    except AttributeError as error:
        # awkward says which field is missing, not which there are.
        if not isinstance(error.obj, ak.Array) or not error.name:
            raise
        there = error.obj.fields
        missing = f"there is no field {error.name!r}; {nearest(error.name, there)}"
    else:
        return
    raise FieldError(missing)
