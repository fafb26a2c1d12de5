"""Requests of zeros, which tell how long a served model takes."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np

from sonic_coffea.errors import ConfigError, SonicError
from sonic_coffea.transport import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sonic_coffea.transport import Connection, Contract, Response

    Tensors = Mapping[str, np.ndarray[Any, Any]]

# Where a length is free: networks that look for the nearest neighbours need some.
_FREE = 16


def zeros(contract: Contract, rows: int, length: int = _FREE) -> Tensors:
    """Return tensors of zeros, of a length where the model takes any."""
    tensors = {}
    for spec in contract.inputs:
        if spec.datatype not in DATATYPES:
            raise ConfigError(
                f"the model cannot be tried with zeros: input {spec.name!r} is {spec.datatype}, "
                "which is not a number"
            )
        shape = [rows, *(n if n >= 0 else length for n in spec.shape)]
        tensors[spec.name] = np.zeros(shape, DATATYPES[spec.datatype])
    return tensors


def ask(
    connection: Connection,
    contract: Contract,
    version: str | None,
    tensors: Tensors,
    *,
    requests: int = 1,
    in_flight: int = 1,
) -> tuple[Response, float]:
    """Make requests, some in flight at a time; return the last answer and how long all took."""
    outputs = [spec.name for spec in contract.outputs]
    outcomes: SimpleQueue[Response | SonicError] = SimpleQueue()
    begun = time.perf_counter()
    for number in range(in_flight + requests):
        if number >= in_flight:
            outcome = outcomes.get()
            if isinstance(outcome, SonicError):
                raise outcome
            answer = outcome
        if number < requests:
            connection.infer(
                contract,
                tensors,
                outputs,
                version=version,
                request_id=f"zeros-{number}",
                done=outcomes.put,
            )
    return answer, time.perf_counter() - begun
