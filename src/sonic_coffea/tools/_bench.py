"""The latency curve of a served model, and plans of runs by it."""

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
from typing import Any

from sonic_coffea._files import replacing
from sonic_coffea.errors import ConfigError, expect
from sonic_coffea.pool import Settings, open_transport, rows_per_request
from sonic_coffea.transport import time_requests


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
        with replacing(Path(path)) as half:
            half.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

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
        are_possible = all(isinstance(n, int | float) and 0 < n < math.inf for n in numbers)
        expect(are_possible, f"finite numbers above 0 in the curve {path}", numbers)
        return curve


def measure(
    settings: Settings | str,
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
    settings : Settings or str
        One server, and its options; or its URL.
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
    settings = Settings.of(settings)
    options = settings.connection_options()
    with open_transport(settings.servers[0], options=options) as connection:
        contract = connection.metadata(model, version)

        def send(tensors: Any, **several: int) -> tuple[Any, float]:
            return time_requests(connection, contract, version, tensors, **several)

        row = contract.zeros(1, length)
        sent_bytes = sum(tensor.nbytes for tensor in row.values())
        most = rows_per_request(
            sent_bytes, max_rows=contract.max_rows, max_bytes=settings.max_request_bytes
        )
        sizes = sorted({*(2**n for n in range(most.bit_length())), most})
        answer, _ = send(row)
        back_bytes = sum(tensor.nbytes for tensor in answer.outputs.values())
        times = []
        for rows in sizes:
            tell(f"requests of {rows} rows")
            tensors = contract.zeros(rows, length)
            times.append(_median(partial(send, tensors), seconds))
        best, best_in_flight, in_flight = most / times[-1], 1, 2
        while in_flight <= settings.max_in_flight:
            tell(f"{in_flight} in flight, of {most} rows each")
            requests = max(in_flight, round(seconds * best / most))
            for _ in range(2):  # as the machine may be busy for a moment
                rate = requests * most / send(tensors, requests=requests, in_flight=in_flight)[1]
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
    """Return the median time of requests; a first one is not counted, one at least is."""
    request()
    until = time.monotonic() + seconds
    times = [request()[1]]
    while time.monotonic() < until:
        times.append(request()[1])
    return statistics.median(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run.

    Attributes
    ----------
    servers : int
        Number of servers that there are or that are needed.
    utilisation : float
        Fraction of the time in which the servers compute.
    sent_bytes_per_s : float
        Network traffic to all servers and back.
    events_per_s, seconds : float
        Rate and duration of the run, limited by the bottleneck.
    capacities : dict
        Capacities of cores, servers and network, in events/s.
    bottleneck : str
        Which of them has the least capacity.
    """

    servers: int
    utilisation: float
    sent_bytes_per_s: float
    events_per_s: float
    seconds: float
    capacities: dict[str, float]
    bottleneck: str


def plan(
    curve: Curve,
    *,
    cores: int,
    cpu_s: float,
    rows_per_event: float,
    events: float,
    servers: int | None = None,
    bytes_per_s: float | None = None,
) -> Plan:
    """Return the plan of a run.

    Parameters
    ----------
    curve : Curve
        The latency curve of the model on one server.
    cores : int
        Number of workers with one thread each.
    cpu_s : float
        CPU time of an event, without inference.
    rows_per_event : float
        Mean number of scored objects per event.
    events : float
        Number of events of the run.
    servers : int, optional
        Number of servers; by default, as many as are each idle for a fifth of the time.
    bytes_per_s : float, optional
        Capacity of the network to the servers.

    Raises
    ------
    ConfigError
        If a number is not finite and above 0.
    """
    numbers = {"cores": cores, "cpu_s": cpu_s, "rows_per_event": rows_per_event, "events": events}
    for name, value in {**numbers, "servers": servers, "bytes_per_s": bytes_per_s}.items():
        is_possible = value is None or 0 < value < math.inf
        expect(is_possible, "a finite number above 0", value, name)
    if servers is None:
        # While a server is idle for a fifth of the time, its queue stays short.
        servers = math.ceil(cores * rows_per_event / cpu_s / (curve.rows_per_s * 0.8))
    capacities = {"cores": cores / cpu_s, "servers": servers * curve.rows_per_s / rows_per_event}
    if bytes_per_s is not None:
        capacities["network"] = bytes_per_s / (rows_per_event * curve.row_bytes)
    bottleneck = min(capacities, key=capacities.__getitem__)
    events_per_s = capacities[bottleneck]
    return Plan(
        servers=servers,
        utilisation=events_per_s / capacities["servers"],
        sent_bytes_per_s=events_per_s * rows_per_event * curve.row_bytes,
        events_per_s=events_per_s,
        seconds=events / events_per_s,
        capacities=capacities,
        bottleneck=bottleneck,
    )
