"""Tensors in messages: raw bytes, or typed numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.grpc import service_pb2

from sonic_coffea.errors import ResponseError
from sonic_coffea.transport._datatypes import DATATYPES, STRINGS, from_wire, kserve_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from sonic_coffea.transport._contract import Contract


def tensors_of(response: Any) -> dict[str, NDArray[Any]] | None:
    """Return the tensors of a response by name; None if some have no data."""
    raw = response.raw_output_contents
    if raw and len(raw) != len(response.outputs):
        return None
    tensors = {}
    for index, output in enumerate(response.outputs):
        shape, dtype = tuple(output.shape), np.dtype(DATATYPES[output.datatype])
        if raw:
            tensors[output.name] = from_wire(raw[index], dtype, shape)
            continue
        numbers = next((values for _, values in output.contents.ListFields()), ())
        if len(numbers) != np.prod(shape):
            return None
        tensors[output.name] = np.array(numbers, dtype).reshape(shape)
    return tensors


def checked(
    tensors: Mapping[str, NDArray[Any]], contract: Contract, context: Mapping[str, Any]
) -> Mapping[str, NDArray[Any]]:
    """Return tensors of the model's types; bfloat16, which awkward lacks, as float32.

    Tensors of other types are refused, as their numbers would be taken as they are.

    Raises
    ------
    ResponseError
        Naming the output.
    """
    for spec in contract.outputs:
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


def classes_of(contents: bytes) -> list[str]:
    """Return the labels in a tensor of classes, ``value:index:label`` each, by their index."""
    labels: dict[int, str] = {}
    for text in from_wire(contents, STRINGS, (-1,)):
        _, _, indexed = text.decode("utf-8", "replace").partition(":")
        index, _, label = indexed.partition(":")
        if index.isdigit():
            labels[int(index)] = label
    return [labels.get(i) or f"label_{i + 1}" for i in range(max(labels, default=-1) + 1)]


def describe(
    request: Any,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Iterable[str],
    parameters: Iterable[tuple[str, bool | int | float | str]] = (),
) -> None:
    """Write into a request what its inputs are, which outputs are wanted, and its parameters."""
    for name, value in parameters:
        setattr(request.parameters[name], _PARAMETERS[type(value)], value)
    for name, tensor in inputs.items():
        request.inputs.add(name=name, datatype=kserve_name(tensor.dtype), shape=tensor.shape)
    for name in outputs:
        request.outputs.add(name=name)


def with_contents(request: Any, tensors: Iterable[NDArray[Any]]) -> bytes:
    """Return the serialized request, with the bytes of tensors copied once into it.

    A field that is a list of bytes may be appended to a serialized message: for each, its tag, its
    length and the bytes.
    """
    parts: list[Any] = [request.SerializeToString()]
    for tensor in tensors:
        raw = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        parts += [_CONTENTS, _varint(len(raw)), raw.data]
    return b"".join(parts)


_PARAMETERS = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}
"""The field of a parameter in KServe v2, by type."""


def _varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_FIELD = service_pb2.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_CONTENTS = _varint(_FIELD << 3 | 2)
