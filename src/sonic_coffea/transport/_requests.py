"""Requests of zeros, which measure the time of a served model."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import SonicError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from sonic_coffea.transport._contract import Contract
    from sonic_coffea.transport._grpc import Connection
    from sonic_coffea.transport._metadata import Response

    Tensors = Mapping[str, np.ndarray[Any, Any]]


def ask(
    connection: Connection,
    contract: Contract,
    version: str | None,
    tensors: Tensors,
    *,
    requests: int = 1,
    in_flight: int = 1,
) -> tuple[Response, float]:
    """Make requests, `in_flight` at a time; return the last response and the time of all."""
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
                lambda _: tensors,
                outputs,
                version=version,
                request_id=f"zeros-{number}",
                done=outcomes.put,
            )
    return answer, time.perf_counter() - begun
