"""A model as an analysis declares it: its inputs, its outputs, and the call."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import awkward as ak
import numpy as np
import xxhash

from sonic_coffea.errors import (
    ConfigError,
    ContractError,
    DeadlineError,
    InputError,
    ModelNotFoundError,
    ServerError,
    SonicError,
    nearest,
    printable,
)
from sonic_coffea.layouts import (
    Layout,
    Output,
    assemble,
    bind_inputs,
    check_told_apart,
    declared,
    dtype_name,
    is_lazy,
    is_tracer,
    over_partitions,
    trace,
)
from sonic_coffea.model import _weaver as weaver
from sonic_coffea.model._declared import read as read_yaml
from sonic_coffea.model._pending import Deferred, Pending
from sonic_coffea.model._scaffold import fitting
from sonic_coffea.pool import (
    MASKABLE,
    NEVER,
    Carrier,
    Deadline,
    Pool,
    current,
)
from sonic_coffea.reporting import tables
from sonic_coffea.reuse import Part, ScoreCache, Variations
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from sonic_coffea.layouts import Assembly, Inputs
    from sonic_coffea.pool import Settings
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "mask")
ONE_REQUEST_PER = ("row", "event")


class Model(Carrier):
    """A served model: a layout for each input, and labels for each output.

    Parameters
    ----------
    name : str
        Name of the model in the server's model repository.
    inputs : mapping
        Names of inputs, each with its layout.
    outputs : mapping
        Names of outputs, each with the labels of its values, an `Output`, or None for a number.
    version : str or int, optional
        A pinned version; by default, the server's version policy decides.
    one_request_per : {"row", "event"}, optional
        Sends one request for each row, or for all rows of an event. It is meant for networks
        without a batch axis, such as a network that takes a single graph. By default, rows share
        requests.
    parameters : mapping, optional
        Parameters that each request carries besides tensors: names, each with a bool, int, float
        or str.
    priority : int, optional
        Priority of the requests in the server's queue: 1 goes before 2. The model's configuration
        has the number of levels.
    server_timeout_s : float, optional
        Longest time of a request in the server's queue, if the model's queue policy allows the
        override. A request that waited longer is retried, as after an overload.

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

    _hashed: tuple[Any, str] | None = None
    _compared: tuple[Contract, str, Contract] | None = None
    one_request_per: str | None = None
    parameters: tuple[tuple[str, bool | int | float | str], ...] = ()

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, Layout],
        outputs: Mapping[str, Sequence[str] | Output | None],
        version: str | int | None = None,
        *,
        one_request_per: str | None = None,
        parameters: Mapping[str, bool | int | float | str] | None = None,
        priority: int | None = None,
        server_timeout_s: float | None = None,
    ) -> None:
        if not inputs or not outputs:
            raise ConfigError(f"model {name!r} needs at least one input and one output")
        for what, given in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(given, Mapping):
                raise ConfigError(
                    f"model {name!r}: expected a dict for {what}, as the server names them, got "
                    f"{type(given).__name__}"
                )
        for key, layout in inputs.items():
            if not isinstance(layout, Layout):
                raise ConfigError(
                    f"model {name!r}, input {key!r}: expected a layout such as sonic.Padded or "
                    f"sonic.Row, got {type(layout).__name__}"
                )
        if one_request_per not in (None, *ONE_REQUEST_PER):
            raise ConfigError(
                f"model {name!r}: no one_request_per {one_request_per!r}; "
                f"{nearest(str(one_request_per), ONE_REQUEST_PER)}"
            )
        if one_request_per is None:
            check_told_apart(inputs)
        self.name = name
        self.one_request_per = one_request_per
        self.parameters = _parameters(name, parameters or {}, priority, server_timeout_s)
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
        prefix: str | Mapping[str, str] = "",
        labels: str | Path | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        inputs: Mapping[str, Layout] | None = None,
        version: str | int | None = None,
    ) -> Model:
        """Declare a model by the preprocessing file that weaver wrote and the CMS software reads.

        Parameters
        ----------
        name : str
            Name of the model in the server's model repository.
        preprocess : path or mapping
            ``preprocess.json``, or its content.
        output : str
            Name of the model's output tensor; its labels are the file's ``output_names``.
        prefix : str or mapping
            Path of the variables in the arrays, such as ``"pf."``; or a mapping by input or group:
            ``{"pf": "pf.", "sv": "sv."}`` for ``pf_features``, ``sv_points`` and so on.
        labels : sequence of str or path, optional
            Labels of the output's values, instead of ``output_names``. A path names a file with one
            label in each line, such as Triton's label files.
        rename : mapping, optional
            Names in the file, each with its new name: of variables, if the arrays have other names
            (before the prefix), and of inputs, if the served model has other names.
        inputs : mapping, optional
            Layouts that replace single inputs of the file, by the served model's names.
        version : str or int, optional
            A pinned version.

        Raises
        ------
        ConfigError
            If the file lacks something, such as names for the values of the output.

        Examples
        --------
        >>> group = {"var_names": ["pt"], "var_infos": {"pt": {}}, "var_length": 2}
        >>> file = {"input_names": ["pf_features"], "pf_features": group}
        >>> Model.from_weaver("tagger", file, labels=["qcd", "top"], rename={"pt": "pf.pt"})
        Model('tagger', inputs: pf_features; outputs: softmax (qcd, top))
        """
        layouts, names = weaver.read(
            preprocess, prefix=prefix, labels=labels, rename=rename, inputs=inputs
        )
        return cls(name, layouts, {output: names}, version)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], name: str | None = None) -> Model:
        """Read a declaration from a YAML file.

        Parameters
        ----------
        path : path
            The file has ``model``, ``inputs`` and ``outputs``. An input has ``layout``, the name of
            a layout, and the layout's arguments. A field is a name, a number, or the arguments of a
            `Feature` or a `OneHot`. An output is a list of labels, nothing, or the arguments of an
            `Output`.
        name : str, optional
            The model's name, instead of the file's.

        Raises
        ------
        ConfigError
            If something in the file cannot be used; it names the place and what is expected.
        """
        return cls(**read_yaml(Path(path), name))

    def __repr__(self) -> str:
        outputs = ", ".join(
            f"{name} ({', '.join(o.labels)})" if o.labels else name
            for name, o in self.outputs.items()
        )
        version = f", version {self.version}" if self.version else ""
        return (
            f"Model({self.name!r}{version}, inputs: {printable(', '.join(self.inputs))}; "
            f"outputs: {printable(outputs)})"
        )

    def _repr_html_(self) -> str:
        made = declared(self.inputs)
        rows = []
        for name, layout in self.inputs.items():
            dtype, shape = made[name]
            rows.append(("input", name, _shown(dtype, shape), type(layout).__name__))
            others = {key: one for key, one in layout.tensors(name).items() if key != name}
            rows += [("", key, _shown(*one), "") for key, one in others.items()]
        for name, output in self.outputs.items():
            labels = ", ".join(output.labels or ()) or "numbers"
            per = "a new collection" if output.splits else f"per {output.per}"
            rows.append(("output", name, dtype_name(output.dtype), f"{labels}; {per}"))
        version = f" version {self.version}" if self.version else ""
        note = "check() compares this with the server's model"
        return tables.table(f"Model {self.name}{version}", rows, notes=[note])

    def __getstate__(self) -> dict[str, Any]:
        # Without the hash: another release may make another one. What was compared goes by it.
        state = super().__getstate__()
        own = {**state["attributes"], "_hashed": None, "_compared": None}
        return {**state, "attributes": own}

    @property
    def config_hash(self) -> str:
        """A hash of the declaration: inputs, transformations, outputs and pinned version."""
        # The repr would take 0.15 ms of each call. Layouts are frozen; what else changes is seen.
        more: tuple[Any, ...] = (self.one_request_per,) if self.one_request_per else ()
        more += self.parameters
        now = (self.name, self.version, *more, *self.inputs.items(), *self.outputs.items())
        hashed = self._hashed
        if hashed is None or hashed[0] != now:
            declared = repr((self.name, self.version, self.inputs, self.outputs, *more))
            self._hashed = hashed = now, xxhash.xxh3_64_hexdigest(declared.encode())
        return hashed[1]

    def check(self, pool: Pool | None = None) -> Contract:
        """Compare the declaration with the server's model, and return the server's contract.

        Raises
        ------
        ContractError
            If they differ; it shows the two side by side, and what would fit.
        ModelNotFoundError, ServerLostError, AccessError
            If no server tells what its model is.
        """
        pool = current() if pool is None else pool
        contract = pool.contract(self.name, self.version, anew=True)
        checked = self.compare(contract, server=", ".join(pool.settings.servers))
        for server in pool.settings.servers:
            with contextlib.suppress(ServerError, ConfigError, DeadlineError):
                connection = connect_transport(server, options=pool.settings.connection_options())
                with contextlib.closing(connection):
                    labels = connection.labels(contract, self.version)
                for note in self.compare_labels(labels, contract, server=server):
                    logger.info("%s on %s: %s", self.name, server, note)
                break
        return checked

    def compare_labels(
        self, labels: Mapping[str, Sequence[str]], contract: Contract, *, server: str
    ) -> list[str]:
        """Compare the labels of outputs with those that a server has, and return what differs.

        Other names may mean the same; the same names in another order cannot.

        Raises
        ------
        ContractError
            If the labels of an output are the server's in another order.
        """
        notes = []
        for name, served in labels.items():
            ours = self.outputs[name].labels if name in self.outputs else None
            if not ours or list(ours) == list(served):
                continue
            if sorted(ours) == sorted(served):
                raise ContractError(
                    f"the labels of output {name!r} are declared in another order than the "
                    f"server's: declared {', '.join(ours)}; on the server {', '.join(served)}",
                    server=server,
                    model=self.name,
                    version=contract.version,
                )
            notes.append(f"the server calls the values of {name!r} {', '.join(served)}")
        return notes

    def compare(self, contract: Contract, *, server: str) -> Contract:
        """Compare the declaration with a server's contract.

        Returns
        -------
        Contract
            The server's contract; where it lists no tensors, with the declared ones.

        Raises
        ------
        ContractError
            If they differ; it shows the two side by side.
        """
        if contract.unsupported:
            raise ContractError(
                contract.unsupported, server=server, model=self.name, version=contract.version
            )
        whole = [name for name, one in self.inputs.items() if not one.stacks]
        alone = self.one_request_per is not None and not contract.stacks
        if whole and contract.max_rows is not None and not alone:
            why = (
                f"are told apart by offsets or numbers that count within a request, but the server "
                f"may stack requests (max_batch_size {contract.max_rows}); serve the model with "
                "max_batch_size: 0"
                if contract.stacks
                else "share a request, but the model has a tensor whose first axis is of fixed "
                "length, so it takes one of them; declare Model(one_request_per='row')"
            )
            raise ContractError(
                f"the rows of input {whole[0]!r} {why}",
                server=server,
                model=self.name,
                version=contract.version,
            )
        inputs = declared(self.inputs)
        outputs = {name: (o.inner, o.dtype) for name, o in self.outputs.items()}
        for name in self._inputs_without_axis(contract):
            dtype, shape = inputs[name]
            inputs[name] = dtype, shape and shape[1:]
        for name in self._outputs_without_axis(contract):
            outputs[name] = None, outputs[name][1]
        try:
            contract.check(inputs, outputs, server=server)
        except ContractError as error:
            fits = fitting(self.inputs, self.outputs, contract, made=inputs, given=outputs)
            raise ContractError(
                f"{error.message}\n{fits}",
                server=server,
                model=self.name,
                version=contract.version,
            ) from None
        if not contract.lists_tensors:
            _say_that_nothing_is_listed(self.name, server)
        return replace(contract.completed(inputs, outputs), parameters=self.parameters)

    def pack(self, objects: Any) -> dict[str, NDArray[Any]]:
        """Return the tensors of all inputs as they would be sent, without a server.

        Parameters
        ----------
        objects : awkward array or dict
            As for `submit`, but not lazy.

        Returns
        -------
        dict
            A tensor for each input of the served model, with all rows in the order of `objects`,
            without objects that are None. `Bucketed` inputs are padded to the length that the
            longest row needs; `submit` sends rows of other lengths in other requests.

        Raises
        ------
        FieldError, InputError
            If the arrays do not fit the layouts.

        Examples
        --------
        >>> import sonic_coffea as sonic
        >>> inputs = {"pf": sonic.Padded("pt", 2), "mask": sonic.Mask()}
        >>> model = sonic.Model("tagger", inputs, {"scores": ["qcd", "top"]})
        >>> sent = model.pack(ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": [4.0]}]))
        >>> {name: tensor.tolist() for name, tensor in sent.items()}
        {'pf': [[[3.0, 2.0]], [[4.0, 0.0]]], 'mask': [[[1.0, 1.0]], [[1.0, 0.0]]]}
        """
        if is_lazy(objects) or is_tracer(objects) or isinstance(objects, Variations):
            raise InputError(
                f"model {self.name!r} packs arrays that are in memory, got "
                f"{type(objects).__name__}; compute lazy ones, and pack variations one by one"
            )
        return self._bind(objects).pack_all()

    def __call__(
        self,
        objects: Any,
        *,
        timeout_s: float | None = None,
        pool: Pool | None = None,
        on_error: str = "raise",
        version: Any = None,
        deduplicate: bool = False,
    ) -> Any:
        """Score objects and wait for the result; see `submit`.

        Raises
        ------
        DeadlineError
            If `timeout_s` was not enough for all of it, from the question what the model is.
        """
        deadline = Deadline.after(timeout_s)
        how = _How(pool, on_error, version, deduplicate, deadline)
        return self._send(objects, how).result_by(deadline)

    def submit(
        self,
        objects: Any,
        *,
        pool: Pool | None = None,
        on_error: str = "raise",
        version: Any = None,
        deduplicate: bool = False,
    ) -> Pending:
        """Send objects, and return without waiting for their scores.

        The call waits for the model's contract from a server: the first time, after a pause, and
        while all servers are lost and there is no fallback.

        Parameters
        ----------
        objects : awkward array, dict or Variations
            ``events * jets * {fields}``, in any nesting, or a dict with an array for each input.
            A dask-awkward array is not sent: the result is a dask-awkward array, which is scored
            when it is computed. With `Variations`, the result is a dict of arrays; lazy variations
            are scored separately.
        pool : Pool, optional
            The pool that sends them; by default, the pool of this process.
        on_error : {"raise", "mask"}
            For rows that no server scored after all retries: ``"raise"`` raises an exception,
            ``"mask"`` puts None in their places, logs a warning and counts them in the statistics.
            An error in the arrays, the declaration or the access is always raised.
        version : int, str or array, optional
            The version that scores the objects, if the model is declared without one; or an array
            with the version for each event, ``events * int``, such as a version that was not
            trained on the event.
        deduplicate : bool
            Whether rows that are equal in all inputs are sent once.

        Returns
        -------
        Pending
            Its ``result()`` returns the structure of `objects`, with a record in the place of each
            object: ``events * jets * {qcd: float32, top: float32}``. It is None where the object
            is None.

        Raises
        ------
        FieldError, InputError
            If the arrays do not fit the layouts.
        ContractError
            If the server's model does not fit the declaration.
        """
        return self._send(objects, _How(pool, on_error, version, deduplicate))

    def submit_some(
        self,
        objects: Any,
        events: NDArray[np.bool_] | None,
        *,
        pool: Pool | None = None,
        on_error: str = "raise",
        deduplicate: bool = False,
    ) -> Pending:
        """Send the objects of some events; the scores of others mean nothing. For `Folds`."""
        return self._send(objects, _How(pool, on_error, None, deduplicate, events=events))

    def _send(self, objects: Any, how: _How) -> Pending:
        version = how.version
        if how.on_error not in ON_ERROR:
            raise ConfigError(f"no on_error {how.on_error!r}; {nearest(how.on_error, ON_ERROR)}")
        if version is not None and self.version is not None:
            raise ConfigError(
                f"model {self.name!r} is declared with version {self.version}; leave that out"
            )
        if isinstance(objects, Variations):
            if objects.deferred:
                # How many events each has is not known, so that they cannot be sent together.
                each = {name: self._send(one, how).result() for name, one in objects.items()}
                return Deferred(self.name, each)
            together, lengths = objects.together()
            if not _is_one(version):
                version = _repeated(version, lengths)
            once = how._replace(version=version, deduplicate=True)
            pending = self._send(together, once)
            pending.lengths = lengths
            return pending
        if is_lazy(objects):
            if not _is_one(version):
                raise ConfigError("lazy arrays are scored by one version; compute them first")
            return self._lazy(objects, how)
        if is_tracer(objects):
            if not _is_one(version):
                ak.typetracer.touch_data(version)
            return Deferred(self.name, trace(self.inputs, self.outputs, objects))
        return self._submit(objects, how)

    def _submit(self, objects: Any, how: _How) -> Pending:
        inputs = self._bind(objects)
        outputs = {name: assemble(name, o, inputs) for name, o in self.outputs.items()}
        pending = Pending(
            self.name, inputs.rows, outputs, version=self.version, config_hash=self.config_hash
        )
        if how.events is not None:
            if len(how.events) != inputs.rows.events:
                raise InputError(
                    f"expected a fold for each of {inputs.rows.events} events, got "
                    f"{len(how.events)}"
                )
            inputs = inputs.only(np.flatnonzero(how.events[inputs.rows.event_numbers()]))
        if len(inputs) == 0:
            self._expect(outputs, how)
            return pending
        inputs.load()
        pool, lock = current() if how.pool is None else how.pool, threading.Lock()
        mask = how.on_error == "mask"
        splits = [o.splits for o in self.outputs.values() if o.splits is not None]
        asked = list(dict.fromkeys([*self.outputs, *splits]))
        try:
            for one, rows in self._by_version(inputs, how.version):
                contract = self._contract(pool, one, rows, mask=mask, deadline=how.deadline)
                if contract is None:
                    pending.lose(rows.selection(0, len(rows)), len(rows))
                    continue
                some = replace(rows, without_axis=self._inputs_without_axis(contract))
                self._tell(outputs, contract, how)
                cache = self._cache(pool.settings, contract, deduplicate=how.deduplicate)
                part = Part(
                    contract,
                    some,
                    outputs,
                    lock,
                    asked=asked,
                    version=one,
                    mask=mask,
                    deduplicate=how.deduplicate,
                    cache=cache,
                    pool=pool,
                    deadline=how.deadline,
                    without_axis=self._outputs_without_axis(contract),
                )
                pending.parts.append(part)
                pool.submit(part.call)
        except BaseException:
            pending.cancel()
            raise
        return pending

    def _bind(self, objects: Any) -> Inputs:
        return bind_inputs(self.inputs, objects, one_request_per=self.one_request_per)

    def _inputs_without_axis(self, contract: Contract) -> frozenset[str]:
        """Return the inputs that the server takes without the axis of the rows."""
        if self.one_request_per is None:
            return frozenset()
        specs = {spec.name: spec for spec in contract.inputs}
        return frozenset(
            name
            for name, (_, shape) in declared(self.inputs).items()
            if shape is not None
            and name in specs
            and name in self.inputs
            and self.inputs[name].stacks
            and len(specs[name].shape) + 1 == len(shape)
            and (specs[name].rows in (-1, shape[0]) or shape[0] < 0)
        )

    def _outputs_without_axis(self, contract: Contract) -> frozenset[str]:
        """Return the outputs that the server gives without the axis of the rows."""
        if self.one_request_per is None:
            return frozenset()
        return frozenset(
            spec.name
            for spec in contract.outputs
            if (output := self.outputs.get(spec.name)) is not None
            and output.per == "row"
            and output.splits is None
            and (spec.rows not in (-1, 1) or (not spec.shape and math.prod(output.last) > 1))
            and (output.inner is None or math.prod(output.last) == math.prod(spec.whole_shape))
        )

    def _expect(self, outputs: Mapping[str, Assembly], how: _How) -> None:
        """Find out the shape of outputs that declare none, where there is no object to score.

        So their type is that of other chunks. Without servers, or if none tells, it is a number.
        """
        if all(one.is_typed for one in self.outputs.values()):
            return
        version = how.version if how.version is not None and _is_one(how.version) else self.version
        asked = None if version is None else str(version)
        with contextlib.suppress(SonicError):
            pool = current() if how.pool is None else how.pool
            contract = pool.contract(self.name, asked, deadline=how.deadline)
            self._tell(outputs, contract, how)

    def _tell(self, outputs: Mapping[str, Assembly], contract: Contract, how: _How) -> None:
        """Tell outputs their shapes; what a lazy array has to know beforehand must be declared."""
        whole = self._outputs_without_axis(contract)
        for spec in contract.outputs:
            declaration = self.outputs.get(spec.name)
            if declaration is None:
                continue
            shape = spec.whole_shape if spec.name in whole else spec.shape
            inner = outputs[spec.name].inner(shape)
            if how.lazily and not declaration.is_typed and inner not in ((), (1,)):
                raise ContractError(
                    f"output {spec.name!r} has shape {list(inner)} a {declaration.per}, which the "
                    f"type of a lazy array did not know; declare it, as "
                    f"sonic.Output(shape={inner}), or with labels",
                    model=self.name,
                    version=contract.version,
                )
            outputs[spec.name].expect(shape)

    def _contract(
        self, pool: Pool, version: str | None, rows: Inputs, *, mask: bool, deadline: Deadline
    ) -> Contract | None:
        """Return what the servers say of the model; None if the rows are lost, and may be."""
        anew = pool.settings.cache.path is not None
        try:
            contract = pool.contract(self.name, version, anew=anew, deadline=deadline)
            compared = self._compared
            if compared is None or compared[0] is not contract or compared[1] != self.config_hash:
                fits = self.compare(contract, server=", ".join(pool.settings.servers))
                self._compared = compared = contract, self.config_hash, fits
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
        whole = [name for name, one in self.inputs.items() if not one.stacks]
        whole += [name for name, one in self.outputs.items() if one.splits is not None]
        if self.one_request_per == "event":
            whole += list(self.inputs)
        if whole and deduplicate:
            raise ConfigError(
                f"model {self.name!r}: rows of {whole[0]!r} are not told apart, as it is one "
                "tensor for all; leave deduplicate out"
            )
        if settings.cache.path is None or whole:
            return None
        if contract.digest or settings.cache.trusts_versions:
            return ScoreCache(settings.cache.path, settings.cache.max_bytes)
        _say_that_nothing_is_kept(self.name, contract.version)
        return None

    def _by_version(self, inputs: Inputs, version: Any) -> Iterator[tuple[str | None, Inputs]]:
        """Yield the versions that score rows, and their rows."""
        if _is_one(version):
            yield self.version if version is None else str(version), inputs
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

    def _lazy(self, objects: Any, how: _How) -> Pending:
        if how.pool is not None:
            raise ConfigError(
                "a lazy array is scored by the pools of the processes that compute it; name the "
                "servers with sonic.connect, and leave pool= out"
            )
        label = f"sonic-{self.name}"
        options = {name: getattr(how, name) for name in ("on_error", "version", "deduplicate")}
        token = "-".join(map(str, [self.config_hash, *options.values()]))
        score = partial(self._score_partition, **options)
        return Deferred(self.name, over_partitions(score, objects, label=label, token=token))

    def _score_partition(self, objects: Any, **options: Any) -> Any:
        return self._send(objects, _How(None, lazily=True, **options)).result()


def _parameters(
    model: str,
    parameters: Mapping[str, bool | int | float | str],
    priority: int | None,
    server_timeout_s: float | None,
) -> tuple[tuple[str, bool | int | float | str], ...]:
    """Return what each request carries, as Triton names it, refusing what it cannot be."""
    for name, value in parameters.items():
        if name in _RESERVED:
            raise ConfigError(f"model {model!r}: parameter {name!r} is not free; {_RESERVED[name]}")
        if type(value) not in (bool, int, float, str):
            raise ConfigError(
                f"model {model!r}, parameter {name!r}: expected a bool, int, float or str, got "
                f"{type(value).__name__}"
            )
    found = list(parameters.items())
    if priority is not None:
        if type(priority) is not int or priority < 1:
            raise ConfigError(
                f"model {model!r}: expected a priority of 1 or more, got {priority!r}"
            )
        found.append(("priority", priority))
    if server_timeout_s is not None:
        if not 0 < server_timeout_s < _LONGEST_S:
            raise ConfigError(
                f"model {model!r}: expected server_timeout_s above 0 s, got {server_timeout_s!r}"
            )
        found.append(("timeout", max(1, round(server_timeout_s * 1e6))))
    return tuple(found)


_LONGEST_S = 1e9
_SEQUENCES = "rows are scored each by itself, and sequences are not supported"
_RESERVED = {
    "priority": "declare priority=",
    "timeout": "declare server_timeout_s=",
    **dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), _SEQUENCES),
    **dict.fromkeys(("headers", "binary_data_output"), "the protocol has it"),
}
"""Parameters that mean something to Triton itself."""


class _How(NamedTuple):
    """The options of `Model.submit`."""

    pool: Pool | None
    on_error: str
    version: Any
    deduplicate: bool
    deadline: Deadline = NEVER
    lazily: bool = False
    events: NDArray[np.bool_] | None = None


@cache
def _say_that_nothing_is_kept(model: str, version: str) -> None:
    """Warn, once in a process rather than at every chunk."""
    logger.warning(
        "scores of %r are not kept: its servers do not all say what file version %r is (a fallback "
        "never does); cache_trusts_versions=True takes the number's word for it",
        model,
        version,
    )


@cache
def _say_that_nothing_is_listed(model: str, server: str) -> None:
    """Warn, once in a process."""
    logger.warning(
        "%s does not list what model %s takes and gives, so nobody has compared the declaration "
        "with it",
        server,
        model,
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


def _shown(dtype: Any, shape: tuple[int, ...] | None) -> str:
    axes = "?" if shape is None else ", ".join("?" if n < 0 else str(n) for n in shape)
    name = dtype_name(dtype)
    return f"{name} [N, {axes}]" if axes else f"{name} [N]"
