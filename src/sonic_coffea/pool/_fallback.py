"""What is used while no server has a model: started when it is needed, and compared first."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ContractError, DeadlineError, SonicError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from sonic_coffea.pool._call import Piece
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.transport import Answer, Connection, Contract

_ROWS = 8
# Behind all that is named, in whatever order.
RANK = 1_000_000


@dataclass(frozen=True, slots=True)
class Sample:
    """A few rows of a model, and what a server made of them."""

    server: str
    inputs: Mapping[str, NDArray[Any]]
    outputs: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, piece: Piece, answer: Answer, server: str) -> Sample | None:
        """Return the first rows of a request, if rows can be told apart in its answer."""
        rows = piece.stop - piece.start
        if any(tensor.ndim == 0 or len(tensor) != rows for tensor in answer.outputs.values()):
            return None
        some = min(rows, _ROWS)
        inputs = piece.call.inputs.pack(piece.start, piece.start + some)
        if any(tensor.ndim == 0 or len(tensor) != some for tensor in inputs.values()):
            return None  # a graph
        outputs = {name: tensor[:some].copy() for name, tensor in answer.outputs.items()}
        return cls(server, dict(inputs), outputs)

    def compare(
        self, connection: Connection, contract: Contract, version: str | None, settings: Settings
    ) -> None:
        """Have another server score the same rows.

        Raises
        ------
        ContractError
            If its scores differ by more than the tolerance.
        """
        over = threading.Event()
        outcome: list[Answer | SonicError] = []

        def done(result: Answer | SonicError) -> None:
            outcome.append(result)
            over.set()

        connection.infer(
            contract,
            self.inputs,
            list(self.outputs),
            version=version,
            request_id="compare",
            done=done,
        )
        if not over.wait(settings.request_timeout_s + 10.0):
            raise DeadlineError("the fallback did not answer", server=str(connection.address))
        (answer,) = outcome
        if isinstance(answer, SonicError):
            raise answer
        for name, expected in self.outputs.items():
            self._differ(name, expected, answer.outputs[name], connection, contract, settings)

    def _differ(
        self,
        name: str,
        expected: NDArray[Any],
        found: NDArray[Any],
        connection: Connection,
        contract: Contract,
        settings: Settings,
    ) -> None:
        most = settings.fallback_tolerance
        same = expected.shape == found.shape and np.allclose(found, expected, most, most)
        if same:
            return
        by = "in shape"
        if expected.shape == found.shape:
            by = f"by up to {np.abs(found.astype(float) - expected.astype(float)).max():.3g}"
        raise ContractError(
            f"the fallback is another model: its output {name!r} differs {by} from that of "
            f"{self.server}, more than fallback_tolerance={most:g}",
            server=str(connection.address),
            model=contract.model,
        )
