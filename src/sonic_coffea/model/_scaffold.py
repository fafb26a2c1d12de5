"""Declarations written from the contract of a served model, or of a file, to fill in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, ContractError, SonicError, expect, printable, require
from sonic_coffea.layouts import (
    Bucketed,
    Dense,
    Feature,
    Layout,
    Mask,
    Output,
    Padded,
    Pairwise,
    Row,
    dtype_name,
)
from sonic_coffea.model._weaver import group_of
from sonic_coffea.pool import Settings, open_transport
from sonic_coffea.transport import DATATYPES, Contract, TensorSpec

# By the server's names of types, those of declarations.
_DTYPES = {**DATATYPES, "BYTES": "string"}
_VECTOR = ("px", "py", "pz", "energy")
# Arguments that are written without their names.
_POSITIONAL = ("fields", "field", "length", "labels")
# Of more values, nobody fills in the names; a server may say that there are 10^18.
_MOST_NAMES = 10_000
_TEXT = """\
import sonic_coffea as sonic

# {model} a request.
# Fill in the fields, in the order of the training; see what is sent with model.pack(objects).
model = sonic.Model(
    {name},
    inputs={{
{inputs}
    }},
    outputs={{
{outputs}
    }},
)
"""


def scaffold(
    source: Settings | str | Path, model: str | None = None, version: str | None = None
) -> str:
    """Return a declaration, as Python, that fits a served model or a file, with names to fill in.

    Parameters
    ----------
    source : Settings, str or Path
        One server, and its options; its URL; or the path of a file that `build_repository` takes.
    model, version : str
        The model to declare; of a file, by default, the file's name.

    Raises
    ------
    ConfigError
        If the file cannot be read.
    ContractError
        If the server lists no tensors.
    """
    labels: dict[str, list[str]] = {}
    if isinstance(source, Path) or (isinstance(source, str) and Path(source).is_file()):
        server, contract = str(source), contract_of_file(Path(source), model)
    else:
        settings = Settings.of(source)
        server = settings.servers[0]
        if model is None:
            raise ConfigError(f"expected the name of a model of {server}")
        with open_transport(server, options=settings.connection_options()) as connection:
            contract = connection.metadata(model, version)
            if not contract.lists_tensors:
                raise ContractError(
                    "the server does not list what the model takes and gives, so that its "
                    "declaration cannot be written from that",
                    server=server,
                    model=model,
                    version=contract.version,
                )
            with contextlib.suppress(SonicError):  # a model that does not take a row of zeros
                labels = connection.labels(contract)
    limit = "any number of" if contract.max_rows is None else f"at most {contract.max_rows:,}"
    return _TEXT.format(
        model=printable(f"{contract.model} version {contract.version} of {server}, {limit} rows"),
        name=_quoted(contract.model),
        inputs="\n".join(_entry(spec, *_layout(spec, contract)) for spec in contract.inputs),
        outputs="\n".join(_output_entry(s, labels.get(s.name)) for s in contract.outputs),
    )


def contract_of_file(path: Path, name: str | None) -> Contract:
    """Return the contract with which a model file would be served."""
    from sonic_coffea.server import contract_of

    return contract_of(path, path.stem if name is None else name)


def filled_in(
    contract: Contract, file: Path, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> tuple[dict[str, Layout], dict[str, Any]]:
    """Return the inputs and outputs of a model file, whose fields are given by the inputs' names.

    Raises
    ------
    ConfigError
        If the file leaves open what an input takes; the message shows what to fill in.
    """
    tensors: Any
    for side, tensors in (("inputs", inputs), ("outputs", outputs)):
        is_dict = isinstance(tensors, Mapping)
        expect(is_dict, f"a dict for {side}, as the file names them", tensors)
    layouts: dict[str, Layout] = {}
    lines: list[str] = []
    for spec in contract.inputs:
        declared = inputs.get(spec.name)
        if isinstance(declared, Layout):
            layouts[spec.name] = declared
            continue
        features = () if declared is None else Row(declared).features
        layout, remark = _layout(spec, contract, features)
        # The file tells neither what a mask means, nor how long lists may be, nor which of two
        # axes of the same length is which.
        is_square = len(spec.shape) == 2 and spec.shape[0] == spec.shape[1] != 1
        is_certain = type(layout) in (Row, Padded, Dense) and not is_square
        if layout is not None and is_certain and layout.features == features:
            layouts[spec.name] = layout
        else:
            lines.append(_entry(spec, layout, remark))
    served = [spec.name for spec in (*contract.inputs, *contract.outputs)]
    require((*inputs, *outputs), served, f"{file} has no tensor")
    if lines:
        raise ConfigError(
            f"{file} does not say what its inputs take; fill in the fields, or layouts, as "
            "inputs={\n" + textwrap.indent(textwrap.dedent("\n".join(lines)), "    ") + "\n}"
        )
    return layouts, {s.name: _output(s, outputs.get(s.name)) for s in contract.outputs}


def fitting(inputs: Mapping[str, Layout], outputs: Mapping[str, Output], contract: Contract) -> str:
    """Return entries, as Python, that fit a contract, with a declaration's fields and labels."""
    known = {name: output.labels for name, output in outputs.items()}
    fields = {name: layout.features for name, layout in inputs.items()}
    lines = [
        *(_entry(s, *_layout(s, contract, fields.get(s.name, ()))) for s in contract.inputs),
        *(_output_entry(spec, known.get(spec.name)) for spec in contract.outputs),
    ]
    return "what would fit:\n" + textwrap.indent(textwrap.dedent("\n".join(lines)), "    ")


def _layout(
    spec: TensorSpec, contract: Contract, fields: Sequence[Feature] = ()
) -> tuple[Layout | None, str]:
    """Return a layout that makes a tensor, of some fields and others to fill in, and a remark."""
    dtype = _DTYPES.get(spec.datatype)
    if dtype is None or (dtype == "string" and len(spec.shape) > 2):
        return None, "no layout makes it"
    if not fields and len(contract.inputs) == 1:
        fields = tuple(map(Feature, contract.features))
    if _is_mask(spec) and dtype != "string":
        return _mask(spec, contract, dtype)
    if len(spec.shape) < 3:
        return _numbers(spec, contract, fields, dtype)
    if len(spec.shape) == 3 and spec.shape[1] == spec.shape[2] and spec.shape[0] == len(_VECTOR):
        length = Bucketed("field").lengths if min(spec.shape) < 0 else spec.shape[1]
        return Pairwise(_VECTOR, length, dtype=dtype), "of each pair"
    return _array(spec, fields, dtype)


def _array(spec: TensorSpec, fields: Sequence[Feature], dtype: str) -> tuple[Layout, str]:
    shape = None if min(spec.shape) < 0 else spec.shape
    return Dense(_named(1, fields)[0], shape, dtype), "an array of each object"


def _numbers(
    spec: TensorSpec, contract: Contract, fields: Sequence[Feature], dtype: str
) -> tuple[Layout, str]:
    """Return a layout of numbers of each object, or of each constituent."""
    order, is_sure = _axes(spec, contract, len(fields))
    sizes = dict(zip(order, spec.shape, strict=True))
    count, length = max(sizes.get("F", 1), 1), sizes.get("L", 1)
    if count > _MOST_NAMES:
        return _array(spec, fields, dtype)
    named = _named(count, fields)
    if length == 1:
        remark = f"{'numbers' if order else 'a number'} of each object"
        return Row(named, dtype, axis_order=order), remark
    remark = f"{f'{count} fields' if 'F' in order else 'a number'} of each constituent"
    if not is_sure:
        remark += f"; or {length} of them, with the axes the other way round"
    if length < 0:
        return Bucketed(named, axis_order=order, dtype=dtype), f"{remark}, of any length"
    return Padded(named, length, axis_order=order, dtype=dtype), remark


def _mask(spec: TensorSpec, contract: Contract, dtype: str) -> tuple[Layout, str]:
    length = math.prod(spec.shape)
    group = group_of(spec.name)
    jagged = [
        s
        for s in contract.inputs
        if not _is_mask(s) and (s.shape == (-1,) or (len(s.shape) == 2 and 1 not in s.shape))
    ]
    beside = next((s.name for s in jagged if group and group_of(s.name) == group), None)
    order = "L" if len(spec.shape) == 1 else "FL" if spec.shape[0] == 1 else "LF"
    remark = "1 where there is a constituent"
    if beside is None and len(jagged) > 1:
        remark += "; say of which input, with beside="
    fixed = length if length > 0 else None
    return Mask(fixed, beside=beside, axis_order=order, dtype=dtype), remark


def _is_mask(spec: TensorSpec) -> bool:
    named = "mask" in spec.name.lower()
    return named and (len(spec.shape) == 1 or (len(spec.shape) == 2 and 1 in spec.shape))


def _axes(spec: TensorSpec, contract: Contract, fields: int) -> tuple[str, bool]:
    """Return the order of the fields and the constituents, and whether it is sure."""
    if len(spec.shape) < 2:
        return ("L" if -1 in spec.shape else "F" * len(spec.shape)), True
    first, last = spec.shape
    masks = {n for s in contract.inputs if _is_mask(s) for n in s.shape if n != 1}
    others = {n for n in spec.shape if fields and n != fields}
    for lengths, is_sure in (({-1}, True), ({1}, False), (masks, True), (others, True)):
        if (first in lengths) != (last in lengths):
            return ("LF" if first in lengths else "FL"), is_sure
    return ("LF" if first > last else "FL"), False


def _named(count: int, fields: Sequence[Feature]) -> list[Feature]:
    """Return the fields as far as they are known, and names to fill in."""
    return [*fields[:count], *(Feature(f"field_{k + 1}") for k in range(len(fields), count))]


def _output(spec: TensorSpec, declared: Any) -> Output:
    """Return a declaration of an output, with its labels if they are known."""
    if isinstance(declared, Output):
        return declared
    dtype = _DTYPES.get(spec.datatype)
    per = "constituent" if len(spec.shape) == 2 and spec.shape[0] < 0 else "row"
    inner = spec.shape[1:] if per == "constituent" else spec.shape
    is_array = declared is None and math.prod(inner) > 1 and min(inner) > 0
    return Output(declared, dtype or "float32", shape=inner if is_array else None, per=per)


def _output_entry(spec: TensorSpec, labels: Sequence[str] | None) -> str:
    """Return the lines of an output's entry, with labels to fill in."""
    width = spec.shape[-1] if spec.shape else 1
    if spec.datatype not in _DTYPES:
        return _entry(spec, None, "of a type that is not known")
    known, remark = list(labels or ())[: max(width, 0)], ""
    if width > _MOST_NAMES:
        known = []
    elif len(spec.shape) <= 2 and len(known) < width and width > 1:
        known += [f"label_{k + 1}" for k in range(len(known), width)]
        remark = "names of the values"
    return _entry(spec, _output(spec, known or None), remark)


def _entry(spec: TensorSpec, declared: Layout | Output | None, remark: str) -> str:
    """Return the lines of an entry: the server's tensor as a comment, and a layout or output."""
    shape = ", ".join(["N", *("?" if n < 0 else str(n) for n in spec.shape)])
    tensor = f"{spec.datatype} [{shape}]" + (f": {remark}" if remark else "")
    return f"        # {printable(tensor)}\n        {_quoted(spec.name)}: {_python(declared)},"


def _python(declared: Layout | Output | None) -> str:
    """Return a declaration as Python: what is to be filled in, and what is not the default."""
    if declared is None:
        return "..."
    kind: Any = type(declared)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    first = {name: getattr(declared, name) for name in names if name in _POSITIONAL}
    default = kind(*first.values())
    written = [_value(value) for value in first.values() if value is not None]
    if isinstance(declared, Output) and declared == default:
        return "".join(written) or "None"
    written += [
        f"{name}={_value(getattr(declared, name))}"
        for name in names
        if name not in first and repr(getattr(declared, name)) != repr(getattr(default, name))
    ]
    return f"sonic.{kind.__name__}({', '.join(written)})"


def _value(value: Any) -> str:
    if isinstance(value, tuple) and all(isinstance(each, (Feature, str)) for each in value):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Feature):
        is_name = isinstance(value.name, str) and value == Feature(value.name)
        return _quoted(str(value.name)) if is_name else f"sonic.{value!r}"
    if isinstance(value, str):
        return _quoted(value)
    return _quoted(dtype_name(value)) if hasattr(value, "itemsize") else repr(value)


def _quoted(text: str) -> str:
    """Return a text as Python; it shows characters that change the order of others, too."""
    return printable(json.dumps(text, ensure_ascii=False))
