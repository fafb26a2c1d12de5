"""The limit against simulated servers, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from benchmarks.simulation import Accelerator, Simulation, Work, fairness

# Slow, so that few requests fill the minutes that a limit takes to settle.
NOISY = Accelerator(launch_s=16e-3, row_s=4e-5, noise=0.05)
SERVERS = {
    "one accelerator": (NOISY, 2e-4),
    "eight accelerators": (replace(NOISY, instances=8), 2e-4),
    "far away": (NOISY, 0.24),
    "long inference": (replace(NOISY, launch_s=4.0), 2e-4),
    "a noisy one": (replace(NOISY, noise=1.0), 2e-4),
}


def simulate(
    server: Accelerator, clients: int = 1, *, rows: int = 1024, network_s: float = 2e-4
) -> Simulation:
    """Return clients that always have more to send, without a scheduler."""
    work = Work(rows=rows, network_s=network_s, max_suspended_chunks=300)
    simulation = Simulation([server], work, schedulers=0)
    simulation.join(clients, within_s=0.01)
    return simulation


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 1024) for name in SERVERS), ("one accelerator", 256)]
)
def test_one_client_gets_what_there_is(name: str, rows: int) -> None:
    server, network_s = SERVERS[name]
    simulation = simulate(server, rows=rows, network_s=network_s)
    warm_s = 10 + 20 * server.launch_s
    simulation.run(warm_s + 20)
    # Small requests wait for the batch before theirs, which looks like a queue.
    assert simulation.throughput(since=warm_s) > (0.95 if rows == 1024 else 0.75)


def test_the_queue_stays_short_and_limits_follow_a_server_that_changes() -> None:
    slow = replace(NOISY, launch_s=4 * NOISY.launch_s, row_s=4 * NOISY.row_s)
    simulation = simulate(NOISY)
    simulation.run(60)
    baseline_s = NOISY.service_s(1024) + 2 * simulation.work.network_s
    rtts = [a.at - a.sent_at for a in simulation.answered]
    assert median(rtts) < 5 * baseline_s
    assert max(rtts) < 10 * baseline_s
    assert simulation.limits[0] <= 6
    assert simulation.throughput(since=40) > 0.95
    for server, until in ((slow, 140), (replace(slow, instances=6), 260)):
        simulation.change(0, server, simulation.now)
        simulation.run(until)
        assert simulation.throughput(since=until - 20) > 0.95


def test_refusals_slow_the_sender_down() -> None:
    simulation = simulate(Accelerator(noise=0.05, max_queue=4), 3, network_s=0.02)
    simulation.run(25)
    assert simulation.throughput(since=5) > 0.9
    assert 0 < simulation.refused < 0.2 * len(simulation.answered)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousand_clients_do_not_storm_a_proxy() -> None:
    """Envoy lets 1,024 requests pass at a time; no scheduler tells these clients of each other."""
    server = Accelerator(launch_s=4e-3, row_s=1e-5, noise=0.05, instances=8)
    work = Work(network_s=2e-4, max_suspended_chunks=8)
    simulation = Simulation([server], work, schedulers=0, max_requests=1024)
    simulation.join(1000, within_s=2.0)
    simulation.run(5)
    # Four each are too many; what is refused does not come back at once.
    assert simulation.refused < 8 * 1000
    before, answered = simulation.refused, len(simulation.answered)
    simulation.run(20)
    assert simulation.throughput(since=5) > 0.95
    assert simulation.refused - before < 0.25 * (len(simulation.answered) - answered)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_clients_share_a_server_without_outbidding_each_other() -> None:
    simulation = simulate(Accelerator(launch_s=4e-3, row_s=1e-5, noise=0.05, instances=4), 8)
    simulation.run(155)
    assert simulation.throughput(since=5) > 0.95
    # 0.27 if a client believes that the server became slower whenever others filled its queue.
    assert fairness(simulation.rows(since=5)) > 0.65
    # After minutes of work, the queue is a matter of tens, not of all that limits allow.
    assert sum(simulation.limits) < 150
