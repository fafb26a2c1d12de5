"""A model's inputs and outputs as an analysis declares them, compared with a server's contract."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from numbers import Real
from typing import Any

import xxhash

from sonic_coffea.errors import ConfigError, ContractError, FieldError, expect, printable, require
from sonic_coffea.layouts import (
    Inputs,
    Layout,
    Output,
    bind_inputs,
    check_separable,
    declared,
    records_of,
)
from sonic_coffea.model._scaffold import fitting
from sonic_coffea.pool import Pool, WithPool
from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

# Of more names, not all are printed: taggers have hundreds of labels.
_MOST_NAMES = 12

ONE_REQUEST_PER = ("row", "event")

# Parameters that mean something to Triton itself.
_RESERVED = (
    *("priority", "timeout", "headers", "binary_data_output"),
    *("sequence_id", "sequence_start", "sequence_end"),
)

Parameters = tuple[tuple[str, bool | int | float | str], ...]


class Declaration(WithPool):
    """A model's inputs and outputs, and how they fit a server's contract.

    Attributes
    ----------
    name : str
        Name of the model in the server's model repository.
    inputs : dict
        A layout for each input.
    outputs : dict
        An `Output` for each output.
    version : str or None
        The pinned version.
    one_request_per : {"row", "event"} or None
        Rows, or events, of which each has a request of its own.
    parameters : tuple of (str, bool, int, float or str)
        Parameters of each request besides tensors, by Triton's names.
    """

    _hashed: tuple[Any, str] | None = None
    _fits: tuple[str, Contract, Contract] | None = None

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
        model = f"model {name!r}"
        tensors: Any
        for side, tensors in (("inputs", inputs), ("outputs", outputs)):
            is_dict = isinstance(tensors, Mapping) and tensors
            expect(is_dict, f"a dict for {side}, as the server names them", tensors, model)
        for key in (name, *inputs, *outputs):
            expect(isinstance(key, str), "names as str", key, model)
        for key, layout in inputs.items():
            expected = "a layout such as sonic.Padded or sonic.Row"
            expect(isinstance(layout, Layout), expected, layout, f"{model}, input {key!r}")
        if one_request_per is not None:
            require([one_request_per], ONE_REQUEST_PER, f"{model}: no one_request_per")
        check_separable(inputs, one_request_per)
        self.name = name
        self.one_request_per = one_request_per
        carried = {} if parameters is None else parameters
        self.parameters = _parameters(model, carried, priority, server_timeout_s)
        self.inputs = dict(inputs)
        self.outputs = {k: o if isinstance(o, Output) else Output(o) for k, o in outputs.items()}
        self.version = None if version is None else str(version)

    def __repr__(self) -> str:
        inputs = _listed({name: layout.columns for name, layout in self.inputs.items()}, "fields")
        outputs = _listed({name: o.labels or () for name, o in self.outputs.items()}, "labels")
        version = f", version {self.version}" if self.version else ""
        return f"Model({self.name!r}{version}, inputs: {inputs}; outputs: {outputs})"

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for known in ("_hashed", "_fits"):  # another release may hash or compare differently
            state.pop(known, None)
        return state

    def __copy__(self) -> Any:
        # Its inputs and outputs may be changed without those of the original.
        copied = super().__copy__()
        copied.inputs, copied.outputs = {**self.inputs}, {**self.outputs}
        return copied

    @property
    def config_hash(self) -> str:
        """A hash of the declaration: all arguments of the model."""
        # The repr would take 0.15 ms of each call. Layouts are frozen; all else is compared, and
        # parameters by their text: 1 and True are equal, and different in a request.
        more: tuple[Any, ...] = (*filter(None, [self.one_request_per]), *self.parameters)
        now = (self.name, self.version, *self.inputs.items(), *self.outputs.items(), repr(more))
        hashed = self._hashed
        if hashed is None or hashed[0] != now:
            declared = repr((self.name, self.version, self.inputs, self.outputs, *more))
            self._hashed = hashed = now, xxhash.xxh3_64_hexdigest(declared.encode())
        return hashed[1]

    def compare_labels(
        self, labels: Mapping[str, Sequence[str]], contract: Contract, *, server: str
    ) -> list[str]:
        """Compare the labels of outputs with a server's labels, and return the differences.

        Other names may mean the same. The same names in another order cannot, and raise.
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
        pairs = zip(self._channels, contract.features, strict=False)
        if renamed := [f"{ours!r} is {theirs!r}" for ours, theirs in pairs if ours != theirs]:
            notes.append(f"in the model's file {', '.join(renamed)}")
        return notes

    @property
    def _channels(self) -> list[str]:
        """The names of the values of the input, if there is one, and it is a row of features."""
        (layout, *others) = self.inputs.values()
        return [] if others else [feature.channel for feature in layout.features]

    def compare(self, contract: Contract, *, server: str) -> Contract:
        """Return a server's contract, with the declared tensors if the server lists none.

        If declaration and contract differ, raise `ContractError`, which shows the two side by side.
        """
        fits, config_hash = self._fits, self.config_hash
        # A comparison in every call would take a twentieth of what a small call adds.
        if fits is None or fits[0] != config_hash or fits[1] is not contract:
            fits = self._fits = config_hash, contract, self._compared(contract, server=server)
        return fits[2]

    def _compared(self, contract: Contract, *, server: str) -> Contract:
        place: dict[str, Any] = {"server": server, "model": self.name, "version": contract.version}
        contract = self._limited(contract, place)
        inputs = declared(self.inputs)
        outputs = {name: (o.inner, o.dtype) for name, o in self.outputs.items()}
        for name in self.inputs_without_axis(contract):
            dtype, shape = inputs[name]
            inputs[name] = dtype, shape and shape[1:]
        for name in self.outputs_without_axis(contract):
            outputs[name] = None, outputs[name][1]
        try:
            contract.check(inputs, outputs, server=server)
        except ContractError as error:
            suggestion = fitting(self.inputs, self.outputs, contract)
            raise ContractError(f"{error.message}\n{suggestion}", **place) from None
        self._check_order(contract, place)
        if not contract.lists_tensors:
            warn_once(
                "%s does not list what model %s takes and gives, so nobody has compared the "
                "declaration with it",
                server,
                self.name,
            )
        completed = replace(contract.completed(inputs, outputs), parameters=self.parameters)
        # The pool compares the same object in no time, for each request.
        return contract if completed == contract else completed

    def _limited(self, contract: Contract, place: Mapping[str, Any]) -> Contract:
        """Return a contract with its limit of rows, refusing to stack rows that belong together."""
        whole = [name for name, layout in self.inputs.items() if not layout.stacks]
        # The first axis of [F, sum n] is no axis of rows, and does not limit them.
        firsts = {n: self.inputs[n].width for n in whole if self.inputs[n].axes[:1] == "F"}
        free = all(spec.rows in (-1, firsts.get(spec.name)) for spec in contract.inputs)
        if firsts and free and not contract.stacks:
            contract = replace(contract, max_rows=None)
        if contract.stacks and (whole or self.one_request_per):
            why = f"input {whole[0]!r} is declared" if whole else "one_request_per is declared"
            raise ContractError(
                f"the rows of a request belong together, as {why}, but the server may stack "
                f"requests (max_batch_size {contract.max_rows}); serve the model with "
                "max_batch_size: 0",
                **place,
            )
        if whole and contract.max_rows is not None and not self.one_request_per:
            raise ContractError(
                f"the rows of input {whole[0]!r} share a request, but the model has a tensor whose "
                "first axis is of fixed length, so it takes one of them; declare "
                "Model(one_request_per='row')",
                **place,
            )
        return contract

    def _check_order(self, contract: Contract, place: Mapping[str, Any]) -> None:
        """Refuse features that the model's file has in another order."""
        ours, theirs = self._channels, contract.features
        lasts = [channel.rpartition(".")[2] for channel in ours]
        for number, (channel, last) in enumerate(zip(ours, lasts, strict=True)):
            there, names = theirs[number : number + 1], [channel, channel.replace(".", "_")]
            # The file may have the last part of a path, unless its feature in this place is none of
            # ours: then other names may mean the same.
            if lasts.count(last) == 1 and {*there} <= {*lasts}:
                names.append(last)
            name = next((name for name in names if name in theirs), None)
            if name is not None and there != (name,):
                raise ContractError(
                    f"feature {channel!r} is number {number} as declared, and number "
                    f"{theirs.index(name)} in the model's file: declared {', '.join(ours)}; in the "
                    f"file {', '.join(theirs)}",
                    **place,
                )

    def bind(self, objects: Any) -> Inputs:
        """Bind the inputs to the arrays of a call.

        If fields are missing, say which parts of the arrays have them.
        """
        try:
            return bind_inputs(self.inputs, objects, one_request_per=self.one_request_per)
        except FieldError as error:
            is_dict = isinstance(objects, Mapping)
            names = list(objects if is_dict else getattr(objects, "fields", ()))
            paths = {path for each in self.inputs.values() for path in each.columns}
            roots = {path.partition(".")[0] for path in paths}
            fields = {name: getattr(records_of(objects[name]), "fields", ()) for name in names}
            fit = [name for name in names if roots <= {*fields[name]}]
            if not fit:
                raise
            hint = f"{' or '.join(fit[:4])} has them: give that, such as events.{fit[0]}"
            if is_dict and len(names) > 1 and fit == names:
                hint = "for variations of the same objects, give sonic.Variations(nominal=…, up=…)"
            raise error.because(hint) from None

    def pool_of(self, given: Pool | None) -> Pool:
        """Return the pool that was given to a call, or else the one that scores the model."""
        if given is None:
            pool = self.own_pool()
            if self.is_of_earlier_run():
                warn_once(
                    "model %s is scored by %s, as its pickle says, though others are connected "
                    "now; if a notebook's class names it, run the cell that defines it again",
                    self.name,
                    ", ".join(pool.settings.servers),
                )
            return pool
        expect(isinstance(given, Pool), "pool to be what sonic.connect returns", given)
        return given

    def inputs_without_axis(self, contract: Contract) -> frozenset[str]:
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

    def outputs_without_axis(self, contract: Contract) -> frozenset[str]:
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


def _parameters(where: str, parameters: Any, priority: Any, server_timeout_s: Any) -> Parameters:
    """Return the parameters of each request by Triton's names; refuse other names and types."""
    expect(isinstance(parameters, Mapping), "a dict for parameters", parameters, where)
    for name in parameters:
        if name in _RESERVED:
            raise ConfigError(
                f"{where}: parameter {name!r} is not free; declare priority= or "
                "server_timeout_s=; sequences are not supported"
            )
    parameters = dict(parameters)
    if priority is not None:
        is_level = type(priority) is int and priority >= 1
        expect(is_level, "priority of 1 or more", priority, where)
        parameters["priority"] = priority
    if server_timeout_s is not None:
        most_s = 2**63 / 1e6  # Triton has microseconds as an int64
        is_time = isinstance(server_timeout_s, Real) and 0 < float(server_timeout_s) < most_s
        expected = f"server_timeout_s above 0 s and below {most_s:g} s"
        expect(is_time, expected, server_timeout_s, where)
        parameters["timeout"] = max(1, round(float(server_timeout_s) * 1e6))
    for name, value in parameters.items():
        parameter = f"{where}, parameter {name!r}"
        expect(isinstance(name, str), "a name of type str", name, parameter)
        is_plain = type(value) in (bool, int, float, str)
        expect(is_plain, "a bool, int, float or str", value, parameter)
        is_short = not isinstance(value, int) or -(2**63) <= value < 2**63
        expect(is_short, "an integer of 64 bits", value, parameter)
    return tuple(parameters.items())


@cache
def warn_once(message: str, *arguments: str) -> None:
    """Warn, once in a process rather than at every chunk."""
    logger.warning(message, *arguments)


def _listed(tensors: Mapping[str, Sequence[str]], kind: str) -> str:
    """Return tensors with their labels or fields; of many, the first, the last and the count."""
    shown = []
    for tensor, all_names in tensors.items():
        names = list(all_names)
        if len(names) > _MOST_NAMES:
            names[_MOST_NAMES - 2 :] = ["...", f"{names[-1]}: {len(names)} {kind}"]
        shown.append(f"{tensor} ({', '.join(names)})" if names else tensor)
    return printable(", ".join(shown))
