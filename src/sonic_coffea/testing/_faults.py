"""Faults of inference requests. A new fault is one function here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

Fault = Callable[[Any, Any], None]
"""Changes an answer, a ``ModelInferResponse``, or ends the request through gRPC's context."""


def status(code: Any, details: str) -> Fault:
    """Return the fault that ends a request with a ``grpc.StatusCode`` and the server's words."""
    return lambda _, context: context.abort(code, details)


class Wrong:
    """Wrong answers, for `FakeServer.answer_wrongly`."""

    @staticmethod
    def shape(answer: Any) -> None:
        """Give one row less than the request has."""
        for output, raw in zip(answer.outputs, list(answer.raw_output_contents), strict=True):
            rows = output.shape[0]
            output.shape[0] = rows - 1
            del answer.raw_output_contents[0]
            answer.raw_output_contents.append(raw[: len(raw) // rows * (rows - 1)])

    @staticmethod
    def missing(answer: Any) -> None:
        """Leave the first output out."""
        del answer.outputs[0]
        del answer.raw_output_contents[0]

    @staticmethod
    def type(answer: Any) -> None:
        """Say that the first output is of integers, with the same bytes."""
        answer.outputs[0].datatype = "INT32"

    @staticmethod
    def cut(answer: Any) -> None:
        """Leave out the last byte of the first output."""
        answer.raw_output_contents[0] = answer.raw_output_contents[0][:-1]

    @staticmethod
    def without_data(answer: Any) -> None:
        """Leave all data out."""
        del answer.raw_output_contents[:]


class FaultPlan:
    """Which of the next requests have which fault."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[Iterator[Fault | None]] = []

    def add(self, fault: Fault, times: int, every: int) -> None:
        """Give a fault to every n-th of the next requests, until `times` have had it."""
        turns = (*repeat(None, every - 1), fault)
        with self._lock:
            self._planned.append(chain.from_iterable(repeat(turns, times)))

    def next(self) -> Fault | None:
        """Return the fault of the request that has just come, the oldest that is due."""
        with self._lock:
            return next(filter(None, (next(turns, None) for turns in self._planned)), None)
