"""Several models, of which one scores each event or each object: by a field, or by its fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import awkward as ak
import numpy as np
import xxhash
from awkward.contents import Content, IndexedOptionArray, NumpyArray
from awkward.index import Index64

from sonic_coffea.errors import ConfigError, FieldError, InputError, brief, expect
from sonic_coffea.layouts import (
    Elements,
    Feature,
    Row,
    Source,
    check_index,
    is_tracer,
    over_partitions,
    records_of,
)
from sonic_coffea.model._model import Model
from sonic_coffea.model._pending import Pending
from sonic_coffea.model._submission import Submission, as_array
from sonic_coffea.pool import NEVER, Deadline, Pool
from sonic_coffea.reuse import Variations

# The fold of a call, or of a declaration, that does not say it.
_UNSAID: Any = ...


class Choice:
    """A model for each value of a field, with the same outputs.

    Parameters
    ----------
    models : mapping
        Two values or more, all whole numbers or all strings, each with its `Model`. Names, versions
        and transformations may differ.
    by : str
        A field, or for numbers an expression, of the objects, or of the events: ``"region"``,
        ``"abs(eta) < 1.5"`` (1 or 0). An object for which it is None gets no score, but None.

    Examples
    --------
    >>> import sonic_coffea as sonic
    >>> barrel, endcap = (
    ...     sonic.Model(name, {"x": sonic.Row(["pt", "eta"])}, {"y": ["photon"]})
    ...     for name in ("barrel", "endcap")
    ... )
    >>> sonic.Choice({"EB": barrel, "EE": endcap}, by="region")
    Choice(EB: barrel, EE: endcap; by 'region')
    """

    _what = "case"

    def __init__(self, models: Mapping[Any, Model], by: str) -> None:
        kind, is_dict = type(self).__name__, isinstance(models, Mapping)
        expect(is_dict and len(models) > 1, "a dict of two models or more", models, kind)
        first = next(iter(models.values()))
        for model in models.values():
            expect(isinstance(model, Model), "models", model, kind)
            if model.outputs != first.outputs:
                raise ConfigError(
                    f"{kind}: models {first.name!r} and {model.name!r} give other outputs "
                    f"({first.outputs} and {model.outputs}); declare the same"
                )
        are_alike = any(all(isinstance(key, of) for key in models) for of in (int, str))
        expect(are_alike, "whole numbers or strings as keys", list(models), kind)
        expect(isinstance(by, str), "a field or an expression as a str", by, kind)
        if isinstance(next(iter(models)), int):
            Feature(by, expression=by)  # raises if it cannot be read
        self._cases = dict(models)
        self._by: Any = by

    def __repr__(self) -> str:
        models = ", ".join(f"{key}: {model.name}" for key, model in self._cases.items())
        return f"{type(self).__name__}({models}; by {self._by!r})"

    @property
    def models(self) -> tuple[Model, ...]:
        """The models, in order."""
        return tuple(self._cases.values())

    @property
    def name(self) -> str:
        """The names of the models."""
        return ", ".join(model.name for model in self.models)

    @property
    def config_hash(self) -> str:
        """A hash of the declaration: of all models, and of what chooses between them."""
        hashes = {key: model.config_hash for key, model in self._cases.items()}
        declared = repr((type(self).__name__, hashes, self._by))
        return xxhash.xxh3_64_hexdigest(declared.encode())

    def check(self, pool: Pool | None = None) -> None:
        """Compare the declarations with the server's models; see `Model.check`."""
        for model in self.models:
            model.check(pool)

    @brief
    def __call__(self, objects: Any, *, timeout_s: float | None = None, **options: Any) -> Any:
        """Score objects and wait for the result; see `submit` for the options.

        Raises
        ------
        DeadlineError
            If `timeout_s` has passed; it includes the wait for the models' contracts.
        """
        deadline = Deadline.after(timeout_s)
        return self._send(objects, deadline, **options).result_by(deadline)

    @brief
    def submit(self, objects: Any, *, events: Any = None, **options: Any) -> Pending:
        """Send objects, and return without waiting for their scores.

        Parameters
        ----------
        objects : ak.Array, dict or Variations
            As in `Model.submit`.
        events : array of records, optional
            The events of the objects, which have the fields of `by` if the objects do not. A
            `SonicProcessor` passes its events.
        **options
            As in `Model.submit`; objects of no model have the default, too.

        Raises
        ------
        FieldError
            If neither objects nor events have the field.
        InputError
            If a value has no model, also where a mask leaves the object out.
        """
        return self._send(objects, NEVER, events=events, **options)

    def _send(self, objects: Any, deadline: Deadline, *, events: Any = None, **how: Any) -> Pending:
        by, case = how.pop(self._what, self._by), None
        for each in objects.values() if isinstance(objects, Variations) else [objects]:
            check_index(each, {"the events": events, f"the {self._what}s": by, **how})
        if by is _UNSAID:
            raise ConfigError(
                f"which fold scores each event? Declare it once, as sonic.Folds(models, "
                f'fold="event % {len(self.models)}"), or say fold=events.event % '
                f"{len(self.models)} where the objects are sent; for the mean of all models, "
                "fold=None"
            )
        if by is None:
            self._check_means()
        elif isinstance(by, str):
            case = self._cases_of(by, objects, events)
        else:
            case = self._numbered(by, None)
        chosen = {"case": case, "case_name": self._what, "deadline": deadline}
        return Submission.of(objects, *self.models, options=how, **chosen).send()

    def _check_means(self) -> None:
        for name, output in self.models[0].outputs.items():
            whole = output.choose is not None or output.dtype.kind in "iubO"
            if whole or output.splits is not None:
                what = "lists of its own" if output.splits else "no fractions"
                raise ConfigError(
                    f"output {name!r} has no mean over folds, as it has {what}; say which fold "
                    f"scores each event: fold=events.event % {len(self.models)}"
                )

    def _cases_of(self, by: str, objects: Any, events: Any) -> Any:
        """Return the numbers of the models by a field of the objects, or else of the events."""
        try:
            return self._numbered(objects, by)
        except FieldError as error:
            if events is None:
                remark = "if the events have it, pass them, too: events=events"
                raise error.because(remark) from None
            try:
                return self._numbered(events, by)
            except FieldError:
                raise error.because("nor have the events") from None

    def _numbered(self, values: Any, by: str | None) -> Any:
        """Return the numbers of the models; of variations, a dict of them."""
        if isinstance(values, Mapping if by is None else Variations):
            return {name: self._numbered(each, by) for name, each in values.items()}
        number = partial(numbered, keys=tuple(self._cases), by=by, what=by or self._what)
        token = repr((by, list(self._cases)))
        return over_partitions(number, values, label=self._what, token=token)


class Folds(Choice):
    """Models of several folds with the same outputs.

    A simulated event is scored by the network that was not trained on it. Data are scored by all
    networks, and the scores are the mean. If the folds are versions of one model, ``version=`` of
    `Model.submit` can choose the version for each event, too.

    Parameters
    ----------
    models : sequence of Model
        One model for each fold, in order. Names, versions and transformations may differ.
    fold : str or None, optional
        What calls that do not say ``fold=`` do. An expression of fields of the objects or the
        events gives the fold of each, counted from 0: ``"event % 3"``. None: all models score all
        objects, and the scores are the mean. By default, each call must say it.

    Examples
    --------
    >>> import sonic_coffea as sonic
    >>> models = [
    ...     sonic.Model(f"higgs_{k}", {"x": sonic.Row(["pt", "mass"])}, {"y": ["signal"]})
    ...     for k in range(3)
    ... ]
    >>> sonic.Folds(models, fold="event % 3")
    Folds(higgs_0, higgs_1, higgs_2; fold='event % 3')

    ``folds(events)`` scores each event by one of them, ``folds(events, fold=None)`` by all.
    """

    _what = "fold"

    def __init__(self, models: Sequence[Model], fold: str | None = _UNSAID) -> None:
        is_list = isinstance(models, Sequence)
        expect(is_list and len(models) > 1, "a list of two models or more", models, "Folds")
        is_declared = fold is not None and fold is not _UNSAID
        # Any expression passes the checks in the place of none.
        super().__init__(dict(enumerate(models)), fold if is_declared else "0")  # type: ignore[arg-type]
        self._by = fold

    def __repr__(self) -> str:
        fold = "" if self._by is _UNSAID else f"; fold={self._by!r}"
        return f"Folds({self.name}{fold})"

    @brief
    def submit(
        self, objects: Any, *, fold: Any = _UNSAID, events: Any = None, **options: Any
    ) -> Pending:
        """Send objects, and return without waiting for their scores.

        Parameters
        ----------
        objects : ak.Array, dict or Variations
            As in `Model.submit`.
        fold : array of int, str or None, optional
            The fold of each event, ``events * int``, or of each object, ``events * var * int``,
            counted from 0; None in it is no fold, and the score is None. Of `Variations`, one for
            all, or a dict with one for each. Or an expression, as in the declaration. None: all
            models score all objects, and the scores are the mean; a mean is None if one of its
            scores is masked. By default, as declared.
        events : array of records, optional
            The events of the objects, which have the fields of the expression if the objects do
            not. A `SonicProcessor` passes its events.

        **options
            As in `Model.submit`; objects of no fold have the default, too.

        Raises
        ------
        ConfigError
            If neither the call nor the declaration says which fold scores what.
        FieldError
            If neither objects nor events have a field of the expression.
        InputError
            If there is no such fold, or the array does not fit the objects.
        """
        option = {} if fold is _UNSAID else {"fold": fold}
        return self._send(objects, NEVER, events=events, **option, **options)


def numbered(values: Any, keys: Sequence[Any], by: str | None, what: str) -> ak.Array:
    """Return the place among `keys` of each value: ``events * int``, ``events * var * int``, ...

    Parameters
    ----------
    values : array, or records
        The values, or the records from which they are computed. None stays None.
    keys : sequence of int, or of str
        The values that there may be.
    by : str or None
        A field or an expression of the records; None if `values` are values.
    what : str
        The name of the values in messages.

    Raises
    ------
    FieldError
        If the records have no such field.
    InputError
        If a value is none of the keys.
    """
    records = {what: as_array(values, what)} if by is None else records_of(values)
    is_text = isinstance(keys[0], str)
    field = (by or what) if is_text else Feature(what, expression=by)
    row = Row(field, "string" if is_text else "float64", missing=keys[0])
    source = Source(records)
    (feature,) = row.features
    try:
        columns = row.bind(source).columns
        with np.errstate(all="ignore"):
            data, absent = Elements(columns, slice(0, len(columns.rows))).raw(feature)
    except InputError as error:
        raise error.within(what) from None
    is_none = np.zeros(len(data), np.bool_) if absent is None else absent
    numbers = np.full(len(data), -1)
    for number, key in enumerate(keys):
        np.copyto(numbers, number, where=data == (key.encode() if is_text else key))
    for unknown in np.flatnonzero((numbers < 0) & ~is_none)[:1].tolist():
        value = data[unknown].decode() if is_text else data[unknown]
        listed = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
        raise InputError(
            f"{what}: event {columns.rows.event_of(unknown)} has {value!s}, which has no "
            f"model; expected one of {listed}, or None for no model"
        )
    content: Content = NumpyArray(numbers)
    places = [source.place(path, reduction) for path, reduction in feature.terms]
    # By the type, which all chunks have.
    if any(place.rows.is_optional for place in places):
        index = np.where(is_none, -1, np.arange(len(numbers)))
        content = IndexedOptionArray.simplified(Index64(index), content)
    cases = columns.rows.unflatten(content)
    if is_tracer(records):
        return ak.Array(cases.layout.to_typetracer(forget_length=True))
    return cases
