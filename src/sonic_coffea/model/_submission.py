"""One call of a model: from arrays to requests on their way."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from functools import cache, partial
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
from sonic_coffea.layouts import Outputs, is_lazy, is_tracer, over_partitions, trace
from sonic_coffea.model._pending import Deferred, Pending
from sonic_coffea.pool import MASKABLE, NEVER, Deadline, Pool, current
from sonic_coffea.reuse import Part, ScoreCache, Variations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from sonic_coffea.layouts import Inputs
    from sonic_coffea.model._declaration import Declaration
    from sonic_coffea.pool import Settings
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """How objects are sent: a model, and the options of `Model.submit`.

    Sent ``lazily``, they are a partition of a lazy array, whose type is known beforehand.
    ``events`` are those whose objects are sent; None for all.
    """

    model: Declaration
    pool: Pool | None = None
    on_error: str = "raise"
    version: Any = None
    deduplicate: bool = False
    deadline: Deadline = NEVER
    lazily: bool = False
    events: NDArray[np.bool_] | None = None

    def send(self, objects: Any) -> Pending:
        """Send objects: they are in memory, lazy, traced, or variations of each other."""
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
                # How many events each has is not known, so that they cannot be sent together.
                each = {name: self.send(one).result() for name, one in objects.items()}
                return Deferred(self.model.name, each)
            together, lengths = objects.together()
            if not _is_one(version):
                version = _repeated(version, lengths)
            once = replace(self, version=version, deduplicate=True)
            pending = once.send(together)
            pending.lengths = lengths
            return pending
        if is_lazy(objects):
            if not _is_one(version):
                raise ConfigError("lazy arrays are scored by one version; compute them first")
            return self._lazy(objects)
        if is_tracer(objects):
            if not _is_one(version):
                ak.typetracer.touch_data(version)
            return Deferred(self.model.name, trace(self.model.inputs, self.model.outputs, objects))
        return self._submit(objects)

    def _submit(self, objects: Any) -> Pending:
        inputs = self.model.bind(objects)
        outputs = Outputs.of(self.model.outputs, inputs)
        pending = Pending(
            self.model.name,
            inputs.rows,
            outputs,
            version=self.model.version,
            config_hash=self.model.config_hash,
        )
        if self.events is not None:
            if len(self.events) != inputs.rows.events:
                raise InputError(
                    f"expected a fold for each of {inputs.rows.events} events, got "
                    f"{len(self.events)}"
                )
            inputs = inputs.only(np.flatnonzero(self.events[inputs.rows.event_numbers()]))
        if len(inputs) == 0:
            self._expect(outputs)
            return pending
        inputs.load()
        pool = current() if self.pool is None else self.pool
        mask = self.on_error == "mask"
        try:
            for one, rows in self._by_version(inputs, self.version):
                contract = self._contract(pool, one, rows, mask=mask, deadline=self.deadline)
                if contract is None:
                    pending.lose(rows.selection(0, len(rows)), len(rows))
                    continue
                self._tell(outputs, contract)
                part = Part(
                    contract,
                    replace(rows, without_axis=self.model.inputs_without_axis(contract)),
                    replace(outputs, without_axis=self.model.outputs_without_axis(contract)),
                    version=one,
                    mask=mask,
                    deduplicate=self.deduplicate,
                    cache=self._cache(pool.settings, contract, deduplicate=self.deduplicate),
                    pool=pool,
                    deadline=self.deadline,
                )
                pending.parts.append(part)
                pool.submit(part.call)
        except BaseException:
            pending.cancel()
            raise
        return pending

    def _expect(self, outputs: Outputs) -> None:
        """Find out the shape of outputs that declare none, where there is no object to score.

        So all chunks have the same type. Without servers, or if none tells, it is a number.
        """
        if all(one.is_typed for one in self.model.outputs.values()):
            return
        version = (
            self.version
            if self.version is not None and _is_one(self.version)
            else self.model.version
        )
        asked = None if version is None else str(version)
        with contextlib.suppress(SonicError):
            pool = current() if self.pool is None else self.pool
            contract = pool.contract(self.model.name, asked, deadline=self.deadline)
            self._tell(outputs, contract)

    def _tell(self, outputs: Outputs, contract: Contract) -> None:
        """Tell outputs their shapes; what a lazy array has to know beforehand must be declared."""
        whole = self.model.outputs_without_axis(contract)
        for spec in contract.outputs:
            declaration = self.model.outputs.get(spec.name)
            if declaration is None:
                continue
            shape = spec.whole_shape if spec.name in whole else spec.shape
            inner = outputs.each[spec.name].inner(shape)
            if self.lazily and not declaration.is_typed and inner not in ((), (1,)):
                raise ContractError(
                    f"output {spec.name!r} has shape {list(inner)} a {declaration.per}, which the "
                    f"type of a lazy array did not know; declare it, as "
                    f"sonic.Output(shape={inner}), or with labels",
                    model=self.model.name,
                    version=contract.version,
                )
            outputs.each[spec.name].expect(shape)

    def _contract(
        self, pool: Pool, version: str | None, rows: Inputs, *, mask: bool, deadline: Deadline
    ) -> Contract | None:
        """Return what the servers say of the model; None if the rows are lost, and may be."""
        anew = pool.settings.cache.path is not None
        try:
            contract = pool.contract(self.model.name, version, anew=anew, deadline=deadline)
            compared = self.model.compared
            if (
                compared is None
                or compared[0] is not contract
                or compared[1] != self.model.config_hash
            ):
                fits = self.model.compare(contract, server=", ".join(pool.settings.servers))
                self.model.compared = compared = contract, self.model.config_hash, fits
        except (ServerError, DeadlineError) as problem:
            error = problem.at(events=rows.events_of(0, len(rows)))
            masked = mask and isinstance(error, MASKABLE) and not deadline.over
            if not masked or isinstance(error, ModelNotFoundError):
                raise error from problem.__cause__
            logger.warning("%s; all %d rows are None", error, len(rows))
            return None
        return compared[2]

    def _cache(
        self, settings: Settings, contract: Contract, *, deduplicate: bool
    ) -> ScoreCache | None:
        """Return where scores are kept, if rows are told apart."""
        whole = [name for name, one in self.model.inputs.items() if not one.stacks]
        whole += [name for name, one in self.model.outputs.items() if one.splits is not None]
        if self.model.one_request_per == "event":
            whole += list(self.model.inputs)
        if whole and deduplicate:
            raise ConfigError(
                f"model {self.model.name!r}: rows of {whole[0]!r} are not told apart, as it is one "
                "tensor for all; leave deduplicate out"
            )
        if settings.cache.path is None or whole:
            return None
        if contract.digest or settings.cache.trusts_versions:
            return ScoreCache(settings.cache.path, settings.cache.max_bytes)
        _say_that_nothing_is_kept(self.model.name, contract.version)
        return None

    def _by_version(self, inputs: Inputs, version: Any) -> Iterator[tuple[str | None, Inputs]]:
        """Yield the versions that score rows, and their rows."""
        if _is_one(version):
            yield self.model.version if version is None else str(version), inputs
            return
        if ak.any(ak.is_none(version)):
            raise InputError("expected a version for each event, got None for some")
        chosen = np.asarray(ak.to_numpy(version))
        if chosen.ndim != 1 or len(chosen) != inputs.rows.events or chosen.dtype.kind not in "iuU":
            raise InputError(
                f"expected a version, or one for each of {inputs.rows.events} events as whole "
                f"numbers, got {chosen.dtype} {list(chosen.shape)}"
            )
        by_row = chosen[inputs.rows.event_numbers()]
        for one in np.unique(by_row):
            yield str(one), inputs.only(np.flatnonzero(by_row == one))

    def _lazy(self, objects: Any) -> Pending:
        if self.pool is not None:
            raise ConfigError(
                "a lazy array is scored by the pools of the processes that compute it; name the "
                "servers with sonic.connect, and leave pool= out"
            )
        label = f"sonic-{self.model.name}"
        options = {name: getattr(self, name) for name in ("on_error", "version", "deduplicate")}
        token = "-".join(map(str, [self.model.config_hash, *options.values()]))
        score = partial(score_partition, self.model, **options)
        return Deferred(self.model.name, over_partitions(score, objects, label=label, token=token))


def score_partition(model: Declaration, objects: Any, **options: Any) -> Any:
    """Score the objects of a lazy array's partition."""
    return Submission(model, lazily=True, **options).send(objects).result()


@cache
def _say_that_nothing_is_kept(model: str, version: str) -> None:
    """Warn, once in a process rather than at every chunk."""
    logger.warning(
        "scores of %r are not kept: its servers do not all say what file version %r is (a fallback "
        "never does); cache_trusts_versions=True takes the number's word for it",
        model,
        version,
    )


def _is_one(version: Any) -> bool:
    """Whether it is a version, or None, rather than one for each event."""
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
