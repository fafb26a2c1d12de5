"""KServe v2's data types and numpy's, and tensors as bytes: strings have their lengths."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

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
# Strings of a length that is not said are numpy's "bytes".
_KSERVE_NAMES = {"bytes": "BYTES"} | {numpy_name: name for name, numpy_name in DATATYPES.items()}


@cache
def kserve_name(dtype: np.dtype[Any]) -> str:
    """Return what KServe v2 calls a numpy dtype."""
    return _KSERVE_NAMES[dtype.name]


def to_wire(tensor: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor whose memory is what travels: of strings, bytes of one axis."""
    if tensor.dtype != STRINGS:
        return tensor
    if not tensor.size:
        return np.zeros(0, np.uint8)
    from tritonclient.utils import serialize_byte_tensor

    return np.frombuffer(serialize_byte_tensor(tensor).item(), np.uint8)


def wire_bytes(tensor: NDArray[Any]) -> int:
    """Return how many bytes of a message a tensor is."""
    if tensor.dtype != STRINGS:
        return tensor.nbytes
    return sum(4 + len(string) for string in tensor.reshape(-1))


def from_wire(raw: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the tensor that bytes are of; of strings, each is of type bytes.

    Raises
    ------
    ValueError
        If they are not of this type and shape.
    """
    if dtype != STRINGS:
        return np.frombuffer(raw, dtype).reshape(shape)
    from tritonclient.utils import deserialize_bytes_tensor

    strings: NDArray[Any] = deserialize_bytes_tensor(raw)
    return strings.reshape(shape)
