"""Declarations written from a server's contract, to fill in."""

from __future__ import annotations

import contextlib
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ContractError, SonicError
from sonic_coffea.layouts import Feature, Layout, Output
from sonic_coffea.transport import DATATYPES, Contract, TensorSpec, connect_transport, kserve_name

if TYPE_CHECKING:
    from sonic_coffea.pool import Settings

_WIDTH = 100
# Between the items of a list.
_BREAK = "\0"
# To choose from, where the model takes any length.
_LENGTHS = (16, 32, 64, 128)
_VECTOR = tuple(Feature(name) for name in ("px", "py", "pz", "energy"))


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A declaration that fits a served model, with names of fields to fill in.

    Attributes
    ----------
    contract : Contract
        The model's contract.
    labels : mapping
        The labels of outputs, as far as they are known.
    server : str
        The server, for a comment.
    """

    contract: Contract
    labels: Mapping[str, list[str]]
    server: str

    @property
    def layouts(self) -> dict[str, str]:
        """A layout for each input, as Python."""
        layouts = {spec.name: _layout(spec, self.contract)[0] for spec in self.contract.inputs}
        return {name: code.replace(_BREAK, " ") for name, code in layouts.items()}

    @property
    def text(self) -> str:
        """The declaration, as Python."""
        contract, labels = self.contract, self.labels
        limit = "any number of" if contract.max_rows is None else f"at most {contract.max_rows:,}"
        model = f"{contract.model} version {contract.version} of {self.server}"
        lines = [
            "import sonic_coffea as sonic",
            "",
            *_comment(f"{model}, {limit} rows a request."),
            *_comment(
                "Fill in the fields, in the order of the training; see what is sent with "
                "model.pack(objects)."
            ),
            "model = sonic.Model(",
            f"    {_quoted(contract.model)},",
            "    inputs={",
            *(line for spec in contract.inputs for line in _entry(spec, _layout(spec, contract))),
            "    },",
            "    outputs={",
            *(line for s in contract.outputs for line in _entry(s, _output(s, labels.get(s.name)))),
            "    },",
            ")",
        ]
        return "\n".join(lines) + "\n"


def scaffold(settings: Settings, model: str, version: str | None = None) -> Scaffold:
    """Return a declaration that fits a served model.

    Parameters
    ----------
    settings : Settings
        One server, and its options.
    model, version : str
        The model to declare.

    Raises
    ------
    ContractError
        If the server lists no tensors.
    """
    server = settings.servers[0]
    with connect_transport(server, options=settings.connection_options()) as connection:
        contract = connection.contract(model, version)
        if not contract.lists_tensors:
            raise ContractError(
                "the server does not list what the model takes and gives, so that its declaration "
                "cannot be written from that",
                server=server,
                model=model,
                version=contract.version,
            )
        labels: dict[str, list[str]] = {}
        with contextlib.suppress(SonicError):  # a model that does not take a row of zeros
            labels = connection.labels(contract, version)
    return Scaffold(contract, labels, server)


def fitting(
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Output],
    contract: Contract,
    packed: Mapping[str, tuple[Any, Any]],
    expected: Mapping[str, tuple[Any, Any]],
) -> str:
    """Return entries, as Python, for the inputs and outputs of a contract that are not as declared.

    ``packed`` are the types and shapes of the inputs' tensors, ``expected`` the shapes and types of
    the outputs' tensors.
    """
    lines: list[str] = []
    for spec in contract.inputs:
        known = packed.get(spec.name)
        if known is None or not spec.takes(kserve_name(known[0]), known[1]):
            fields = getattr(inputs.get(spec.name), "features", ())
            lines += _entry(spec, _layout(spec, contract, fields))
    for name in packed:
        if contract.inputs and not any(spec.name == name for spec in contract.inputs):
            lines.append(f"        # without {name!r}")
    for spec in contract.outputs:
        output = outputs.get(spec.name)
        shape, dtype = expected.get(spec.name, (None, None))
        typed = dtype is None or DATATYPES.get(spec.datatype) == dtype.name
        if output is None or not (typed and spec.gives(shape)):
            lines += _entry(spec, _output(spec, None if output is None else output.labels))
    served = {spec.name for spec in contract.outputs}
    lines += [f"        # without {name!r}" for name in outputs if served and name not in served]
    return "what would fit:\n" + "\n".join(line.removeprefix("    ") for line in lines)


def _dtype(spec: TensorSpec) -> str | None:
    return "string" if spec.datatype == "BYTES" else DATATYPES.get(spec.datatype)


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )


def _entry(spec: TensorSpec, suggestion: tuple[str, str]) -> Iterator[str]:
    """Yield the lines of an entry: the server's tensor as a comment, and a layout or output."""
    code, remark = suggestion
    shape = ", ".join(["N", *("?" if n < 0 else str(n) for n in spec.shape)])
    tensor = f"{spec.datatype} [{shape}]"
    yield from _comment(f"{tensor}: {remark}" if remark else tensor, " " * 8)
    yield from _wrapped(f"{_quoted(spec.name)}: {code},")


def _wrapped(code: str) -> Iterator[str]:
    """Yield the lines of an entry, which goes on in further lines where a list has a break."""
    line = " " * 8
    for part in code.split(_BREAK):
        if line.strip() and len(line) + len(part) > _WIDTH:
            yield line.rstrip()
            line = " " * 12
        line += part + " "
    yield line.rstrip()


def _layout(spec: TensorSpec, contract: Contract, fields: Sequence[Any] = ()) -> tuple[str, str]:
    """Return a layout that makes a tensor, as Python, and a remark."""
    dtype = _dtype(spec)
    if dtype is None or (dtype == "string" and len(spec.shape) > 2):
        return "...", "no layout makes it"
    ending = "" if dtype == "float32" else f', dtype="{dtype}"'
    if _is_mask(spec) and dtype != "string":
        return _mask(spec, contract, ending)
    if len(spec.shape) == 2:
        return _fields(spec, contract, fields, ending)
    if len(spec.shape) == 1:
        return _numbers(spec, fields, ending)
    if not spec.shape:
        return f'sonic.Row({_names(1, fields)}, axis_order=""{ending})', "a number of each object"
    return _array(spec, ending)


def _numbers(spec: TensorSpec, fields: Sequence[Any], ending: str) -> tuple[str, str]:
    if spec.shape[0] > 0:
        return f"sonic.Row({_names(spec.shape[0], fields)}{ending})", "numbers of each object"
    arguments = f'{_names(1, fields)}, {_LENGTHS}, axis_order="L"{ending}'
    return f"sonic.Bucketed({arguments})", "a number of each constituent"


def _array(spec: TensorSpec, ending: str) -> tuple[str, str]:
    """Return a layout of any rank."""
    if len(spec.shape) == 3 and spec.shape[1] == spec.shape[2] and spec.shape[0] == len(_VECTOR):
        length = str(spec.shape[1] if spec.shape[1] > 0 else _LENGTHS)
        return f"sonic.Pairwise({_names(4, _VECTOR)}, {length}{ending})", "of each pair"
    inner = "" if min(spec.shape, default=-1) < 0 else f", shape={spec.shape}"
    return f'sonic.Dense("field_1"{inner}{ending})', "an array of each object"


def _fields(
    spec: TensorSpec, contract: Contract, fields: Sequence[Any], ending: str
) -> tuple[str, str]:
    order, sure = _axes(spec, contract)
    count, length = spec.shape if order == "FL" else spec.shape[::-1]
    names = _names(max(count, 1), fields)
    if length == 1:
        return f'sonic.Row({names}, axis_order="{order}"{ending})', "numbers of each object"
    ending = ("" if order == "FL" else ', axis_order="LF"') + ending
    remark = f"{max(count, 1)} fields of each constituent"
    if not sure:
        remark += f"; or {length} of them, with the axes the other way round"
    if length < 0:
        return f"sonic.Bucketed({names}, {_LENGTHS}{ending})", f"{remark}, of any length"
    return f"sonic.Padded({names}, {length}{ending})", remark


def _mask(spec: TensorSpec, contract: Contract, ending: str) -> tuple[str, str]:
    length = math.prod(spec.shape)
    group = _group(spec.name)
    jagged = [
        s
        for s in contract.inputs
        if not _is_mask(s) and (s.shape == (-1,) or (len(s.shape) == 2 and 1 not in s.shape))
    ]
    beside = next((s.name for s in jagged if group and _group(s.name) == group), None)
    order = "L" if len(spec.shape) == 1 else "FL" if spec.shape[0] == 1 else "LF"
    arguments = [str(length)] if length > 0 else []
    arguments += [f"beside={_quoted(beside)}"] if beside else []
    arguments += [f'axis_order="{order}"'] if order != "FL" else []
    arguments += [ending.removeprefix(", ")] if ending else []
    remark = "1 where there is a constituent"
    if beside is None and len(jagged) > 1:
        remark += "; say of which input, with beside="
    return f"sonic.Mask({', '.join(arguments)})", remark


def _is_mask(spec: TensorSpec) -> bool:
    named = "mask" in spec.name.lower()
    return named and (len(spec.shape) == 1 or (len(spec.shape) == 2 and 1 in spec.shape))


def _group(name: str) -> str:
    return re.sub(r"__\d+$", "", name).rpartition("_")[0]


def _axes(spec: TensorSpec, contract: Contract) -> tuple[str, bool]:
    """Return the order of the fields and the constituents, and whether it is sure."""
    first, last = spec.shape
    if (first < 0) != (last < 0):
        return ("LF" if first < 0 else "FL"), True
    if (first == 1) != (last == 1):  # a sequence of one
        return ("LF" if first == 1 else "FL"), False
    masks = {n for s in contract.inputs if _is_mask(s) for n in s.shape if n != 1}
    if (first in masks) != (last in masks):
        return ("LF" if first in masks else "FL"), True
    return ("LF" if first > last else "FL"), False


def _names(count: int, fields: Sequence[Any]) -> str:
    """Return the names of the fields, as far as they are declared, as a list in Python."""
    declared_names = [_quoted(f.name) if f == Feature(f.name) else f"sonic.{f!r}" for f in fields]
    names = declared_names[:count]
    names += [_quoted(f"field_{k + 1}") for k in range(len(names), count)]
    return _list(names)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _list(items: Iterable[str]) -> str:
    return f"[{f',{_BREAK}'.join(items)}]"


def _output(spec: TensorSpec, labels: Sequence[str] | None) -> tuple[str, str]:
    """Return a declaration of an output, as Python, and a remark."""
    dtype = _dtype(spec)
    if dtype is None:
        return "...", "of a type that is not known"
    width = spec.shape[-1] if spec.shape else 1
    options = [] if dtype == "float32" else [f'dtype="{dtype}"']
    if len(spec.shape) == 2 and spec.shape[0] < 0:
        options.append('per="constituent"')
    remark = ""
    named = "None"
    if len(spec.shape) <= 2 and width > 1:
        known = list(labels or ())[:width]
        missing = [f"label_{k + 1}" for k in range(len(known), width)]
        named = _list(map(_quoted, [*known, *missing]))
        remark = "names of the values" if missing else ""
    elif labels and width == 1:
        named = _list(map(_quoted, labels[:1]))
    elif len(spec.shape) > 2 and min(spec.shape) > 0:
        options.append(f"shape={spec.shape}")
    if not options:
        return named, remark
    first = [] if named == "None" else [named]
    return f"sonic.Output({', '.join(first + options)})", remark
