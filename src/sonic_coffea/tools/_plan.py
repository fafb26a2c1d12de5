"""Plans of runs: the number of servers, the network traffic, and the bottleneck."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}: expected a finite number above 0, got {value!r}")
    if servers is None:
        servers = math.ceil(cores * rows_per_event / cpu_s / (curve.rows_per_s * _UTILISATION))
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
