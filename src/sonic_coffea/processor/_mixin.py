"""The mixin: `acquire` says what to score, `produce` gets the scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import awkward as ak

from sonic_coffea.errors import ConfigError, FieldError, nearest
from sonic_coffea.model import Deferred
from sonic_coffea.pool import Settings, adopt, carried
from sonic_coffea.processor._accumulate import Scored
from sonic_coffea.statistics import Statistics

if TYPE_CHECKING:
    from sonic_coffea.model import Model, Pending


class Scores(dict[str, Any]):
    """Scores by model; ``overlap`` holds what the processor's `overlap` returned."""

    overlap: Any = None

    def __missing__(self, name: str) -> Any:
        raise FieldError(f"acquire sent nothing to a model {name!r}; {nearest(name, self)}")


class SonicProcessor:
    """Mixin for coffea processors that score objects on servers.

    Write `acquire` and `produce`, and leave `process` to the mixin::

        class TopAnalysis(sonic.SonicProcessor, processor.ProcessorABC):
            models = {"top": model}

            def acquire(self, events):
                return {"top": events.FatJet}

            def produce(self, events, scores):
                return {"n_top": ak.sum(scores["top"].top > 0.9)}

    Requests leave when `acquire` returns; while the servers infer, `overlap` runs.

    Attributes
    ----------
    models : mapping
        The models, by the names that `acquire` and `produce` call them.
    on_error : {"raise", "mask"}
        What becomes of rows that servers lose for good, as in `Model.submit`.
    """

    models: Mapping[str, Model] = MappingProxyType({})
    on_error: str = "raise"

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
        with _missing_fields_explained():
            sent = self.acquire(events)
        pending = self._submit(sent)
        try:
            scores = Scores()
            with _missing_fields_explained():
                scores.overlap = self.overlap(events)
            for name, one in pending.items():
                scores[name] = one.result()
            with _missing_fields_explained():
                output = self.produce(events, scores)
        finally:
            for one in pending.values():
                one.cancel()
        waits = any(isinstance(one, Deferred) for one in pending.values())
        if type(output) is not dict or waits:
            return output
        statistics = Statistics(chunks=1, events=len(events))
        for one in pending.values():
            statistics += one.statistics
        return Scored(output, statistics)

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
