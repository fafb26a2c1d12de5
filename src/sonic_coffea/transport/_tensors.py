"""Tensors in messages: KServe v2's data types and numpy's, raw bytes, and typed numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonic_coffea.errors import ResponseError

STRINGS = np.dtype(object)
"""The type of tensors of strings, BYTES: numpy has none of any length."""

# KServe v2 data types and numpy's names for them.
DATATYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": STRINGS.name,
}
# numpy calls strings without a fixed length "bytes".
_KSERVE_NAMES = {"bytes": "BYTES"} | {numpy_name: name for name, numpy_name in DATATYPES.items()}
# The field of a parameter in KServe v2, by type.
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
# How protobuf begins each item of field 7 of a ModelInferRequest, raw_input_contents.
_RAW_CONTENTS = bytes([7 << 3 | 2])
_NO_DATA = "the server's response has outputs without data"


@cache
def kserve_name(dtype: np.dtype[Any]) -> str:
    """Return what KServe v2 calls a numpy dtype; numpy's name if it does not know it."""
    name: str = dtype.name
    return _KSERVE_NAMES.get(name, name)


def to_wire(tensor: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor whose memory is sent as it is; strings become one axis of bytes."""
    if tensor.dtype != STRINGS:
        return tensor
    if not tensor.size:
        return np.zeros(0, np.uint8)
    from tritonclient.utils import serialize_byte_tensor

    return np.frombuffer(serialize_byte_tensor(tensor).item(), np.uint8)


def from_wire(raw: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a tensor from its bytes; each string has the type bytes.

    Raises
    ------
    ValueError
        If the bytes do not fit the type and the shape.
    """
    if dtype != STRINGS:
        return np.frombuffer(raw, dtype).reshape(shape)
    from tritonclient.utils import deserialize_bytes_tensor

    strings: NDArray[Any] = deserialize_bytes_tensor(raw)
    return strings.reshape(shape)


def tensors_of(response: Any) -> dict[str, NDArray[Any]]:
    """Return the tensors of a response by name.

    Raises
    ------
    ResponseError
        If some outputs have no data, or one is there twice.
    """
    raw = response.raw_output_contents
    if raw and len(raw) != len(response.outputs):
        raise ResponseError(_NO_DATA)
    tensors = {}
    for index, output in enumerate(response.outputs):
        shape, dtype = tuple(output.shape), np.dtype(DATATYPES[output.datatype])
        if output.name in tensors:
            raise ResponseError(f"output {output.name!r} is there twice")
        if raw:
            tensors[output.name] = from_wire(raw[index], dtype, shape)
            continue
        numbers = next((values for _, values in output.contents.ListFields()), ())
        if len(numbers) != np.prod(shape):
            raise ResponseError(_NO_DATA)
        tensors[output.name] = np.array(numbers, dtype).reshape(shape)
    return tensors


def classes_of(contents: bytes) -> list[str]:
    """Return the labels in a tensor of classes, ``value:index:label`` each, by their index."""
    classes = from_wire(contents, STRINGS, (-1,))
    labels = {}
    for text in classes:
        _, index, label = [*text.decode("utf-8", "replace").split(":", 2), "", ""][:3]
        labels[index] = label
    return [labels.get(str(i)) or f"label_{i + 1}" for i in range(len(classes))]


def describe(
    request: Any,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Iterable[str],
    parameters: Iterable[tuple[str, bool | int | float | str]] = (),
) -> dict[str, NDArray[Any]]:
    """Write the description of a request's tensors into it; return the inputs as they travel."""
    for name, value in parameters:
        setattr(request.parameters[name], _PARAMETERS[type(value)], value)
    for name, tensor in inputs.items():
        request.inputs.add(name=name, datatype=kserve_name(tensor.dtype), shape=tensor.shape)
    for name in outputs:
        request.outputs.add(name=name)
    return {name: to_wire(tensor) for name, tensor in inputs.items()}


def with_contents(request: Any, tensors: Iterable[NDArray[Any]]) -> bytes:
    """Return the serialized request, with the bytes of tensors copied once into it.

    A field that is a list of bytes may be appended to a serialized message: for each, its tag, its
    length and the bytes. protobuf writes the length, as the number of a parameter after its tag.
    """
    from tritonclient.grpc.service_pb2 import InferParameter

    parts: list[Any] = [request.SerializeToString()]
    for tensor in tensors:
        raw = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        length = InferParameter(int64_param=len(raw)).SerializeToString()[1:]
        parts += [_RAW_CONTENTS, length, raw.data]
    return b"".join(parts)
