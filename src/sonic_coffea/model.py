"""A model as an analysis declares it: what goes in, what comes out, and the call itself."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import awkward as ak
import xxhash
from awkward.contents import RecordArray

from sonic_coffea import weaver
from sonic_coffea._version import __version__
from sonic_coffea.errors import (
    ConfigError,
    ContractError,
    DeadlineError,
    ModelNotFoundError,
    nearest,
)
from sonic_coffea.layouts import Flat, Layout, Output, Rows, bind_inputs, declared, is_tracer, trace
from sonic_coffea.lazy import is_lazy, over_partitions
from sonic_coffea.pool import MASKABLE, Call, Pool, Settings, adopt, carried, current, failures_told
from sonic_coffea.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sonic_coffea.contract import Contract
    from sonic_coffea.layouts import Assembly

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")


class Model:
    """A served model: its inputs as layouts, its outputs as names.

    Parameters
    ----------
    name : str
        As in the server's model repository.
    inputs : mapping
        Input names and their layouts.
    outputs : mapping
        Output names, each with the labels of its values, an `Output`, or None for plain numbers.
    version : str or int, optional
        A pinned version; by default what the server's policy serves.

    Examples
    --------
    >>> import sonic_coffea as sonic
    >>> model = sonic.Model(
    ...     "toptagger",
    ...     inputs={"features": sonic.Padded(["pf.pt", "pf.eta"], 64), "mask": sonic.Mask(64)},
    ...     outputs={"scores": ["qcd", "top"]},
    ... )
    >>> model
    Model('toptagger', inputs: features, mask; outputs: scores (qcd, top))
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, Layout],
        outputs: Mapping[str, Sequence[str] | Output | None],
        version: str | int | None = None,
    ) -> None:
        if not inputs or not outputs:
            raise ConfigError(f"model {name!r} needs at least one input and one output")
        for key, layout in inputs.items():
            if not isinstance(layout, Layout):
                raise ConfigError(
                    f"model {name!r}, input {key!r}: expected a layout such as sonic.Padded or "
                    f"sonic.Row, got {type(layout).__name__}"
                )
        self.name = name
        self.inputs = dict(inputs)
        self.outputs = {k: o if isinstance(o, Output) else Output(o) for k, o in outputs.items()}
        self.version = None if version is None else str(version)

    @classmethod
    def from_weaver(
        cls,
        name: str,
        preprocess: str | Path | Mapping[str, Any],
        *,
        output: str = "softmax",
        prefix: str = "",
        version: str | int | None = None,
    ) -> Model:
        """Declare a model by the preprocessing file that weaver wrote and the CMS software reads.

        Parameters
        ----------
        name : str
            As in the server's model repository.
        preprocess : path or mapping
            ``preprocess.json``, or what is in it.
        output : str
            Name of the model's output tensor; its labels are the file's ``output_names``.
        prefix : str
            Where the variables are in the arrays, such as ``"pf."``.
        version : str or int, optional
            A pinned version.
        """
        inputs, labels = weaver.read(preprocess, prefix=prefix)
        return cls(name, inputs, {output: labels}, version)

    def __repr__(self) -> str:
        outputs = ", ".join(
            f"{name} ({', '.join(o.labels)})" if o.labels else name
            for name, o in self.outputs.items()
        )
        version = f", version {self.version}" if self.version else ""
        return (
            f"Model({self.name!r}{version}, inputs: {', '.join(self.inputs)}; outputs: {outputs})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"declared": self.__dict__, "settings": carried()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["declared"])
        settings: Settings | None = state["settings"]
        adopt(settings)

    @property
    def config_hash(self) -> str:
        """A hash of the declaration: inputs, transformations, outputs and pinned version."""
        declared = repr((self.name, self.version, self.inputs, self.outputs))
        return xxhash.xxh3_64_hexdigest(declared.encode())

    def check(self, pool: Pool | None = None) -> Contract:
        """Compare the declaration with the server's model, and return what the server says.

        Raises
        ------
        ContractError
            With the two side by side.
        ModelNotFoundError, ServerLostError, AccessError
            If there is nothing to compare with.
        """
        pool = current() if pool is None else pool
        contract = pool.contract(self.name, self.version)
        self.compare(contract, server=", ".join(pool.settings.servers))
        return contract

    def compare(self, contract: Contract, *, server: str) -> None:
        """Compare the declaration with what a server says of its model.

        Raises
        ------
        ContractError
            With the two side by side.
        """
        whole = [name for name, one in self.inputs.items() if isinstance(one, Flat)]
        if whole and contract.max_rows is not None:
            raise ContractError(
                f"the rows of input {whole[0]!r} are told apart by offsets or numbers that count "
                f"within a request, but the server may stack requests (max_batch_size "
                f"{contract.max_rows}); serve the model with max_batch_size: 0",
                server=server,
                model=self.name,
                version=contract.version,
            )
        contract.check(
            declared(self.inputs),
            {name: (o.width, o.dtype) for name, o in self.outputs.items()},
            server=server,
        )

    def __call__(
        self,
        objects: Any,
        *,
        timeout_s: float | None = None,
        pool: Pool | None = None,
        on_error: str = "raise",
    ) -> ak.Array:
        """Score objects and wait for the result; see `submit`."""
        return self.submit(objects, pool=pool, on_error=on_error).result(timeout_s=timeout_s)

    def submit(self, objects: Any, *, pool: Pool | None = None, on_error: str = "raise") -> Pending:
        """Send objects on their way; returns at once.

        Parameters
        ----------
        objects : awkward array or dict
            ``events * jets * {fields}``, in any nesting, or a dict with an array for each input.
            Of a dask-awkward array, nothing is sent: the result is another such array, which is
            scored when it is computed.
        pool : Pool, optional
            Where to send them; by default to the pool of this process.
        on_error : {"raise", "mask"}
            What becomes of rows that servers lose for good: an exception, or None in their places,
            with a warning in the log and their number in the statistics. What is wrong with the
            arrays, the declaration or the access always raises.

        Returns
        -------
        Pending
            Its ``result()`` has the lists of `objects` with a record in each object's place:
            ``events * jets * {qcd: float32, top: float32}``; None where the object is None.

        Raises
        ------
        FieldError, InputError
            If the arrays do not fit the layouts.
        ContractError
            If the server's model is another one.
        """
        if on_error not in ON_ERROR:
            raise ConfigError(f"no on_error {on_error!r}; {nearest(on_error, ON_ERROR)}")
        if is_lazy(objects):
            return self._lazy(objects, pool, on_error)
        if is_tracer(objects):
            return Deferred(self, trace(self.inputs, self.outputs, objects))
        with failures_told():
            return self._submit(objects, pool, mask=on_error == "mask")

    def _submit(self, objects: Any, pool: Pool | None, *, mask: bool) -> Pending:
        inputs = bind_inputs(self.inputs, objects)
        assemblies = {name: o.assemble(name, inputs) for name, o in self.outputs.items()}
        if len(inputs.rows) == 0:
            return Pending(self, inputs.rows, assemblies, None)
        pool = current() if pool is None else pool
        try:
            contract = self.check(pool)
        except MASKABLE as error:
            if not mask or isinstance(error, ModelNotFoundError):
                raise
            logger.warning("%s; all %d rows are None", error, len(inputs.rows))
            return Pending(self, inputs.rows, assemblies, None, lost=[slice(None)])
        call = Call(contract, inputs, assemblies, self._asked(), version=self.version, mask=mask)
        kept, cut, padded = inputs.filling()
        call.statistics.filled, call.statistics.truncated = kept, cut
        call.statistics.padded = padded
        pool.submit(call)
        return Pending(self, inputs.rows, assemblies, call)

    def _lazy(self, objects: Any, pool: Pool | None, on_error: str) -> Pending:
        if pool is not None:
            raise ConfigError(
                "a lazy array is scored by the pools of the processes that compute it; name the "
                "servers with sonic.connect, and leave pool= out"
            )
        label, token = f"sonic-{self.name}", f"{self.config_hash}-{on_error}"
        score = partial(self, on_error=on_error)
        return Deferred(self, over_partitions(score, objects, label=label, token=token))

    def _asked(self) -> list[str]:
        """Return the outputs that a request asks for: those declared, and their offsets."""
        asked = [*self.outputs, *(o.splits for o in self.outputs.values() if o.splits)]
        return list(dict.fromkeys(asked))


class Pending:
    """Scores that are on their way."""

    def __init__(
        self,
        model: Model,
        rows: Rows,
        outputs: Mapping[str, Assembly],
        call: Call | None,
        lost: Sequence[Any] = (),
    ) -> None:
        self._model = model
        self._rows = rows
        self._outputs = outputs
        self._call = call
        self._lost = lost

    def __repr__(self) -> str:
        if self._call is None or self._call.over:
            failed = self._call is not None and self._call.failure is not None
            state = "failed" if failed else "done"
        else:
            state = "on its way"
        return f"<Pending {self._model.name}: {len(self._rows)} rows, {state}>"

    @property
    def statistics(self) -> Statistics:
        """What happened to the requests so far."""
        if self._call is not None:
            return self._call.statistics
        return Statistics(objects=len(self._rows), lost=len(self._rows) if self._lost else 0)

    def done(self) -> bool:
        """Whether `result` would return, or raise, without waiting."""
        return self._call is None or self._call.over

    def cancel(self) -> None:
        """Abandon what is not answered yet, here and on the servers."""
        if self._call is not None:
            self._call.cancel()

    def result(self, timeout_s: float | None = None) -> ak.Array:
        """Return the scores, in the structure of the objects.

        Parameters
        ----------
        timeout_s : float, optional
            Give up, and cancel what is out, after so many seconds.

        Raises
        ------
        DeadlineError
            If the time was not enough.
        SonicError
            If rows could not be scored, naming server, model, request and events.
        """
        if self._call is not None:
            with failures_told():
                self._wait(self._call, timeout_s)
                self._call.raise_failure()
        contents = {name: output.content() for name, output in self._outputs.items()}
        if len(contents) == 1:
            (content,) = contents.values()
        else:
            content = RecordArray(list(contents.values()), list(contents), length=len(self._rows))
        lost = self._lost if self._call is None else self._call.lost
        scores = self._rows.unflatten(self._rows.without(content, lost))
        return ak.with_name(scores, None, attrs={"sonic": self.provenance()})

    def provenance(self) -> dict[str, Any]:
        """Return what produced the scores: model, version, servers and the declaration's hash."""
        served = self._call.served_versions if self._call is not None else set()
        return {
            "model": self._model.name,
            "version": self._model.version or ", ".join(sorted(served)) or None,
            "servers": sorted({server for (server, _, _), _ in self.statistics}),
            "config_hash": self._model.config_hash,
            "sonic_coffea": __version__,
        }

    def _wait(self, call: Call, timeout_s: float | None) -> None:
        started = time.monotonic()
        if call.wait(timeout_s):
            return
        waited_s = time.monotonic() - started
        call.fail(
            DeadlineError(
                f"not all of {len(self._rows)} rows were scored within {waited_s:.3g} s",
                model=self._model.name,
                events=self._rows.events_of(0, len(self._rows)),
            )
        )
        call.raise_failure()


class Deferred(Pending):
    """What stands for scores that are computed later, or never: a lazy array, or a typetracer."""

    def __init__(self, model: Model, scores: Any) -> None:
        self._model = model
        self._scores = scores
        self._call = None

    @property
    def statistics(self) -> Statistics:
        """None yet."""
        return Statistics()

    def __repr__(self) -> str:
        return f"<Deferred {self._model.name}: {self._scores!r}>"

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the array without data; nothing is waited for."""
        del timeout_s
        return self._scores
