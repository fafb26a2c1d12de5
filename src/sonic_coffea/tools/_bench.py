"""The latency curve of a served model: times of requests, and the rate of the saturated server."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    from sonic_coffea.pool import Settings

# Of models that take any number of rows.
_MAX_ROWS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The latency curve of a model on a server.

    Attributes
    ----------
    model, version, server : str
        The model and the server that were measured.
    rows, seconds : tuple
        Rows of a request, and its median round-trip time, with one request in flight.
    rows_per_s : float
        Rate of the saturated server over this connection.
    in_flight : int
        Requests of the largest size in flight that saturate the server.
    row_bytes : float
        Bytes of a row's tensors, to the server and back.
    length : int
        Length of axes of variable length, such as constituents.
    """

    model: str
    version: str
    server: str
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    rows_per_s: float
    in_flight: int
    row_bytes: float
    length: int = 64

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curve as JSON, and make the folder of the file if need be.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Curve:
        """Read a curve from a file.

        Raises
        ------
        ConfigError
            If the file holds no curve, or one with numbers that cannot be.
        """
        try:
            content = dict(json.loads(Path(path).read_text(encoding="utf-8")))
            points = {name: tuple(content[name]) for name in ("rows", "seconds")}
            curve = cls(**{**content, **points})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"expected a curve as `sonic-coffea bench` writes it, got {path}: {error}"
            ) from None
        numbers: list[Any] = [curve.rows_per_s, curve.row_bytes, *curve.rows, *curve.seconds]
        if not all(isinstance(n, int | float) and 0 < n < math.inf for n in numbers):
            raise ConfigError(f"expected finite numbers above 0 in the curve {path}, got {numbers}")
        return curve


def measure(
    settings: Settings,
    model: str,
    version: str | None = None,
    *,
    length: int = 64,
    seconds: float = 1.0,
    progress: Callable[[str], None] | None = None,
) -> Curve:
    """Measure how a server serves a model, with rows of zeros.

    Parameters
    ----------
    settings : Settings
        One server, and its options.
    model, version : str
        The model to measure.
    length : int
        Length of axes of variable length, such as constituents.
    seconds : float
        Duration of each point: of as many requests as this allows, two at least.
    progress : callable, optional
        Called with a short text at each stage.
    """
    tell = progress or (lambda _: None)
    options = settings.connection_options()
    with connect_transport(settings.servers[0], options=options) as connection:
        contract = connection.contract(model, version)

        def ask(tensors: Any, **several: int) -> tuple[Any, float]:
            return connection.ask(contract, version, tensors, **several)

        row = contract.zeros(1, length)
        sent_bytes = sum(tensor.nbytes for tensor in row.values())
        most = min(contract.max_rows or _MAX_ROWS, max(1, settings.max_request_bytes // sent_bytes))
        sizes = sorted({*(2**n for n in range(most.bit_length())), most})
        answer, _ = ask(row)
        back_bytes = sum(tensor.nbytes for tensor in answer.outputs.values())
        times = []
        for rows in sizes:
            tell(f"requests of {rows} rows")
            tensors = contract.zeros(rows, length)
            times.append(_median(partial(ask, tensors), seconds))
        best, best_in_flight, in_flight = most / times[-1], 1, 2
        while in_flight <= settings.max_in_flight:
            tell(f"{in_flight} in flight, of {most} rows each")
            requests = max(in_flight, round(seconds * best / most))
            for _ in range(2):  # as the machine may be busy for a moment
                rate = requests * most / ask(tensors, requests=requests, in_flight=in_flight)[1]
                if rate > 1.03 * best:
                    break
            else:  # the server is saturated
                break
            best, best_in_flight, in_flight = rate, in_flight, in_flight * 2
    return Curve(
        model=model,
        version=contract.version,
        server=settings.servers[0],
        rows=tuple(sizes),
        seconds=tuple(times),
        rows_per_s=best,
        in_flight=best_in_flight,
        row_bytes=float(sent_bytes + back_bytes),
        length=length,
    )


def _median(request: Callable[[], tuple[Any, float]], seconds: float) -> float:
    """Return the median time of requests for some seconds: of one at least, after a first one."""
    request()
    until = time.monotonic() + seconds
    times = [request()[1]]
    while time.monotonic() < until:
        times.append(request()[1])
    return statistics.median(times)
