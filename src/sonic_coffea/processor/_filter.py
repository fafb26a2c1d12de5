"""The filter: `produce` gets only events whose scores pass."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np

from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts import is_lazy, is_tracer
from sonic_coffea.processor._mixin import Scores, SonicProcessor


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

    def _produce(self, events: Any, scores: Scores) -> tuple[Any, Any]:
        if is_lazy(events):
            raise ConfigError(
                f"{type(self).__name__} filters events that are read; on dask-awkward arrays, cut "
                "in the produce of a SonicProcessor"
            )
        decided = self.decide(events, scores)
        if is_tracer(events):
            # So that the trace finds all that produce reads, were there events that pass.
            ak.typetracer.touch_data(decided)
            scores.passed = decided
            return super()._produce(events, scores)
        passed = ak.Array([] if decided is None else decided)
        # Numbers would be taken for indices of events, and None be kept.
        if str(passed.type) != f"{len(events)} * bool":
            raise InputError(
                f"{type(self).__name__}.decide must return one bool for each of {len(events)} "
                f"events, got {passed.type}"
            )
        overlap = scores.overlap
        if isinstance(overlap, (ak.Array, np.ndarray)) and len(overlap) == len(events):
            overlap = overlap[passed]
        kept = Scores({name: _cut(score, passed) for name, score in scores.items()}, overlap)
        kept.passed = passed
        if ak.any(passed):
            return super()._produce(events[passed], kept)
        # No events of the same type, without reading any.
        empty = events.layout.form.length_zero_array()
        none = ak.Array(empty, behavior=events.behavior, attrs=events.attrs)
        return super()._produce(none, kept)


def _cut(scores: Any, passed: ak.Array) -> Any:
    if isinstance(scores, dict):  # of Variations
        return {variation: varied[passed] for variation, varied in scores.items()}
    return scores[passed]
