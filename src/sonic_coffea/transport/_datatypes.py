"""KServe v2's data types and numpy's."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

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
# Where a message of KServe v2 has a tensor's numbers, if it does not have its bytes.
TYPED_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
# Strings of a length that is not said are numpy's "bytes".
_KSERVE_NAMES = {"bytes": "BYTES"} | {numpy_name: name for name, numpy_name in DATATYPES.items()}


@cache
def kserve_name(dtype: np.dtype[Any]) -> str:
    """Return what KServe v2 calls a numpy dtype."""
    return _KSERVE_NAMES[dtype.name]
