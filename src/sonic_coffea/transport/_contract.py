"""The contract of a served model, and its comparison with a declaration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np

from sonic_coffea.errors import ConfigError, ContractError, ResponseError, nearest
from sonic_coffea.transport._tensors import DATATYPES, STRINGS, kserve_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The length of zeros on a free axis: networks that search for nearest neighbours need several.
_FREE_LENGTH = 16

SCHEDULING = ("priority", "timeout")
"""Parameters of a request that say when it is executed, not how."""

Inner = int | tuple[Any, ...] | None
"""The number of labels of an output, or the shape of a row; None and `...` are not known."""

DeclaredInputs = Mapping[str, tuple[np.dtype[Any], tuple[int, ...] | None]]
"""Declared inputs by name: dtype and inner shape of what will be sent; None is not known yet."""

DeclaredOutputs = Mapping[str, tuple[Inner, np.dtype[Any] | None]]
"""Declared outputs by name: labels or inner shape, and the dtype; None is any."""

Parameters = tuple[tuple[str, bool | int | float | str], ...]


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

    def takes(self, datatype: str, shape: tuple[int, ...] | None) -> bool:
        """Whether a tensor of this type and inner shape fits; a shape of None is not known yet.

        A length that varies, -1, does not fit if the model has a fixed one.
        """
        return datatype == self.datatype and (shape is None or _agree(self.shape, shape))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape with the axis of the rows."""
        return (self.rows, *self.shape)

    def gives(self, inner: Inner) -> bool:
        """Whether an output may have this number of labels, or this inner shape."""
        if inner is None:
            return True
        if isinstance(inner, int):
            (width,) = self.shape[-1:] or (1,)
            return width in (-1, inner)
        return _fits(self.shape, inner)


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
        The checksum of what decides the version's outputs, if the model's configuration says it:
        of an ONNX model the file, of others the files, the function, and the tensors in order.
    features : tuple of str
        What the model's file calls the values of its input, in order, if the model's configuration
        says it: of trees.
    unsupported : str
        Why requests of rows cannot be sent to it, such as that it wants sequences.
    parameters : tuple of (str, value)
        What each request carries besides tensors; declared, not described by the server.
    """

    model: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int | None = None
    preferred_rows: tuple[int, ...] = ()
    digest: str = ""
    features: tuple[str, ...] = ()
    unsupported: str = ""
    parameters: Parameters = ()
    stacks: bool = False

    @property
    def scored_by(self) -> Parameters:
        """The parameters that may change scores."""
        return tuple(p for p in self.parameters if p[0] not in SCHEDULING)

    @property
    def lists_tensors(self) -> bool:
        """Whether the server lists inputs and outputs; some runtimes do not."""
        return bool(self.inputs and self.outputs)

    def zeros(self, rows: int, length: int = _FREE_LENGTH) -> dict[str, NDArray[Any]]:
        """Return tensors of zeros, of `length` along axes that are free.

        Raises
        ------
        ConfigError
            If an input has no numbers.
        """
        tensors = {}
        for spec in self.inputs:
            if spec.datatype not in DATATYPES or spec.datatype == "BYTES":
                raise ConfigError(
                    f"the model cannot be tried with zeros: input {spec.name!r} is "
                    f"{spec.datatype}, which is not a number"
                )
            shape = [rows, *(n if n >= 0 else length for n in spec.shape)]
            tensors[spec.name] = np.zeros(shape, DATATYPES[spec.datatype])
        return tensors

    def received(
        self, tensors: Mapping[str, NDArray[Any]], context: Mapping[str, Any]
    ) -> dict[str, NDArray[Any]]:
        """Return the tensors of a response; bfloat16, which awkward lacks, as float32.

        Tensors of other types are refused, as their numbers would be taken as they are.

        Raises
        ------
        ResponseError
            Naming the output.
        """
        for spec in self.outputs:
            tensor = tensors.get(spec.name)
            if tensor is not None and kserve_name(tensor.dtype) != spec.datatype:
                raise ResponseError(
                    f"output {spec.name!r} came back as {kserve_name(tensor.dtype)}, "
                    f"the model declares {spec.datatype}",
                    **context,
                )
        return {
            name: t.astype(np.float32) if kserve_name(t.dtype) == "BF16" else t
            for name, t in tensors.items()
        }

    def completed(self, inputs: DeclaredInputs, outputs: DeclaredOutputs) -> Contract:
        """Return the contract with the declared tensors where the server lists none."""
        takes = tuple(
            TensorSpec(name=name, datatype=kserve_name(dtype), shape=shape or ())
            for name, (dtype, shape) in inputs.items()
        )
        gives = tuple(
            TensorSpec(
                name=name,
                datatype=kserve_name(dtype),
                shape=tuple(n for n in _axes(inner) if n is not ...),
            )
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
        if self.unsupported:
            raise ContractError(
                self.unsupported, server=server, model=self.model, version=self.version
            )
        listed = self.completed(inputs, outputs)
        takes = {t.name: t for t in listed.inputs}
        gives = {t.name: t for t in listed.outputs}
        if not self.outputs:
            outputs = {name: outputs[name] for name in gives}
        problems = [
            f"the model has no input {name!r}; {nearest(name, takes)}"
            for name in inputs
            if name not in takes
        ]
        problems += [
            f"nothing is given for the model's input {name!r}"
            for name in takes
            if name not in inputs
        ]
        problems += [
            f"input {name!r} is {kserve_name(dtype)} {_shown(shape)}, "
            f"the model takes {takes[name].datatype} {_shown(takes[name].shape)}"
            for name, (dtype, shape) in inputs.items()
            if name in takes and not takes[name].takes(kserve_name(dtype), shape)
        ]
        for name, (inner, dtype) in outputs.items():
            if name in gives:
                problems += _output_problems(gives[name], inner, dtype)
            else:
                problems.append(f"the model has no output {name!r}; {nearest(name, gives)}")
        if not problems:
            return
        declared = {f"input {n}": f"{kserve_name(d)} {_shown(s)}" for n, (d, s) in inputs.items()}
        for name, (inner, dtype) in outputs.items():
            shown = "any type" if dtype is None else kserve_name(dtype)
            declared[f"output {name}"] = f"{shown} {_shown(_axes(inner))}"
        served = {f"input {t.name}": f"{t.datatype} {_shown(t.shape)}" for t in self.inputs}
        served |= {f"output {t.name}": f"{t.datatype} {_shown(t.shape)}" for t in self.outputs}
        raise ContractError(
            "; ".join(problems) + "\n" + _side_by_side(declared, served),
            server=server,
            model=self.model,
            version=self.version,
        )


def _output_problems(spec: TensorSpec, inner: Inner, dtype: np.dtype[Any] | None) -> Iterator[str]:
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
    if spec.gives(inner):
        return
    if isinstance(inner, int):
        (width,) = spec.shape[-1:] or (1,)
        yield (
            f"output {spec.name!r} is declared with {inner} labels, "
            f"the model gives {width} values a row"
        )
    else:
        yield (
            f"output {spec.name!r} is declared with shape {_shown(inner)}, "
            f"the model gives {_shown(spec.shape)}"
        )


def _axes(inner: Inner) -> tuple[Any, ...]:
    return () if inner is None else (inner,) if isinstance(inner, int) else inner


def _fits(shape: tuple[int, ...], inner: tuple[Any, ...]) -> bool:
    """Whether a declared shape may be the server's, which may have a last axis of 1 besides."""
    if inner[:1] == (...,):
        inner = inner[1:]
        shape = shape[len(shape) - len(inner) :] if len(shape) >= len(inner) else shape
    if len(shape) == len(inner) + 1 and shape[-1] in (-1, 1):
        shape = shape[:-1]
    return _agree(shape, inner)


def _agree(served: tuple[int, ...], declared: tuple[Any, ...]) -> bool:
    """Whether two shapes are the same where the server's is not free."""
    return len(served) == len(declared) and all(
        n in (-1, m) for n, m in zip(served, declared, strict=True)
    )


def _shown(shape: tuple[Any, ...] | None) -> str:
    if shape is None:
        return "[N, …]"
    axes = ("…" if n is ... else "?" if n < 0 else str(n) for n in shape)
    return "[" + ", ".join(["N", *axes]) + "]"


def _side_by_side(declared: Mapping[str, str], served: Mapping[str, str]) -> str:
    names = [*declared, *(n for n in served if n not in declared)]
    lines = [("", "declared", "on the server")]
    lines += [(n, declared.get(n, "-"), served.get(n, "-")) for n in names]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
