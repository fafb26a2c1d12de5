"""Networks of several folds: score an event by its fold's network, or by the mean of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import awkward as ak
import numpy as np
from awkward.contents import Content, NumpyArray
from numpy.typing import NDArray

from sonic_coffea.errors import ConfigError, InputError
from sonic_coffea.layouts import is_lazy, is_tracer, over_partitions
from sonic_coffea.model._model import Model
from sonic_coffea.model._pending import Deferred, Pending
from sonic_coffea.model._submission import Submission
from sonic_coffea.pool import Carrier, Deadline, Pool
from sonic_coffea.provenance import attributes
from sonic_coffea.reporting import Statistics
from sonic_coffea.reuse import Variations

# Names of the folds, and of objects that are a single array, among the arrays of a partition.
_FOLD, _OBJECTS = "fold=", "objects="


class Folds(Carrier):
    """Models of several folds with the same outputs.

    A simulated event is scored by the network that was not trained on it. Data are scored by all
    networks, and the scores are the mean. If the folds are versions of one model, ``version=`` of
    `Model.submit` can choose the version for each event, too.

    Parameters
    ----------
    models : sequence of Model
        One model for each fold, in order. Names, versions and transformations may differ.

    Examples
    --------
    >>> import sonic_coffea as sonic
    >>> models = [
    ...     sonic.Model(f"higgs_{k}", {"x": sonic.Row(["pt", "mass"])}, {"y": ["signal"]})
    ...     for k in range(3)
    ... ]
    >>> sonic.Folds(models)
    Folds(higgs_0, higgs_1, higgs_2)

    ``folds(events, fold=events.event % 3)`` scores each event by one of them, ``folds(events)`` by
    all.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = tuple(models)
        for model in self.models:
            if not isinstance(model, Model):
                raise ConfigError(f"Folds: expected models, got {type(model).__name__}")
        if len(self.models) < 2:
            raise ConfigError(f"Folds: expected two models or more, got {len(self.models)}")
        first = self.models[0]
        for model in self.models[1:]:
            if model.outputs != first.outputs:
                raise ConfigError(
                    f"Folds: models {first.name!r} and {model.name!r} give other outputs "
                    f"({first.outputs} and {model.outputs}); declare the same"
                )

    def __repr__(self) -> str:
        return f"Folds({self.name})"

    @property
    def name(self) -> str:
        """The names of the models."""
        return ", ".join(model.name for model in self.models)

    def check(self, pool: Pool | None = None) -> None:
        """Compare the declarations with the server's models; see `Model.check`."""
        for model in self.models:
            model.check(pool)

    def __call__(
        self,
        objects: Any,
        *,
        fold: Any = None,
        timeout_s: float | None = None,
        pool: Pool | None = None,
        on_error: str = "raise",
        deduplicate: bool = False,
    ) -> Any:
        """Score objects and wait for the result; see `submit`."""
        deadline = Deadline.after(timeout_s)
        pending = self.submit(
            objects, fold=fold, pool=pool, on_error=on_error, deduplicate=deduplicate
        )
        return pending.result_by(deadline)

    def submit(
        self,
        objects: Any,
        *,
        fold: Any = None,
        pool: Pool | None = None,
        on_error: str = "raise",
        deduplicate: bool = False,
    ) -> Pending:
        """Send objects, and return without waiting for their scores.

        Parameters
        ----------
        objects, pool, on_error, deduplicate
            As in `Model.submit`.
        fold : array of int, optional
            The fold of each event, ``events * int``, counted from 0. By default, all models score
            all events, and the scores are the mean; a mean is None if one of its scores is masked.
        """
        how: dict[str, Any] = {"on_error": on_error, "deduplicate": deduplicate}
        if isinstance(objects, Variations):
            if fold is not None:
                raise ConfigError("variations are scored by all folds; score them one by one")
            varied = {name: self(array, pool=pool, **how) for name, array in objects.items()}
            return Deferred(self.name, varied)
        if fold is None:
            self._check_means()
        if is_lazy(objects):
            return Deferred(self.name, self._lazily(objects, fold, pool, how))
        if is_tracer(objects):
            if isinstance(fold, ak.Array):
                ak.typetracer.touch_data(fold)
            first, *_ = [model.submit(objects).result() for model in self.models]
            return Deferred(self.name, first)
        chosen = None if fold is None else self._chosen(fold)
        sent: list[Pending] = []
        try:
            for number, model in enumerate(self.models):
                events = None if chosen is None else chosen == number
                submission = Submission(model, pool, events=events, **how)
                sent.append(submission.send(objects))
        except BaseException:
            for pending in sent:
                pending.cancel()
            raise
        return _Folded(self.name, sent, chosen)

    def _lazily(self, objects: Any, fold: Any, pool: Pool | None, how: Mapping[str, Any]) -> Any:
        """Return the scores of a dask-awkward array, or a dict of some, as another."""
        if pool is not None:
            raise ConfigError(
                "a lazy array is scored by the pools of the processes that compute it; name the "
                "servers with sonic.connect, and leave pool= out"
            )
        arrays = objects if isinstance(objects, dict) else {_OBJECTS: objects}
        if fold is not None:
            arrays = {**arrays, _FOLD: fold}
        token = "-".join(map(str, [*(m.config_hash for m in self.models), *how.values()]))
        score = partial(self._score_partition, **how)
        return over_partitions(score, arrays, label="folds", token=token)

    def _score_partition(self, arrays: dict[str, Any], **how: Any) -> Any:
        fold = arrays.pop(_FOLD, None)
        return self(arrays.get(_OBJECTS, arrays), fold=fold, **how)

    def _check_means(self) -> None:
        for name, output in self.models[0].outputs.items():
            whole = output.choose is not None or output.dtype.kind in "iubO"
            if whole or output.splits is not None:
                what = "lists of its own" if output.splits else "no fractions"
                raise ConfigError(
                    f"output {name!r} has no mean over folds, as it has {what}; say which fold "
                    f"scores each event: fold=events.event % {len(self.models)}"
                )

    def _chosen(self, fold: Any) -> NDArray[np.int64]:
        """Return the number of the model of each event."""
        folds = ak.to_numpy(fold, allow_missing=False) if isinstance(fold, ak.Array) else fold
        numbers = np.asarray(folds)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise InputError(
                f"expected a fold of each event as whole numbers, got {numbers.dtype} "
                f"{list(numbers.shape)}"
            )
        wrong = np.flatnonzero((numbers < 0) | (numbers >= len(self.models)))
        if len(wrong):
            raise InputError(
                f"event {wrong[0]} has fold {numbers[wrong[0]]}, and there are {len(self.models)}, "
                "counted from 0"
            )
        return numbers.astype(np.int64)


class _Folded(Pending):
    """The scores of several models that are on their way."""

    def __init__(
        self, name: str, sent: Sequence[Pending], chosen: NDArray[np.int64] | None
    ) -> None:
        self._model, self._sent, self._chosen = name, sent, chosen
        self.parts = [part for pending in sent for part in pending.parts]
        self.rows = sent[0].rows
        self.unsent = sum((pending.unsent for pending in sent), Statistics())

    def result_by(self, deadline: Deadline, *, progress: bool = False) -> Any:
        """Return the score of each event's fold, or the mean of all."""
        try:
            each = [pending.result_by(deadline, progress=progress) for pending in self._sent]
        except BaseException:
            self.cancel()
            raise
        if self._chosen is None:
            scores = ak.Array(ak.transform(_mean, *each, highlevel=False))
        else:
            place = np.arange(len(self._chosen))
            scores = ak.concatenate(each)[self._chosen * len(place) + place]
        return ak.Array(scores.layout, attrs=attributes(self.provenance()))

    def provenance(self) -> dict[str, Any]:
        """Return the provenance of the scores: of each model, side by side."""
        each = [pending.provenance() for pending in self._sent]

        def joined(key: str) -> str | None:
            return ", ".join(record[key] for record in each if record[key] is not None) or None

        return {
            **each[0],
            "model": self._model,
            **{key: joined(key) for key in ("version", "digest", "config_hash")},
            "servers": sorted({server for record in each for server in record["servers"]}),
        }


def _mean(contents: Sequence[Content], **_: Any) -> tuple[Content] | None:
    if not all(content.is_numpy for content in contents):
        return None
    numbers = [np.asarray(content.data) for content in contents]
    mean = np.mean(numbers, axis=0, dtype=np.float64)
    return (NumpyArray(mean.astype(numbers[0].dtype)),)
