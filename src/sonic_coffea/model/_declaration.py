"""A model's inputs and outputs as an analysis declares them, compared with a server's contract."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any

import awkward as ak
import xxhash

from sonic_coffea.errors import ConfigError, ContractError, FieldError, nearest, printable
from sonic_coffea.layouts import (
    Inputs,
    Layout,
    Output,
    bind_inputs,
    check_told_apart,
    declared,
    dtype_name,
    records_of,
)
from sonic_coffea.model._scaffold import fitting
from sonic_coffea.pool import WithPool
from sonic_coffea.reporting import tables

if TYPE_CHECKING:
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

# Of more labels, not all are printed: taggers have hundreds.
_MOST_LABELS = 12

ONE_REQUEST_PER = ("row", "event")

# Parameters that mean something to Triton itself.
_SEQUENCES = "rows are scored each by itself, and sequences are not supported"
_RESERVED = {
    "priority": "declare priority=",
    "timeout": "declare server_timeout_s=",
    **dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), _SEQUENCES),
    **dict.fromkeys(("headers", "binary_data_output"), "the protocol has it"),
}
_LONGEST_S = 1e9

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
    # The contract of the last comparison, the declaration's hash then, and the result.
    _compared: tuple[Contract, str, Contract] | None = None
    one_request_per: str | None = None
    parameters: Parameters = ()

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
        for side, declared_side in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(declared_side, Mapping):
                raise ConfigError(
                    f"model {name!r}: expected a dict for {side}, as the server names them, got "
                    f"{type(declared_side).__name__}"
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
        check_told_apart(inputs, one_request_per)
        self.name = name
        self.one_request_per = one_request_per
        self.parameters = _parameters(name, parameters or {}, priority, server_timeout_s)
        self.inputs = dict(inputs)
        self.outputs = {k: o if isinstance(o, Output) else Output(o) for k, o in outputs.items()}
        self.version = None if version is None else str(version)

    def __repr__(self) -> str:
        outputs = ", ".join(
            f"{name} ({_listed(o.labels)})" if o.labels else name
            for name, o in self.outputs.items()
        )
        version = f", version {self.version}" if self.version else ""
        return (
            f"Model({self.name!r}{version}, inputs: {printable(', '.join(self.inputs))}; "
            f"outputs: {printable(outputs)})"
        )

    def _repr_html_(self) -> str:
        tensors = declared(self.inputs)
        rows = []
        for name, layout in self.inputs.items():
            rows.append(("input", name, _shown(*tensors[name]), type(layout).__name__))
            others = [key for key in layout.tensors(name) if key != name]
            rows += [("", key, _shown(*tensors[key]), "") for key in others]
        for name, output in self.outputs.items():
            labels = _listed(output.labels or ()) or "numbers"
            per = "a new collection" if output.splits else f"per {output.per}"
            rows.append(("output", name, dtype_name(output.dtype), f"{labels}; {per}"))
        version = f" version {self.version}" if self.version else ""
        note = "check() compares this with the server's model"
        return tables.table(f"Model {self.name}{version}", rows, notes=[note])

    def __getstate__(self) -> dict[str, Any]:
        # Without the hash, as another release may hash differently, and without what depends on it.
        return {**super().__getstate__(), "_hashed": None, "_compared": None}

    @property
    def config_hash(self) -> str:
        """A hash of the declaration: inputs, transformations, outputs and pinned version."""
        # The repr would take 0.15 ms of each call. Layouts are frozen; all else is compared.
        more: tuple[Any, ...] = (self.one_request_per,) if self.one_request_per else ()
        more += self.parameters
        now = (self.name, self.version, *more, *self.inputs.items(), *self.outputs.items())
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
                    **self._place(contract, server),
                )
            notes.append(f"the server calls the values of {name!r} {', '.join(served)}")
        differing = [
            f"{ours!r} is {theirs!r}"
            for ours, theirs in zip(self._channels, contract.features, strict=False)
            if ours != theirs
        ]
        if differing:
            notes.append(f"in the model's file {', '.join(differing)}")
        return notes

    @property
    def _channels(self) -> list[str]:
        """The names of the values of the input, if there is one, and it is a row of features."""
        (layout, *others) = self.inputs.values()
        features = () if others else getattr(layout, "features", ())
        return [feature.channel for feature in features]

    def _compare_features(self, contract: Contract, server: str) -> None:
        """Refuse features of the same name at different places; other names may mean the same."""
        ours, theirs = self._channels, contract.features
        for place, name in enumerate(ours if theirs else ()):
            if name in theirs and theirs[place : place + 1] != (name,):
                raise ContractError(
                    f"feature {name!r} is number {place} as declared, and number "
                    f"{theirs.index(name)} in the model's file: declared {', '.join(ours)}; in the "
                    f"file {', '.join(theirs)}",
                    **self._place(contract, server),
                )

    def compare(self, contract: Contract, *, server: str) -> Contract:
        """Return a server's contract, with the declared tensors if the server lists none.

        If declaration and contract differ, raise `ContractError`, which shows the two side by side.
        """
        if contract.unsupported:
            raise ContractError(contract.unsupported, **self._place(contract, server))
        whole = [name for name, layout in self.inputs.items() if not layout.stacks]
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
                f"the rows of input {whole[0]!r} {why}", **self._place(contract, server)
            )
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
            suggestion = fitting(self.inputs, self.outputs, contract, inputs, outputs)
            raise ContractError(
                f"{error.message}\n{suggestion}", **self._place(contract, server)
            ) from None
        self._compare_features(contract, server)
        if not contract.lists_tensors:
            _warn_of_unlisted_tensors(self.name, server)
        return replace(contract.completed(inputs, outputs), parameters=self.parameters)

    def _place(self, contract: Contract, server: str) -> dict[str, Any]:
        return {"server": server, "model": self.name, "version": contract.version}

    def fitted(self, contract: Contract, *, server: str) -> Contract:
        """Return the result of `compare`, which is kept until declaration or contract change."""
        compared = self._compared
        if compared is None or compared[0] is not contract or compared[1] != self.config_hash:
            fits = self.compare(contract, server=server)
            self._compared = compared = contract, self.config_hash, fits
        return compared[2]

    def bind(self, objects: Any) -> Inputs:
        """Bind the inputs to the arrays of a call."""
        with self.hinting(objects):
            return bind_inputs(self.inputs, objects, one_request_per=self.one_request_per)

    @contextmanager
    def hinting(self, objects: Any) -> Iterator[None]:
        """Say which parts of the arrays have the fields, where these were given as a whole."""
        try:
            yield
        except FieldError as error:
            names: list[str] = list(objects) if isinstance(objects, Mapping) else []
            if isinstance(objects, ak.Array):
                names = objects.fields
            paths = {path for each in self.inputs.values() for path in each.columns}
            roots = {path.partition(".")[0] for path in paths}
            fit = [name for name in names if roots <= {*ak.fields(records_of(objects[name]))}]
            if not fit:
                raise
            hint = f"{' or '.join(fit[:4])} has them: give that, such as events.{fit[0]}"
            if isinstance(objects, Mapping) and fit == names != fit[:1]:
                hint = "for variations of the same objects, give sonic.Variations(nominal=…, up=…)"
            raise error.because(hint) from None

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


def _parameters(
    model: str,
    parameters: Mapping[str, bool | int | float | str],
    priority: int | None,
    server_timeout_s: float | None,
) -> Parameters:
    """Return the parameters of each request by Triton's names; refuse other names and types."""
    for name, value in parameters.items():
        if name in _RESERVED:
            raise ConfigError(f"model {model!r}: parameter {name!r} is not free; {_RESERVED[name]}")
        if type(value) not in (bool, int, float, str):
            raise ConfigError(
                f"model {model!r}, parameter {name!r}: expected a bool, int, float or str, got "
                f"{type(value).__name__}"
            )
    carried = list(parameters.items())
    if priority is not None:
        if type(priority) is not int or priority < 1:
            raise ConfigError(
                f"model {model!r}: expected a priority of 1 or more, got {priority!r}"
            )
        carried.append(("priority", priority))
    if server_timeout_s is not None:
        if not isinstance(server_timeout_s, Real) or not 0 < float(server_timeout_s) < _LONGEST_S:
            raise ConfigError(
                f"model {model!r}: expected server_timeout_s above 0 s and below {_LONGEST_S:g} s, "
                f"got {server_timeout_s!r}"
            )
        carried.append(("timeout", max(1, round(server_timeout_s * 1e6))))
    return tuple(carried)


@cache
def _warn_of_unlisted_tensors(model: str, server: str) -> None:
    """Warn, once in a process."""
    logger.warning(
        "%s does not list what model %s takes and gives, so nobody has compared the declaration "
        "with it",
        server,
        model,
    )


def _listed(labels: Sequence[str]) -> str:
    """Return labels as a text; of many labels, the first and the last, and their number."""
    if len(labels) <= _MOST_LABELS:
        return ", ".join(labels)
    first = ", ".join(labels[: _MOST_LABELS - 2])
    return f"{first}, ..., {labels[-1]}: {len(labels)} labels"


def _shown(dtype: Any, shape: tuple[int, ...] | None) -> str:
    axes = "?" if shape is None else ", ".join("?" if n < 0 else str(n) for n in shape)
    name = dtype_name(dtype)
    return f"{name} [N, {axes}]" if axes else f"{name} [N]"
