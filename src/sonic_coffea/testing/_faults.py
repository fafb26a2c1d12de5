"""What goes wrong with an inference request. A new fault is one function here."""

from __future__ import annotations

from collections.abc import Callable
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
