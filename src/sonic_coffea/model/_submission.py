"""One call of a model: from arrays to requests on their way."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import awkward as ak
import numpy as np
from awkward.contents import EmptyArray, IndexedOptionArray, UnmaskedArray
from awkward.index import Index64

from sonic_coffea.errors import (
    ConfigError,
    ContractError,
    DeadlineError,
    InputError,
    ModelNotFoundError,
    ServerError,
    SonicError,
    require,
    shortened,
)
from sonic_coffea.layouts import (
    Inputs,
    Int64,
    Layout,
    Outputs,
    Source,
    Structure,
    array_of,
    check_index,
    checked,
    giving_back,
    is_lazy,
    is_tracer,
    lazy_file,
    load_loop,
    over_partitions,
)
from sonic_coffea.model._declaration import Declaration, warn_once
from sonic_coffea.model._pending import Pending
from sonic_coffea.pool import MASKABLE, NEVER, Deadline, Pool, current
from sonic_coffea.reporting import Statistics
from sonic_coffea.reuse import OBJECTS, Part, ScoreCache, Variations, follows_index
from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")
_OPTIONS = ("pool", "on_error", "version", "deduplicate", "mask", "default")

# The name of the file's own events among the arrays of a partition.
_FILE = "the file"


class _Recorded(threading.local):
    """The lists of a thread. Its context would reach the tasks that dask starts while it waits."""

    lists: tuple[list[Pending], ...] = ()


_recorded = _Recorded()


@contextlib.contextmanager
def recorded(calls: list[Pending]) -> Iterator[None]:
    """Append the calls that this thread makes meanwhile to a list, and to those around it."""
    around = _recorded.lists
    _recorded.lists = (*around, calls)
    try:
        yield
    finally:
        _recorded.lists = around


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """Objects, the models that score them, and the options of `Model.submit`.

    Attributes
    ----------
    objects : ak.Array, dict or Variations
        The objects, which are in memory, lazy, traced, or variations of each other.
    version : str, int or array, optional
        The version that scores the rows, or that of each event or object.
    mask : array, optional
        Which events, or objects, are scored.
    case : array, optional
        The number of the model that scores each event, or each object; None where no model does.
        Without it, all models score all objects, and the scores are the mean.
    case_name : str
        The name of the numbers in messages.
    default : float or None
        The score of those that are not scored.
    of_partition : bool
        Whether the objects are a partition of a lazy array, whose type is known beforehand.
    """

    models: tuple[Declaration, ...]
    objects: Any
    pool: Pool | None = None
    on_error: str = "raise"
    version: Any = None
    deduplicate: bool = False
    mask: Any = None
    default: float | None = None
    deadline: Deadline = NEVER
    case: Any = None
    case_name: str = "fold"
    of_partition: bool = False

    @classmethod
    def of(
        cls, objects: Any, *models: Declaration, options: Mapping[str, Any], **others: Any
    ) -> Submission:
        """Return objects and models with the options of `Model.submit` that a user gave."""
        require(options, _OPTIONS, "submit has no option")
        return cls(models, objects, **options, **others)

    def send(self) -> Pending:
        """Send the objects."""
        require([self.on_error], ON_ERROR, "no on_error")
        for model in self.models:
            if self.version is not None and model.version is not None:
                declared = f"model {model.name!r} is declared with version {model.version}"
                raise ConfigError(f"{declared}; leave version= out")
        if self.default is not None:
            checked("number", self.default, "expected default to be")
            if self.mask is None and self.case is None:
                raise ConfigError("default= is the score of objects that mask= leaves out")
        if isinstance(self.objects, Variations):
            return self._send_variations(self.objects)
        arrays = self._packed(self.objects)
        if is_lazy(arrays):
            return self._lazy(arrays)
        if is_tracer(self.objects):
            return Pending(self.models, ready=self._trace())
        return self._send_in_memory()

    def _send_in_memory(self) -> Pending:
        bound = self._bound()
        rows = bound[0][0].rows
        numbers = self._numbers(rows)
        pending = Pending(
            self.models,
            rows,
            [outputs for _, outputs in bound],
            numbers,
            is_mean=self.case is None,
            is_optional=self._is_optional,
            default=self.default,
        )
        try:
            for number, (inputs, outputs) in enumerate(bound):
                some = inputs
                if numbers is not None:
                    case = 0 if self.case is None else number
                    some = inputs.only(np.flatnonzero(numbers == case))
                self._submit(pending, number, some, outputs)
        except BaseException:
            pending.cancel()
            raise
        pending.give_back = giving_back(self.objects)
        for calls in _recorded.lists:
            calls.append(pending)
        return pending

    def _bound(self) -> list[tuple[Inputs, Outputs]]:
        """Return the inputs and outputs of each model, which models share where they are equal."""
        bound: list[tuple[Inputs, Outputs]] = []
        first = self.models[0]
        for model in self.models:
            # In the same order, too: a `Mask`, or an output, may belong to the first of them.
            is_same = [*model.inputs.items()] == [*first.inputs.items()]
            is_same = is_same and model.one_request_per == first.one_request_per
            inputs = bound[0][0] if bound and is_same else model.bind(self.objects)
            if bound and not is_same:
                names = f"model {first.name!r}", f"model {model.name!r}"
                bound[0][0].rows.check_same(inputs.rows, names)
            each = model.outputs.values()
            # Outputs of rows are the same whatever the inputs; of a mean, each model has its own.
            is_shared = is_same or all(output.per == "row" for output in each)
            is_shared = is_shared and model.outputs == first.outputs and self.case is not None
            if bound and is_shared and all(output.is_typed for output in each):
                bound.append((inputs, bound[0][1]))
            else:
                ordered = {name: model.outputs[name] for name in first.outputs}
                bound.append((inputs, Outputs.of(ordered, inputs)))
        return bound

    def _numbers(self, rows: Structure) -> Int64 | None:
        """Return the number of the model that scores each row, -1 for none; None if all do."""
        if self.case is None and self.mask is None:
            return None
        numbers = np.zeros(len(rows), np.int64)
        if self.case is not None:
            numbers = by_row(rows, self.case, self.case_name)
        if self.mask is not None:
            mask = as_array(self.mask, "mask", "True or False", "b")
            numbers[by_row(rows, mask, "mask") != 1] = -1
        return numbers

    @property
    def _is_optional(self) -> bool:
        """Whether objects that are there may have no score, by the types of the options."""
        is_optional = self.case is not None and Source(self.case).place(()).rows.is_optional
        return self.default is None and (self.mask is not None or is_optional)

    @property
    def _arrays(self) -> dict[str, Any]:
        """The options that are arrays, with a value for each event or object, by their names."""
        each = {self.case_name: self.case, "mask": self.mask}
        if not _is_single(self.version):
            each["version"] = self.version
        return {name: array for name, array in each.items() if array is not None}

    def _packed(self, objects: Any, variation: Any = None) -> dict[Any, Any]:
        """Return the objects, and the options that are arrays, as they are for a variation."""
        packed = {**objects} if isinstance(objects, dict) else {OBJECTS: objects}
        for what, array in self._arrays.items():
            is_each = isinstance(array, Mapping)
            if is_each:
                require([variation], array, f"no {what} for variation", InputError)
            packed[f"the {what}s"] = array[variation] if is_each else array
        check_index(packed)
        return packed

    def _with(self, arrays: dict[Any, Any]) -> Submission:
        """Return the same with other objects and options, which are packed."""
        names = {"case": self.case_name, "mask": "mask", "version": "version"}
        keys = {option: f"the {name}s" for option, name in names.items()}
        own = {option: arrays.pop(key) for option, key in keys.items() if key in arrays}
        return replace(self, objects=arrays.get(OBJECTS, arrays), **own)

    def _send_variations(self, objects: Variations) -> Pending:
        for what, array in self._arrays.items():
            if isinstance(array, Mapping):
                require(array, objects, f"{what} is of no variation", InputError)
        packed = Variations({name: self._packed(each, name) for name, each in objects.items()})
        if packed.deferred:
            # Their numbers of events are not known, so that they cannot be sent together.
            each = {name: self._with(arrays).send().result() for name, arrays in packed.items()}
            return Pending(self.models, ready=each)
        joined, lengths = packed.together(self._layouts)
        equal_once = self.deduplicate or not any(map(_joint_tensor, self.models))
        pending = replace(self._with(joined), deduplicate=equal_once).send()
        pending.lengths = lengths
        pending.give_back = {name: giving_back(each) for name, each in objects.items()}
        return pending

    @property
    def _layouts(self) -> list[tuple[str, Layout]]:
        """The layouts of all models, by the names of their inputs."""
        return [named for model in self.models for named in model.inputs.items()]

    def _trace(self) -> ak.Array:
        """Return what stands for the scores of arrays without data."""
        for array in self._arrays.values():
            ak.typetracer.touch_data(array)
        inputs, outputs = self._bound()[0]  # outputs are in the order of the first model
        content = outputs.content(optional=True)
        if self._is_optional:
            content = UnmaskedArray.simplified(content)
        scores = inputs.rows.unflatten(content)
        return ak.Array(scores.layout.to_typetracer(forget_length=True))

    def _lazy(self, arrays: dict[Any, Any]) -> Pending:
        # The models may be changed, and others connected, before the scores are computed.
        models = tuple(map(copy, self.models))
        alone = self._with(dict.fromkeys(arrays))
        alone = replace(alone, models=models, pool=None, deadline=NEVER, of_partition=True)
        options = (self.on_error, alone.version, self.deduplicate, self.default)
        servers = list[Any]()  # what is persisted under a key has the scores of its servers
        try:
            for model in models:
                model.pool_of_pickle = pool = model.pool_of(self.pool)
                servers.append(sorted(pool.settings.servers))
        except ConfigError:
            if self.pool is not None:
                raise  # without it, servers may be known where the scores are computed
        hashes = [model.config_hash for model in self.models]
        token = "-".join(map(str, [*hashes, *options, *servers]))
        if any(follows_index(layout) for _, layout in self._layouts):
            records = self.objects.values() if isinstance(self.objects, dict) else [self.objects]
            files = [file for file in map(lazy_file, records) if file is not None]
            arrays |= {_FILE: files[0]} if files else {}
        label = f"sonic-{', '.join(model.name for model in self.models)}"
        scores = over_partitions(alone.score_partition, arrays, label=label, token=token)
        return Pending(self.models, ready=scores)

    def score_partition(self, arrays: dict[str, Any]) -> Any:
        """Score the objects of a partition, with the options of each event or object."""
        if (file := arrays.pop(_FILE, None)) is not None:
            attrs = {"@original_array": file}
            arrays = {name: ak.Array(array, attrs=attrs) for name, array in arrays.items()}
        return self._with(arrays).send().result()

    def _submit(self, pending: Pending, number: int, inputs: Inputs, outputs: Outputs) -> None:
        """Send the rows of a model, by versions."""
        model = self.models[number]
        if len(inputs) == 0:
            self._expect(model, outputs, inputs)
            return
        load_loop()
        pool = self._pool_of(model)
        for version, rows in self._by_version(model, inputs):
            contract = self._contract(model, pool, version, rows)
            if contract is None:
                lost = Statistics(objects=len(rows), masked=len(rows))
                pool.count(lost)
                pending.unsent += lost
                pending.lost.append(rows.selection(0, len(rows)))
                continue
            self._set_shapes(model, outputs, contract)
            part = Part(
                contract,
                replace(rows, without_axis=model.inputs_without_axis(contract)),
                replace(outputs, without_axis=model.outputs_without_axis(contract)),
                number=number,
                version=version,
                mask=self.on_error == "mask",
                deduplicate=self.deduplicate,
                cache=self._cache(model, pool, contract),
                pool=pool,
                deadline=self.deadline,
            )
            pending.parts.append(part)
            pool.submit(part.call)

    def _pool_of(self, model: Declaration) -> Pool:
        """Return the pool of a call; of a partition, that of the call that made the lazy array."""
        return current(model.pool_of_pickle) if self.of_partition else model.pool_of(self.pool)

    def _expect(self, model: Declaration, outputs: Outputs, inputs: Inputs) -> None:
        """Set the shapes of outputs that declare none, where there is no object to score.

        So all chunks have the same type. If no server tells the shape, the output is a number.
        """
        if all(output.is_typed for output in model.outputs.values()):
            return
        version = next(self._by_version(model, inputs))[0] if _is_single(self.version) else None
        with contextlib.suppress(SonicError):
            pool = self._pool_of(model)
            contract = pool.contract(model.name, version, deadline=self.deadline)
            self._set_shapes(model, outputs, contract)

    def _set_shapes(self, model: Declaration, outputs: Outputs, contract: Contract) -> None:
        """Set the shapes of outputs; those of a lazy array must be numbers, or declared."""
        whole = model.outputs_without_axis(contract)
        for spec in contract.outputs:
            declaration = model.outputs.get(spec.name)
            if declaration is None:
                continue
            shape = spec.whole_shape if spec.name in whole else spec.shape
            inner = outputs.each[spec.name].inner(shape)
            if self.of_partition and not declaration.is_typed and inner not in ((), (1,)):
                raise ContractError(
                    f"output {spec.name!r} has shape {list(inner)} a {declaration.per}, which the "
                    f"type of a lazy array did not know; declare it, as "
                    f"sonic.Output(shape={inner}), or with labels",
                    model=model.name,
                    version=contract.version,
                )
            outputs.each[spec.name].expect(shape)

    def _contract(
        self, model: Declaration, pool: Pool, version: str | None, rows: Inputs
    ) -> Contract | None:
        """Return the servers' contract; None if no server has one, and the rows are masked."""
        ask = partial(pool.contract, model.name, version, deadline=self.deadline)
        compare = partial(model.compare, server=", ".join(pool.settings.servers))
        try:
            with contextlib.suppress(ContractError):  # the servers may have another one by now
                return compare(ask(anew=pool.settings.cache is not None))
            return compare(ask(anew=True))
        except (ServerError, DeadlineError) as problem:
            events = rows.events_of(0, len(rows))
            mask = self.on_error == "mask" and not self.deadline.over
            maskable = isinstance(problem, MASKABLE) and not isinstance(problem, ModelNotFoundError)
            if not (mask and maskable):
                # Not as a variable: its traceback would refer to itself, and to the rows.
                raise problem.at(events=events) from problem.__cause__
            logger.warning("%s; all %d rows are None", problem.at(events=events), len(rows))
            return None

    def _cache(self, model: Declaration, pool: Pool, contract: Contract) -> ScoreCache | None:
        """Return the cache of scores; None if there is none, or rows are not told apart."""
        settings, joint = pool.settings, _joint_tensor(model)
        if joint is not None and self.deduplicate:
            raise ConfigError(
                f"model {model.name!r}: rows of {joint!r} are not told apart, as it is one "
                "tensor for all; leave deduplicate out"
            )
        if settings.cache is None or joint is not None:
            return None
        if contract.digest or settings.cache_trusts_versions:
            return ScoreCache(settings.cache, settings.cache_bytes)
        warn_once(
            "scores of %r are not kept: its servers do not all say what file version %r is (a "
            "fallback never does); cache_trusts_versions=True takes the number's word for it",
            model.name,
            contract.version,
        )
        return None

    def _by_version(
        self, model: Declaration, inputs: Inputs
    ) -> Iterator[tuple[str | None, Inputs]]:
        """Yield the versions that score rows, and their rows."""
        if _is_single(self.version):
            yield model.version if self.version is None else str(self.version), inputs
            return
        versions = as_array(self.version, "version", "a whole number", "iu")
        rows = inputs.numbers(0, len(inputs))
        of_rows = by_row(inputs.rows, versions, "version")[rows]
        if np.any(of_rows < 0):
            raise InputError("expected a version for each event, got None for some")
        for version in dict.fromkeys(of_rows.tolist()):
            yield str(version), inputs.only(rows[of_rows == version])


def _joint_tensor(model: Declaration) -> str | None:
    """Return a tensor that is one for all rows of a request, which are not told apart in it."""
    joint = [name for name, layout in model.inputs.items() if not layout.stacks]
    joint += [name for name, output in model.outputs.items() if output.splits is not None]
    if model.one_request_per == "event":
        joint += list(model.inputs)
    return next(iter(joint), None)


def _is_single(version: Any) -> bool:
    """Return whether it is a version, or None, rather than a version for each event."""
    return version is None or isinstance(version, (str, int, np.integer))


def as_array(values: Any, what: str, expected: str = "one value", kinds: str = "") -> ak.Array:
    """Return values of events or of objects as an array, whose dtype is of one of some kinds."""
    try:
        array = array_of(values)
    except InputError:
        raise InputError(f"{what}: expected an array, got {type(values).__name__}") from None
    node = None
    with contextlib.suppress(InputError):
        node = Source(array).place(()).node
    dtype: Any = getattr(node, "dtype", None)
    fits = not kinds or getattr(node, "is_unknown", False) or (dtype and dtype.kind in kinds)
    if node is None or node.is_record or node.is_union or not fits:
        got = shortened(array.type)
        raise InputError(f"{what}: expected {expected} for each event or object, got {got}")
    return array


def by_row(rows: Structure, numbers: ak.Array, what: str) -> Int64:
    """Return the number of each row, given the numbers of events or of objects; -1 for None."""
    values, index = values_of(rows, numbers, what)
    each = np.append(ak.to_numpy(values).astype(np.int64), -1)
    return each[index]


def values_of(rows: Structure, values: ak.Array, what: str) -> tuple[ak.Array, Int64]:
    """Return the values of events or of objects in one list, and which one each row has, or -1."""
    if len(values) != rows.events:
        raise InputError(f"expected a {what} for each of {rows.events} events, got {len(values)}")
    if values.ndim > 1 and rows.outer is not None:
        # A list that is None, as after ak.mask of events, has no value for any of its objects.
        here = rows.unflatten(IndexedOptionArray(Index64(np.full(len(rows), -1)), EmptyArray()))
        absent = ak.to_numpy(ak.is_none(values)) | ak.to_numpy(ak.is_none(here))
        if absent.any():
            places = np.arange(len(values)) + np.where(absent, len(values), 0)
            values = ak.concatenate([values, here])[places]
    place: Any = Source(values).place(())
    index = rows.align(place.rows, ("the objects", f"the {what}s"))
    return ak.Array(place.node[place.at]), np.arange(len(rows)) if index is None else index
