"""How many servers an analysis needs, what the network carries, and what breaks first."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.reporting.plots import draw_plans
from sonic_coffea.tools._simulation import Accelerator, Simulation, Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sonic_coffea.tools._bench import Curve

__all__ = ["Plan", "plan", "plot"]

# A queue in front of a server that works so much of the time stays short.
_BUSY = 0.8
_PARTS = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)
_SIMULATED_S, _WARM_S = 30.0, 10.0
# Servers are alike, so one of them and its workers tell what all do; that many are simulated.
_MOST_WORKERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run takes.

    Attributes
    ----------
    servers : int
        How many there are, or are needed.
    wanted_rows_per_s, able_rows_per_s : float
        What the cores could ask for if scores came at once, and what the servers do.
    sent_bytes_per_s : float
        Over the network, to all servers and back.
    events_per_s, seconds : float
        Of the whole run, as the tightest limit lets it.
    limits : dict
        Events a second that cores, servers and network each let pass; the least breaks first.
    busy : float
        The part of the time that servers work.
    simulated_rows_per_s : float or None
        What the simulation of one server and its share of the cores does, for all servers.
    simulated_wait_s : float or None
        From the send to the answer there, in the mean; without waiting for the network.
    """

    cores: int
    servers: int
    wanted_rows_per_s: float
    able_rows_per_s: float
    sent_bytes_per_s: float
    events_per_s: float
    seconds: float
    limits: dict[str, float]
    busy: float
    simulated_rows_per_s: float | None = None
    simulated_wait_s: float | None = None

    @property
    def first(self) -> str:
        """What breaks first."""
        return min(self.limits, key=self.limits.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON."""
        return {**asdict(self), "first": self.first}


def plan(
    curve: Curve,
    *,
    cores: int,
    cpu_s: float,
    rows_per_event: float,
    events: float,
    servers: int | None = None,
    bytes_per_s: float | None = None,
    simulate: bool = True,
) -> Plan:
    """Return what a run takes.

    Parameters
    ----------
    curve : Curve
        How one server serves the model.
    cores : int
        Workers, with one thread each.
    cpu_s : float
        CPU time of an event, without inference.
    rows_per_event : float
        Objects of an event that are scored.
    events : float
        Of the run.
    servers : int, optional
        How many there are; by default as many as leave each idle for a fifth of the time.
    bytes_per_s : float, optional
        What the network to the servers carries.
    simulate : bool
        Whether to let workers and a server run in virtual time, with the limits and shares that
        run for real.

    Raises
    ------
    ConfigError
        If a number cannot be.
    """
    given = {"cores": cores, "cpu_s": cpu_s, "rows_per_event": rows_per_event, "events": events}
    for name, value in {**given, "servers": servers, "bytes_per_s": bytes_per_s}.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}: expected a finite number above 0, got {value!r}")
    wanted = cores * rows_per_event / cpu_s
    needed = math.ceil(wanted / (curve.rows_per_s * _BUSY))
    there = needed if servers is None else servers
    able = there * curve.rows_per_s
    limits = {"cores": cores / cpu_s, "servers": able / rows_per_event}
    if bytes_per_s is not None:
        limits["network"] = bytes_per_s / (rows_per_event * curve.row_bytes)
    events_per_s = min(limits.values())
    rows_per_s = events_per_s * rows_per_event
    found: tuple[float | None, float | None] = (None, None)
    if simulate:
        # As many ask as the network lets work: the rest waits for it.
        working = min(cores, limits.get("network", math.inf) * cpu_s)
        found = _simulate(curve, working / there, cpu_s / rows_per_event, there)
    return Plan(
        cores=cores,
        servers=there,
        wanted_rows_per_s=wanted,
        able_rows_per_s=able,
        sent_bytes_per_s=rows_per_s * curve.row_bytes,
        events_per_s=events_per_s,
        seconds=events / events_per_s,
        limits=limits,
        busy=rows_per_s / able,
        simulated_rows_per_s=found[0],
        simulated_wait_s=found[1],
    )


def plot(found: Plan, curve: Curve, **options: Any) -> Figure:
    """Draw what a run does with fewer and with more servers.

    Parameters
    ----------
    found : Plan
        What was planned; its number of servers is in the middle.
    curve : Curve
        What it was planned by.
    **options
        Those of `plan`, but for the number of servers.

    Raises
    ------
    ImportError
        If there is no matplotlib.
    """
    counts = sorted({max(1, round(found.servers * part)) for part in _PARTS} | {found.servers})
    return draw_plans(
        [found if n == found.servers else plan(curve, servers=n, **options) for n in counts]
    )


def _simulate(curve: Curve, workers: float, cpu_row_s: float, servers: int) -> tuple[float, float]:
    """Return rows/s of all servers and the mean wait, from one server and its workers."""
    rows = max(curve.rows)
    number = max(1, min(round(workers), _MOST_WORKERS))
    # Fewer workers that each ask as often as several do: a server sees the same requests.
    cpu_s = cpu_row_s * rows * number / max(workers, 1e-9)
    service_s = rows / curve.rows_per_s
    accelerator = Accelerator(
        launch_s=service_s * curve.launch_s / (curve.launch_s + curve.row_s * rows),
        row_s=service_s * curve.row_s / (curve.launch_s + curve.row_s * rows),
        max_rows=rows,
    )
    network_s = max(0.0, min(curve.seconds) - accelerator.launch_s) / 2
    until = max(_SIMULATED_S, 20.0 * (cpu_s + service_s))
    simulation = Simulation(
        [accelerator], Work(rows=rows, cpu_s=cpu_s, network_s=network_s), shares=number > 1
    )
    simulation.join(number, within_s=min(cpu_s, until / 4))
    simulation.run(until)
    warm = until * _WARM_S / _SIMULATED_S
    late = [one for one in simulation.answered if one.at > warm]
    wait_s = sum(one.at - one.sent_at for one in late) / max(len(late), 1)
    return servers * sum(one.rows for one in late) / (until - warm), wait_s
