"""One call of a model: from arrays to requests on their way."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np

from sonic_coffea.errors import (
    ConfigError,
    ContractError,
    DeadlineError,
    InputError,
    ModelNotFoundError,
    ServerError,
    SonicError,
    nearest,
)
from sonic_coffea.layouts import (
    Inputs,
    Int64,
    Outputs,
    Structure,
    giving_back,
    is_lazy,
    is_tracer,
    number_of,
    over_partitions,
    trace,
)
from sonic_coffea.model._cases import as_array, as_mask, by_row, is_optional, values_of
from sonic_coffea.model._pending import Combined, Deferred, Pending
from sonic_coffea.pool import MASKABLE, NEVER, Deadline, Pool, current
from sonic_coffea.reuse import Part, ScoreCache, Variations

if TYPE_CHECKING:
    from sonic_coffea.model._declaration import Declaration
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")

# The name of the objects among the arrays of a partition.
_OBJECTS = "objects="

_recorded: ContextVar[list[Pending] | None] = ContextVar("sonic_recorded", default=None)


@contextlib.contextmanager
def recorded(calls: list[Pending]) -> Iterator[None]:
    """Append the calls that this thread makes meanwhile to a list."""
    token = _recorded.set(calls)
    try:
        yield
    finally:
        _recorded.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """Models, and the options of `Model.submit` with which objects are sent.

    Attributes
    ----------
    of_partition : bool
        Whether the objects are a partition of a lazy array, whose type is known beforehand.
    case : ak.Array or None
        The number of the model that scores each event, or each object; None where no model does.
        Without it, all models score all objects, and the scores are the mean.
    case_name : str
        The name of the numbers in messages.
    mask : ak.Array or None
        Which events, or objects, are scored.
    default : float or None
        The score of those that are not.
    """

    models: tuple[Declaration, ...]
    pool: Pool | None = None
    on_error: str = "raise"
    version: Any = None
    deduplicate: bool = False
    deadline: Deadline = NEVER
    of_partition: bool = False
    case: Any = None
    case_name: str = "fold"
    mask: Any = None
    default: float | None = None

    @property
    def name(self) -> str:
        """The names of the models."""
        return ", ".join(model.name for model in self.models)

    def send(self, objects: Any) -> Pending:
        """Send objects that are in memory, lazy, traced, or variations of each other."""
        pending = self._send(objects)
        pending.give_back = giving_back(objects)
        if isinstance(objects, Variations):
            pending.give_back = {name: giving_back(each) for name, each in objects.items()}
        if (calls := _recorded.get()) is not None:
            calls.append(pending)
        return pending

    def _send(self, objects: Any) -> Pending:
        if self.on_error not in ON_ERROR:
            raise ConfigError(f"no on_error {self.on_error!r}; {nearest(self.on_error, ON_ERROR)}")
        for model in self.models:
            if self.version is not None and model.version is not None:
                raise ConfigError(
                    f"model {model.name!r} is declared with version {model.version}; leave that out"
                )
        if self.default is not None:
            number_of(self.default, "expected default to be a number")
            if self.mask is None and self.case is None:
                raise ConfigError("default= is the score of objects that mask= leaves out")
        if isinstance(objects, Variations):
            return self._send_variations(objects)
        if is_lazy(objects):
            return self._lazy(objects)
        if is_tracer(objects):
            return Deferred(self.name, self._trace(objects))
        return self._send_in_memory(objects)

    def _send_in_memory(self, objects: Any) -> Pending:
        sent: list[Pending] = []
        try:
            for number, model in enumerate(self.models):
                sent.append(self._submit(model, number, objects))
        except BaseException:
            for pending in sent:
                pending.cancel()
            raise
        numbers = self._numbers(sent[0].rows)
        if len(sent) == 1 and numbers is None:
            return sent[0]
        options = {"optional": self._is_optional, "default": self.default}
        return Combined(self.name, sent, numbers, options, is_mean=self.case is None)

    def _numbers(self, rows: Structure) -> Int64 | None:
        """Return the number of the model that scores each row, -1 for none; None if all do."""
        if self.case is None and self.mask is None:
            return None
        numbers = np.zeros(len(rows), np.int64)
        if self.case is not None:
            numbers = by_row(rows, self.case, self.case_name)
        if self.mask is not None:
            numbers[by_row(rows, as_mask(self.mask), "mask") != 1] = -1
        return numbers

    @property
    def _is_optional(self) -> bool:
        """Whether objects that are there may have no score, by the types of the options."""
        is_left_out = self.case is not None and is_optional(self.case)
        return self.default is None and (is_left_out or self.mask is not None)

    @property
    def _arrays(self) -> dict[str, Any]:
        """The options that are arrays, with a value for each event or object."""
        each = {"case": self.case, "mask": self.mask}
        if not _is_single(self.version):
            each["version"] = self.version
        return {name: array for name, array in each.items() if array is not None}

    def _label(self, option: str) -> str:
        return self.case_name if option == "case" else option

    def _send_variations(self, objects: Variations) -> Pending:
        if objects.deferred:
            # Their numbers of events are not known, so that they cannot be sent together.
            each = {}
            for name, array in objects.items():
                own = {option: _of_variation(a, name) for option, a in self._arrays.items()}
                each[name] = replace(self, **own)._send(array).result()  # noqa: SLF001
            return Deferred(self.name, each)
        together, lengths = objects.together()
        joined = {
            option: _repeated(array, lengths, self._label(option))
            for option, array in self._arrays.items()
        }
        pending = replace(self, **joined, deduplicate=True)._send(together)  # noqa: SLF001
        pending.lengths = lengths
        return pending

    def _trace(self, objects: Any) -> ak.Array:
        """Return what stands for the scores of arrays without data."""
        for array in self._arrays.values():
            ak.typetracer.touch_data(array)
        optional = self._is_optional
        for model in self.models:
            with model.hinting(objects):
                scores = trace(model.inputs, model.outputs, objects, optional=optional)
        return scores

    def _submit(self, model: Declaration, number: int, objects: Any) -> Pending:
        inputs = model.bind(objects)
        outputs = Outputs.of(model.outputs, inputs)
        pending = Pending(model, inputs.rows, outputs)
        numbers = self._numbers(inputs.rows)
        if numbers is not None:
            wanted = 0 if self.case is None else number
            inputs = inputs.only(np.flatnonzero(numbers == wanted))
        if len(inputs) == 0:
            self._expect(model, outputs, inputs)
            return pending
        inputs.load()
        pool = self._pool_of(model)
        try:
            for version, rows in self._by_version(model, inputs):
                contract = self._contract(model, pool, version, rows)
                if contract is None:
                    pending.lose(rows.selection(0, len(rows)), len(rows))
                    continue
                self._set_shapes(model, outputs, contract)
                part = Part(
                    contract,
                    replace(rows, without_axis=model.inputs_without_axis(contract)),
                    replace(outputs, without_axis=model.outputs_without_axis(contract)),
                    version=version,
                    mask=self.on_error == "mask",
                    deduplicate=self.deduplicate,
                    cache=self._cache(model, pool, contract),
                    pool=pool,
                    deadline=self.deadline,
                )
                pending.parts.append(part)
                pool.submit(part.call)
        except BaseException:
            pending.cancel()
            raise
        return pending

    def _pool_of(self, model: Declaration) -> Pool:
        return current(model.pool_of_pickle) if self.pool is None else self.pool

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
        try:
            anew = pool.settings.cache is not None
            contract = pool.contract(model.name, version, anew=anew, deadline=self.deadline)
            return model.fitted(contract, server=", ".join(pool.settings.servers))
        except (ServerError, DeadlineError) as problem:
            error = problem.at(events=rows.events_of(0, len(rows)))
            mask = self.on_error == "mask" and not self.deadline.over
            maskable = isinstance(error, MASKABLE) and not isinstance(error, ModelNotFoundError)
            if not (mask and maskable):
                raise error from problem.__cause__
            logger.warning("%s; all %d rows are None", error, len(rows))
            return None

    def _cache(self, model: Declaration, pool: Pool, contract: Contract) -> ScoreCache | None:
        """Return the cache of scores; None if there is none, or rows are not told apart."""
        settings = pool.settings
        whole = [name for name, layout in model.inputs.items() if not layout.stacks]
        whole += [name for name, output in model.outputs.items() if output.splits is not None]
        if model.one_request_per == "event":
            whole += list(model.inputs)
        if whole and self.deduplicate:
            raise ConfigError(
                f"model {model.name!r}: rows of {whole[0]!r} are not told apart, as it is one "
                "tensor for all; leave deduplicate out"
            )
        if settings.cache is None or whole:
            return None
        if contract.digest or settings.cache_trusts_versions:
            return ScoreCache(settings.cache, settings.cache_bytes)
        _warn_of_missing_digest(model.name, contract.version)
        return None

    def _by_version(
        self, model: Declaration, inputs: Inputs
    ) -> Iterator[tuple[str | None, Inputs]]:
        """Yield the versions that score rows, and their rows."""
        if _is_single(self.version):
            yield model.version if self.version is None else str(self.version), inputs
            return
        versions = as_array(self.version, "version")
        row, value = values_of(inputs.rows, versions, "version")
        if value.dtype.kind not in "iuU":
            raise InputError(f"expected versions as whole numbers, got {versions.type}")
        every = np.full(len(inputs.rows), "", object)
        every[row] = value.astype(str)
        rows = inputs.numbers(0, len(inputs))
        of_rows = every[rows]
        if not of_rows.all():
            raise InputError("expected a version for each event, got None for some")
        for version in dict.fromkeys(of_rows):
            yield version, inputs.only(rows[of_rows == version])

    def _lazy(self, objects: Any) -> Pending:
        if self.pool is not None:
            raise ConfigError(
                "a lazy array is scored by the pools of the processes that compute it; name the "
                "servers with sonic.connect, and leave pool= out"
            )
        arrays = objects if isinstance(objects, dict) else {_OBJECTS: objects}
        arrays = {**arrays, **{f"{self._label(o)}=": array for o, array in self._arrays.items()}}
        label = f"sonic-{self.name}"
        version = self.version if _is_single(self.version) else None
        options = (self.on_error, version, self.deduplicate, self.default)
        token = "-".join(map(str, [*(model.config_hash for model in self.models), *options]))
        alone = replace(self, version=version, case=None, mask=None, deadline=NEVER)
        score = replace(alone, of_partition=True).score_partition
        return Deferred(self.name, over_partitions(score, arrays, label=label, token=token))

    def score_partition(self, arrays: dict[str, Any]) -> Any:
        """Score the objects of a partition, with the options of each event or object."""
        own = {
            option: arrays.pop(f"{self._label(option)}=")
            for option in ("case", "mask", "version")
            if f"{self._label(option)}=" in arrays
        }
        return replace(self, **own).score(arrays.get(_OBJECTS, arrays))

    def score(self, objects: Any) -> Any:
        """Send objects, and wait for their scores."""
        return self.send(objects).result()


@cache
def _warn_of_missing_digest(model: str, version: str) -> None:
    """Warn, once in a process rather than at every chunk."""
    logger.warning(
        "scores of %r are not kept: its servers do not all say what file version %r is (a fallback "
        "never does); cache_trusts_versions=True takes the number's word for it",
        model,
        version,
    )


def _is_single(version: Any) -> bool:
    """Return whether it is a version, or None, rather than a version for each event."""
    return version is None or isinstance(version, (str, int, np.integer))


def _of_variation(values: Any, name: str) -> Any:
    return values[name] if isinstance(values, Mapping) else values


def _repeated(values: Any, lengths: Mapping[str, int], what: str) -> Any:
    """Return the values of the events of all variations, one variation after another."""
    each = {name: _of_variation(values, name) for name in lengths}
    for name, length in lengths.items():
        if length != len(each[name]):
            raise InputError(
                f"variation {name!r} has {length} events, and there are {len(each[name])} {what}s; "
                "vary the objects of all events, or score variations one by one"
            )
    return ak.concatenate(list(each.values()))
