from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sonic_coffea import errors
from sonic_coffea.transport import Contract, TensorSpec

FLOAT, DOUBLE = np.dtype("float32"), np.dtype("float64")
SERVED = Contract(
    model="m",
    version="3",
    inputs=(
        TensorSpec(name="features", datatype="FP32", shape=(4, -1)),
        TensorSpec(name="ids", datatype="INT64", shape=()),
    ),
    outputs=(
        TensorSpec(name="scores", datatype="FP32", shape=(2,)),
        TensorSpec(name="mass", datatype="FP64", shape=()),
        TensorSpec(name="any", datatype="FP32", shape=(-1,)),
    ),
)
INPUTS: dict[str, Any] = {"features": (FLOAT, (4, 64)), "ids": (np.dtype("int64"), ())}
OUTPUTS: dict[str, Any] = {"scores": (2, FLOAT), "mass": (1, DOUBLE), "any": (7, FLOAT)}


def test_what_fits_is_silent() -> None:
    SERVED.check(INPUTS, OUTPUTS, server="grpc://s:1")
    SERVED.check({**INPUTS, "features": (FLOAT, (4, -1))}, {}, server="grpc://s:1")
    SERVED.check({**INPUTS, "features": (FLOAT, None)}, {"scores": (None, None)}, server="s")


@pytest.mark.parametrize(
    ("inputs", "outputs", "problem"),
    [
        ({"features": (FLOAT, (5, 64))}, {}, "is FP32 [N, 5, 64]"),
        ({"features": (FLOAT, (4,))}, {}, "is FP32 [N, 4], the model"),
        ({"features": (DOUBLE, None)}, {}, "is FP64 [N, …]"),
        ({}, {"mass": (1, FLOAT)}, "is declared float32, the model gives float64"),
        ({}, {"mass": (1, np.dtype(object))}, "is declared string, the model gives float64 (FP64)"),
        ({"ids": (np.dtype(object), ())}, {}, "is BYTES [N], the model takes INT64 [N]"),
    ],
)
def test_what_does_not_fit_is_named(
    inputs: dict[str, Any], outputs: dict[str, Any], problem: str
) -> None:
    with pytest.raises(errors.ContractError) as caught:
        SERVED.check({**INPUTS, **inputs}, {**OUTPUTS, **outputs}, server="grpc://s:1")
    assert problem in caught.value.message.partition("\n")[0]
    assert (caught.value.server, caught.value.model) == ("grpc://s:1", "m")
    assert caught.value.version == "3"
