"""Tensors as bytes in KServe v2: numbers as in memory, strings with their lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.transport._datatypes import STRINGS

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
