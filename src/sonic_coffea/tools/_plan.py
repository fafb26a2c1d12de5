"""Plans of runs: the number of servers, the network traffic, and the bottleneck."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    from sonic_coffea.tools._bench import Curve

# Below this utilisation, the queue of a server stays short.
_UTILISATION = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run.

    Attributes
    ----------
    cores, servers : int
        Number of cores, and number of servers that there are or that are needed.
    demand_rows_per_s, capacity_rows_per_s : float
        Rows/s that the cores would send if scores came at once, and that the servers can score.
    sent_bytes_per_s : float
        Network traffic to all servers and back.
    events_per_s, seconds : float
        Rate and duration of the run, limited by the bottleneck.
    capacities : dict
        Capacities of cores, servers and network, in events/s.
    utilisation : float
        Fraction of the time in which the servers compute.
    request_s : float or None
        Mean time of a request of the largest size: the time of a single request, and the time in
        the queue at this utilisation (M/D/1, Pollaczek-Khinchine). None if the servers are the
        bottleneck: then the queue grows up to the in-flight limits.
    in_flight : float or None
        Mean number of requests in flight, to all servers: rate times time (Little's law).
    """

    cores: int
    servers: int
    demand_rows_per_s: float
    capacity_rows_per_s: float
    sent_bytes_per_s: float
    events_per_s: float
    seconds: float
    capacities: dict[str, float]
    utilisation: float
    request_s: float | None
    in_flight: float | None

    @property
    def bottleneck(self) -> str:
        """Which of cores, servers and network has the least capacity."""
        return min(self.capacities, key=self.capacities.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON."""
        return {**asdict(self), "bottleneck": self.bottleneck}


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
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}: expected a finite number above 0, got {value!r}")
    demand = cores * rows_per_event / cpu_s
    if servers is None:
        servers = math.ceil(demand / (curve.rows_per_s * _UTILISATION))
    capacity = servers * curve.rows_per_s
    capacities = {"cores": cores / cpu_s, "servers": capacity / rows_per_event}
    if bytes_per_s is not None:
        capacities["network"] = bytes_per_s / (rows_per_event * curve.row_bytes)
    events_per_s = min(capacities.values())
    rows_per_s = events_per_s * rows_per_event
    utilisation = rows_per_s / capacity
    request_s = in_flight = None
    if utilisation < 1.0:
        rows = max(curve.rows)
        queue_s = rows / curve.rows_per_s * utilisation / (2.0 * (1.0 - utilisation))
        request_s = curve.seconds[curve.rows.index(rows)] + queue_s
        in_flight = rows_per_s / rows * request_s
    return Plan(
        cores=cores,
        servers=servers,
        demand_rows_per_s=demand,
        capacity_rows_per_s=capacity,
        sent_bytes_per_s=rows_per_s * curve.row_bytes,
        events_per_s=events_per_s,
        seconds=events / events_per_s,
        capacities=capacities,
        utilisation=utilisation,
        request_s=request_s,
        in_flight=in_flight,
    )
