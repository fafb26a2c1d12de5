"""The contract of a served model, its comparison with a declaration, and missing models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray

from sonic_coffea import errors
from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.transport._tensors import DATATYPES, STRINGS, kserve_name

# Parameters of a request that say when it is executed, not how.
_SCHEDULING = ("priority", "timeout")

# States in the index of a version that a server serves, or will serve again.
_TRANSIENT = ("READY", "LOADING", "UNLOADING")
_UNLOADED = "unloaded"
# gRPC's limit of 2 GiB holds for the whole message, which has more in it than the tensors.
MAX_REQUEST_BYTES = 2_000_000_000

Inner = int | tuple[Any, ...] | None
"""The number of labels of an output, or the shape of a row; None and `...` are not known."""

DeclaredInputs = Mapping[str, tuple[np.dtype[Any], tuple[int, ...] | None]]
"""Declared inputs by name: dtype and inner shape of what will be sent; None is not known yet."""

DeclaredOutputs = Mapping[str, tuple[Inner, np.dtype[Any] | None]]
"""Declared outputs by name: labels or inner shape, and the dtype; None is any."""

Parameters = tuple[tuple[str, bool | int | float | str], ...]


class ModelEntry(NamedTuple):
    """One line of a server's repository index."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a model, without the axis of the rows.

    ``shape`` has -1 where a length is free; ``datatype`` is KServe's name, such as ``FP32``;
    ``rows`` is the length of the axis of the rows, -1 where that is free.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    rows: int = -1

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape with the axis of the rows."""
        return (self.rows, *self.shape)

    def __str__(self) -> str:
        return f"{self.datatype} {_shown(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A model as its server describes it.

    Attributes
    ----------
    max_rows : int or None
        Rows that one request may hold; None where the server sets no limit.
    stacks : bool
        Whether the server may stack the rows of several requests.
    preferred_rows : tuple of int
        Batch sizes that the server's dynamic batcher prefers; may be empty.
    digest : str
        Checksum of what decides the version's outputs, if the model's configuration has one. It is
        of the file of an ONNX model; of others' files, function, and tensors in order.
    features : tuple of str
        Names of the input's values in the model's file, in order, if the model's configuration has
        them; those of trees do.
    parameters : tuple of (str, value)
        What each request carries besides tensors. They are declared; no server lists them.
    round_trip_s : float
        The time to the server and back without any work; 0 if that is not known.
    """

    model: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int | None = None
    preferred_rows: tuple[int, ...] = ()
    digest: str = ""
    features: tuple[str, ...] = ()
    parameters: Parameters = ()
    stacks: bool = False
    round_trip_s: float = field(default=0.0, compare=False)

    @property
    def scored_by(self) -> Parameters:
        """The parameters that may change scores."""
        return tuple(p for p in self.parameters if p[0] not in _SCHEDULING)

    @property
    def lists_tensors(self) -> bool:
        """Whether the server lists inputs and outputs; some runtimes do not."""
        return bool(self.inputs and self.outputs)

    def zeros(self, rows: int, length: int = 16) -> dict[str, NDArray[Any]]:
        """Return tensors of zeros, of `length` along axes that are free.

        Networks that search for nearest neighbours need several.

        Raises
        ------
        ConfigError
            If an input has no numbers, or takes more than a message holds.
        """
        tensors = {}
        for spec in self.inputs:
            if spec.datatype not in DATATYPES or spec.datatype == "BYTES":
                raise ConfigError(
                    f"the model cannot be tried with zeros: input {spec.name!r} is "
                    f"{spec.datatype}, which is not a number"
                )
            shape = [rows, *(n if n >= 0 else length for n in spec.shape)]
            dtype = np.dtype(DATATYPES[spec.datatype])
            if (nbytes := math.prod(shape) * dtype.itemsize) > MAX_REQUEST_BYTES:
                raise ConfigError(
                    f"the model cannot be tried with zeros: input {spec.name!r} takes {nbytes:,} "
                    "bytes, and a message of gRPC holds less than 2 GiB"
                )
            tensors[spec.name] = np.zeros(shape, dtype)
        return tensors

    def received(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the tensors of a response; bfloat16, which awkward lacks, as float32.

        An output of another type than the contract's is an error: its numbers would be misread.

        Raises
        ------
        ResponseError
            Naming the output.
        """
        for spec in self.outputs:
            got = kserve_name(tensors[spec.name].dtype) if spec.name in tensors else spec.datatype
            if got != spec.datatype:
                what = f"came back as {got}, the model declares {spec.datatype}"
                raise errors.ResponseError(f"output {spec.name!r} {what}")
        return {
            name: t.astype(np.float32) if kserve_name(t.dtype) == "BF16" else t
            for name, t in tensors.items()
        }

    def completed(self, inputs: DeclaredInputs, outputs: DeclaredOutputs) -> Contract:
        """Return the contract with the declared tensors where the server lists none."""
        takes = tuple(_spec(name, *tensor) for name, tensor in inputs.items())
        gives = tuple(
            _spec(name, dtype, inner)
            for name, (inner, dtype) in outputs.items()
            if dtype is not None
        )
        return replace(self, inputs=self.inputs or takes, outputs=self.outputs or gives)

    def check(self, inputs: DeclaredInputs, outputs: DeclaredOutputs, *, server: str) -> None:
        """Compare the model with a declaration, as far as `server` lists the model's tensors.

        Raises
        ------
        ContractError
            With the model and the declaration side by side.
        """
        problems: list[str] = []
        rows = [("", "declared", "on the server")]
        results = {name: (dtype, inner) for name, (inner, dtype) in outputs.items()}
        sides: dict[str, tuple[Mapping[str, tuple[Any, Inner]], tuple[TensorSpec, ...], Any]] = {
            "input": (inputs, self.inputs, _input_mismatches),
            "output": (results, self.outputs, _output_mismatches),
        }
        for role, (declared, specs, mismatches) in sides.items():
            served = {spec.name: spec for spec in specs}
            for name in dict.fromkeys([*declared, *served]):
                spec, tensor = served.get(name), declared.get(name)
                ours = "-" if tensor is None else _described(*tensor)
                rows.append((f"{role} {name}", ours, str(spec or "-")))
                if tensor and spec:
                    problems += mismatches(spec, *tensor)
                elif tensor and served:
                    problems.append(f"the model has no {role} {name!r}; {nearest(name, served)}")
                elif role == "input" and not tensor:
                    problems.append(f"nothing is given for the model's input {name!r}")
        if not problems:
            return
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        table = "\n".join(f"  {name:{first}}  {a:{second}}  {b}" for name, a, b in rows)
        raise errors.ContractError(
            "; ".join(problems) + "\n" + table,
            server=server,
            model=self.model,
            version=self.version,
        )


def newest_of(versions: Iterable[str]) -> str:
    """Return the newest of some versions, 10 before 9; an empty string if there are none."""
    return max(versions, key=lambda v: (v.isdecimal(), len(v), v), default="")


def not_found(
    model: str,
    version: str | None,
    index: Sequence[ModelEntry],
    *,
    server: str,
    place: str = "server",
) -> errors.ModelNotFoundError:
    """Return the error for a model that a server or repository lacks, with what it has instead."""
    entries = [entry for entry in index if entry.name == model]
    matching = [entry for entry in entries if version in (None, entry.version)]
    kind = errors.ModelNotFoundError
    if not entries:
        hint = nearest(model, {entry.name for entry in index})
    elif any(entry.state in _TRANSIENT or entry.reason == _UNLOADED for entry in matching):
        kind = errors.ModelNotReadyError
        hint = "it is listed, so another server has it, or it is being loaded or was unloaded"
    else:
        loaded = {f"version {e.version} ({e.reason or e.state})" for e in entries if e.version}
        versions = ", ".join(sorted(loaded))
        hint = f"it has {versions}" if versions else "it is in the repository, and not loaded"
    named = f"model {model!r}" + (f" version {version}" if version else "")
    message = f"the {place} does not have {named}; {hint}"
    return kind(message, server=server, model=model, version=version)


def _input_mismatches(spec: TensorSpec, dtype: Any, inner: Inner) -> Iterator[str]:
    """Say why a declared input does not fit; a length that varies does not fit a fixed one."""
    fits = inner is None or _agree(spec.shape, _axes(inner))
    if kserve_name(dtype) != spec.datatype or not fits:
        yield f"input {spec.name!r} is {_described(dtype, inner)}, the model takes {spec}"


def _output_mismatches(spec: TensorSpec, dtype: Any, inner: Inner) -> Iterator[str]:
    """Say why a declared output does not fit; the model may have a last axis of 1 besides."""
    gives = DATATYPES.get(spec.datatype)
    if gives is None:
        yield (
            f"output {spec.name!r} is {spec.datatype}, which is not known; leave it out of the "
            "declaration, and it is not asked for"
        )
    elif dtype is not None and gives != dtype.name:
        ours, theirs = ("string" if d == STRINGS.name else d for d in (dtype.name, gives))
        yield (
            f"output {spec.name!r} is declared {ours}, the model gives {theirs} "
            f"({spec.datatype}); declare Output(dtype={theirs!r})"
        )
    if not _gives(spec.shape, inner):
        what = f"{inner} labels" if isinstance(inner, int) else f"shape {_shown(_axes(inner))}"
        yield f"output {spec.name!r} is declared with {what}, the model gives {spec}"


def _gives(shape: tuple[int, ...], inner: Inner) -> bool:
    """Whether an output of a shape may have this number of labels, or this inner shape."""
    if isinstance(inner, int):
        return (shape[-1:] or (1,))[0] in (-1, inner)
    if inner is None:
        return True
    if inner[:1] == (...,):
        inner = inner[1:]
        shape = shape[max(len(shape) - len(inner), 0) :]
    while inner[len(shape) :] and inner[-1] is ...:  # of rows without axes of their own
        inner = inner[:-1]
    if len(shape) == len(inner) + 1 and shape[-1] in (-1, 1):
        shape = shape[:-1]
    return _agree(shape, inner)


def _spec(name: str, dtype: np.dtype[Any], inner: Inner) -> TensorSpec:
    shape = tuple(n for n in _axes(inner) if n is not ...)
    return TensorSpec(name=name, datatype=kserve_name(dtype), shape=shape)


def _axes(inner: Inner) -> tuple[Any, ...]:
    return (...,) if inner is None else (inner,) if isinstance(inner, int) else inner


def _agree(served: tuple[int, ...], declared: tuple[Any, ...]) -> bool:
    """Whether two shapes are the same where the server's is not free, and the other is known."""
    return len(served) == len(declared) and all(
        n in (-1, m) or m is ... for n, m in zip(served, declared, strict=True)
    )


def _described(dtype: np.dtype[Any] | None, inner: Inner) -> str:
    """Return a declared tensor as `TensorSpec` shows one of the server."""
    return f"{'any type' if dtype is None else kserve_name(dtype)} {_shown(_axes(inner))}"


def _shown(axes: tuple[Any, ...]) -> str:
    shown = ("…" if n is ... else "?" if n < 0 else str(n) for n in axes)
    return f"[{', '.join(['N', *shown])}]"
