"""One call of a model: from arrays to requests on their way."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from numpy.typing import NDArray

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
from sonic_coffea.layouts import Inputs, Outputs, is_lazy, is_tracer, over_partitions, trace
from sonic_coffea.model._pending import Deferred, Pending
from sonic_coffea.pool import MASKABLE, NEVER, Deadline, Pool, current
from sonic_coffea.reuse import Part, ScoreCache, Variations

if TYPE_CHECKING:
    from sonic_coffea.model._declaration import Declaration
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """A model, and the options of `Model.submit` with which objects are sent.

    Attributes
    ----------
    of_partition : bool
        Whether the objects are a partition of a lazy array, whose type is known beforehand.
    events : array of bool or None
        The events whose objects are sent; None for all.
    """

    model: Declaration
    pool: Pool | None = None
    on_error: str = "raise"
    version: Any = None
    deduplicate: bool = False
    deadline: Deadline = NEVER
    of_partition: bool = False
    events: NDArray[np.bool_] | None = None

    def send(self, objects: Any) -> Pending:
        """Send objects that are in memory, lazy, traced, or variations of each other."""
        version = self.version
        if self.on_error not in ON_ERROR:
            raise ConfigError(f"no on_error {self.on_error!r}; {nearest(self.on_error, ON_ERROR)}")
        if version is not None and self.model.version is not None:
            raise ConfigError(
                f"model {self.model.name!r} is declared with version {self.model.version}; leave "
                "that out"
            )
        if isinstance(objects, Variations):
            if objects.deferred:
                # Their numbers of events are not known, so that they cannot be sent together.
                each = {name: self.send(array).result() for name, array in objects.items()}
                return Deferred(self.model.name, each)
            together, lengths = objects.together()
            if not _is_single(version):
                version = _repeated(version, lengths)
            once = replace(self, version=version, deduplicate=True)
            pending = once.send(together)
            pending.lengths = lengths
            return pending
        if is_lazy(objects):
            if not _is_single(version):
                raise ConfigError("lazy arrays are scored by one version; compute them first")
            return self._lazy(objects)
        if is_tracer(objects):
            if not _is_single(version):
                ak.typetracer.touch_data(version)
            return Deferred(self.model.name, trace(self.model.inputs, self.model.outputs, objects))
        return self._submit(objects)

    def _submit(self, objects: Any) -> Pending:
        model = self.model
        inputs = model.bind(objects)
        outputs = Outputs.of(model.outputs, inputs)
        pending = Pending(model, inputs.rows, outputs)
        if self.events is not None:
            if len(self.events) != inputs.rows.events:
                raise InputError(
                    f"expected a fold for each of {inputs.rows.events} events, got "
                    f"{len(self.events)}"
                )
            inputs = inputs.only(np.flatnonzero(self.events[inputs.rows.event_numbers()]))
        if len(inputs) == 0:
            self._expect(outputs, inputs)
            return pending
        inputs.load()
        pool = self._own_pool()
        try:
            for version, rows in self._by_version(inputs):
                contract = self._contract(pool, version, rows)
                if contract is None:
                    pending.lose(rows.selection(0, len(rows)), len(rows))
                    continue
                self._set_shapes(outputs, contract)
                part = Part(
                    contract,
                    replace(rows, without_axis=model.inputs_without_axis(contract)),
                    replace(outputs, without_axis=model.outputs_without_axis(contract)),
                    version=version,
                    mask=self.on_error == "mask",
                    deduplicate=self.deduplicate,
                    cache=self._cache(pool, contract),
                    pool=pool,
                    deadline=self.deadline,
                )
                pending.parts.append(part)
                pool.submit(part.call)
        except BaseException:
            pending.cancel()
            raise
        return pending

    def _own_pool(self) -> Pool:
        return current(self.model.pool_of_pickle) if self.pool is None else self.pool

    def _expect(self, outputs: Outputs, inputs: Inputs) -> None:
        """Set the shapes of outputs that declare none, where there is no object to score.

        So all chunks have the same type. If no server tells the shape, the output is a number.
        """
        if all(output.is_typed for output in self.model.outputs.values()):
            return
        version = next(self._by_version(inputs))[0] if _is_single(self.version) else None
        with contextlib.suppress(SonicError):
            pool = self._own_pool()
            contract = pool.contract(self.model.name, version, deadline=self.deadline)
            self._set_shapes(outputs, contract)

    def _set_shapes(self, outputs: Outputs, contract: Contract) -> None:
        """Set the shapes of outputs; those of a lazy array must be numbers, or declared."""
        whole = self.model.outputs_without_axis(contract)
        for spec in contract.outputs:
            declaration = self.model.outputs.get(spec.name)
            if declaration is None:
                continue
            shape = spec.whole_shape if spec.name in whole else spec.shape
            inner = outputs.each[spec.name].inner(shape)
            if self.of_partition and not declaration.is_typed and inner not in ((), (1,)):
                raise ContractError(
                    f"output {spec.name!r} has shape {list(inner)} a {declaration.per}, which the "
                    f"type of a lazy array did not know; declare it, as "
                    f"sonic.Output(shape={inner}), or with labels",
                    model=self.model.name,
                    version=contract.version,
                )
            outputs.each[spec.name].expect(shape)

    def _contract(self, pool: Pool, version: str | None, rows: Inputs) -> Contract | None:
        """Return the servers' contract; None if no server has one, and the rows are masked."""
        try:
            anew = pool.settings.cache is not None
            contract = pool.contract(self.model.name, version, anew=anew, deadline=self.deadline)
            return self.model.fitted(contract, server=", ".join(pool.settings.servers))
        except (ServerError, DeadlineError) as problem:
            error = problem.at(events=rows.events_of(0, len(rows)))
            mask = self.on_error == "mask" and not self.deadline.over
            maskable = isinstance(error, MASKABLE) and not isinstance(error, ModelNotFoundError)
            if not (mask and maskable):
                raise error from problem.__cause__
            logger.warning("%s; all %d rows are None", error, len(rows))
            return None

    def _cache(self, pool: Pool, contract: Contract) -> ScoreCache | None:
        """Return the cache of scores; None if there is none, or rows are not told apart."""
        model, settings = self.model, pool.settings
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

    def _by_version(self, inputs: Inputs) -> Iterator[tuple[str | None, Inputs]]:
        """Yield the versions that score rows, and their rows."""
        if _is_single(self.version):
            yield self.model.version if self.version is None else str(self.version), inputs
            return
        if ak.any(ak.is_none(self.version)):
            raise InputError("expected a version for each event, got None for some")
        versions = np.asarray(ak.to_numpy(self.version))
        events = inputs.rows.events
        if versions.ndim != 1 or len(versions) != events or versions.dtype.kind not in "iuU":
            raise InputError(
                f"expected a version, or one for each of {events} events as whole numbers, got "
                f"{versions.dtype} {list(versions.shape)}"
            )
        by_row = versions[inputs.rows.event_numbers()]
        for version in np.unique(by_row):
            yield str(version), inputs.only(np.flatnonzero(by_row == version))

    def _lazy(self, objects: Any) -> Pending:
        if self.pool is not None:
            raise ConfigError(
                "a lazy array is scored by the pools of the processes that compute it; name the "
                "servers with sonic.connect, and leave pool= out"
            )
        label = f"sonic-{self.model.name}"
        options = (self.on_error, self.version, self.deduplicate)
        token = "-".join(map(str, [self.model.config_hash, *options]))
        score = replace(self, deadline=NEVER, of_partition=True).score
        return Deferred(self.model.name, over_partitions(score, objects, label=label, token=token))

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


def _repeated(version: Any, lengths: Mapping[str, int]) -> ak.Array:
    """Return the version of each event of all variations, one after another."""
    for name, length in lengths.items():
        if length != len(version):
            raise InputError(
                f"variation {name!r} has {length} events, and there are {len(version)} versions; "
                "vary the objects of all events, or score variations one by one"
            )
    return ak.concatenate([version] * len(lengths))
