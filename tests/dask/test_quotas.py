"""The scheduler: quotas, by rule and for simulated workers with the real core; sums and rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.simulation import Accelerator, Simulation, Work, fairness

from sonic_coffea.dask._dashboard import COLUMNS, History, VersionHistory
from sonic_coffea.dask._quotas import Allocator
from sonic_coffea.pool import Quota, Telemetry
from sonic_coffea.transport import ModelStatistics

# Simulations that take a busy machine minutes.
MINUTES = pytest.mark.slow, pytest.mark.timeout(600)
URL = "grpc://s:1"
SERVED = URL, ("m", None)
UNEQUAL = [Accelerator(), Accelerator(instances=2)]
# A batch takes long, so that there are few of them to simulate.
SLOW = Accelerator(launch_s=2e-2, row_s=5e-5)


class Rounds:
    """An allocator in rounds of 0.5 s."""

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.now = 0.0

    def report(
        self, client: str, waiting: int = 5, answers: int = 10, refused: int = 0, in_flight: int = 1
    ) -> None:
        rtts = {11: (answers, 0.01 * answers, 0.01)} if answers else {}
        telemetry = Telemetry(in_flight, waiting, refused=refused, rtts=rtts)
        self.allocator.report(client, {SERVED: telemetry}, {}, self.now)

    def end(self) -> dict[str, Any]:
        quotas = self.allocator.end_round(self.now)
        self.now += 0.5
        return {name: models[SERVED] for name, models in quotas.items() if SERVED in models}


def test_clients_that_need_turns_hear_that_quotas_will_come() -> None:
    """Else they would go by their own limits before the rate of a server is known."""
    rounds = Rounds()
    rounds.allocator.join("idle")
    for number in range(20):
        rounds.report(str(number), answers=0)
    assert rounds.allocator.end_round(rounds.now) == {str(number): {} for number in range(20)}


def test_an_idle_client_may_begin_with_one_request() -> None:
    rounds = Rounds()
    for _ in range(4):
        rounds.report("busy")
        rounds.report("idle", waiting=0, answers=0, in_flight=0)
        grants = rounds.end()
    assert grants["idle"].max_in_flight == 1
    assert grants["busy"].max_in_flight == 4


def test_only_clients_of_a_server_share_it() -> None:
    """Connections may lead to other servers, which have a model of the same name."""
    allocator, other = Allocator(), ("grpc://other:1", SERVED[1])

    def given(**servers: list[Any]) -> dict[str, list[int]]:
        """Return what clients may have at each of their servers; requests are at the first."""
        for client, (first, *more) in servers.items():
            telemetry = {first: Telemetry(1, 5)} | dict.fromkeys(more, Telemetry())
            allocator.report(client, telemetry, {}, 0.0)
        quotas = allocator.end_round(0.0)
        return {client: [q.max_in_flight for q in of.values()] for client, of in quotas.items()}

    first = given(one=[SERVED], two=[other], both=[SERVED, other])
    assert first == {"one": [4], "two": [4], "both": [4, 4]}
    # One is no server of the last client any more.
    assert given(one=[SERVED], two=[other], both=[SERVED]) == {"one": [4], "two": [8], "both": [4]}


def test_paced_turns_are_spread_evenly_and_none_is_lost() -> None:
    quota = Quota(1, interval_s=10.0, delay_s=3.0)
    quota.begin(Quota(), 0.0, 100.0)
    assert [quota.remaining(0, now) for now in (0.0, 2.9, 3.0)] == [0, 0, 1]
    quota.sent(3.5)  # a little late
    assert quota.next_turn_at == 13.0
    # The next message comes with other turns; one that was due is still there.
    late = Quota(1, 10.0, 10.0)
    late.begin(quota, 14.0, 100.0)
    assert late.next_turn_at == 13.0
    late.sent(14.5)
    assert late.next_turn_at == 24.0
    early = Quota(1, 10.0, 1.0)
    early.begin(quota, 14.0, 100.0)
    assert early.next_turn_at == 15.0
    free = Quota(3, 0.0, 36.0)
    free.begin(quota, 14.0, 100.0)
    free.sent(51.0)
    assert free.remaining(1, 51.0) == 2
    # A turn of a lease that has ended, or never began, is none.
    for old in (Quota(), quota):
        anew = Quota(1, 10.0, 3.0)
        anew.begin(old, 200.0, 100.0)
        assert anew.next_turn_at == 203.0


def test_workers_that_leave_lose_their_shares_and_those_that_hang_with_their_leases() -> None:
    rounds = Rounds()
    rounds.report("leaves")
    rounds.report("hangs", answers=0)
    assert rounds.end().keys() >= {"leaves"}
    rounds.allocator.leave("leaves")
    assert "leaves" not in rounds.end()
    for _ in range(16):
        rounds.report("a")
        grants = rounds.end()
    assert grants.keys() == {"a"}
    assert grants["a"].max_in_flight == int(rounds.allocator.capacities[SERVED].limit)


def shown_state(allocator: Allocator) -> str:
    """Return the state of the server on the dashboard."""
    return COLUMNS["State"][1](KEY, VersionHistory(), allocator)


def test_circuits_that_open_and_close_are_counted() -> None:
    allocator, url = Allocator(), SERVED[0]
    assert allocator.report("a", {}, {url: False}, 1.0) == []
    assert allocator.report("b", {}, {url: True}, 2.0) == [url]
    assert allocator.report("b", {}, {url: True}, 2.5) == []
    assert shown_state(allocator) == "circuit open on 1 worker"
    assert allocator.report("b", {}, {url: False}, 4.5) == [url]
    assert shown_state(allocator) == "up"
    # A server that is lost, and is then no server of the client any more, is not back.
    assert allocator.report("b", {}, {url: True}, 5.0) == [url]
    assert allocator.report("b", {}, {}, 5.5) == []
    assert shown_state(allocator) == "up"
    # Nobody knows whether a server that nobody has is up.
    assert allocator.report("a", {}, {}, 6.0) == []
    assert shown_state(allocator) == ""


def simulate(workers: int, work: Work, *, until: float, warm: float, **options: Any) -> Any:
    servers = options.pop("servers", [Accelerator()])
    simulation = Simulation(servers, work, **options)
    simulation.join(workers, within_s=1.0)
    simulation.run(until)
    return simulation, simulation.throughput(since=warm), fairness(simulation.rows(since=warm))


@pytest.mark.parametrize(
    ("workers", "until", "work", "options"),
    [
        pytest.param(1, 20, Work(rows=1024), {}, id="one"),
        pytest.param(5, 20, Work(rows=1024), {"statistics": False}, id="no statistics"),
        pytest.param(16, 6, Work(rows=100), {}, id="small requests"),
        pytest.param(100, 20, Work(rows=1024), {"statistics": False}, id="a hundred"),
        # In the time that counts, some have three turns, and others four.
        pytest.param(1_000, 58, Work(), {}, marks=MINUTES, id="a thousand"),
        # The time of the network is no queue.
        pytest.param(16, 16, Work(network_s=20e-3), {}, id="distant"),
        pytest.param(20, 12, Work(), {"servers": UNEQUAL}, id="unequal"),
    ],
)
def test_servers_are_saturated_and_shared_evenly(
    workers: int, until: float, work: Work, options: dict[str, Any]
) -> None:
    simulation, throughput, evenness = simulate(
        workers, work, until=until, warm=0.6 * until, **options
    )
    assert throughput > 0.95
    assert evenness > 0.95
    # However many there are, as many requests are in flight.
    far = work.network_s > 1e-3
    assert far or simulation.in_flight <= 3 * max(4, 2 * 1024 / work.rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_share_a_url_with_many_servers_from_the_start() -> None:
    # Rounds are of 2 s, and what is reported in one is of those before.
    server = Accelerator(launch_s=6e-3, row_s=1.5e-5, instances=10)
    simulation, _, evenness = simulate(1000, Work(), until=40, warm=20, servers=[server])
    assert all(simulation.throughput(t, t + 10) > 0.9 for t in (20, 30))
    assert evenness > 0.95


@pytest.mark.parametrize("servers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_clients_that_begin_together_do_not_queue(servers: int) -> None:
    """By their own limits, the first 500 requests would fill one server's queue for 35 s."""
    simulation = Simulation([SLOW] * servers, Work())
    simulation.join(100, within_s=1.0)
    for second in range(2, 60, 8):
        simulation.run(second)
        assert simulation.in_flight < 200
    assert all(simulation.throughput(t, t + 8) > 0.85 for t in range(2, 50, 8))
    # A client has its turns at one server after the other.
    assert fairness(simulation.rows(since=18)) > 0.95


def test_a_proxy_that_refuses_is_not_stormed() -> None:
    simulation, throughput, evenness = simulate(100, Work(), until=16, warm=10, max_requests=32)
    assert throughput > 0.95
    assert evenness > 0.95
    begun = simulation.refused
    simulation.run(20)
    assert simulation.refused == begun < 1000


def test_first_quotas_are_waited_for_while_more_clients_come() -> None:
    """The rate is known after three rounds, which ten thousand clients make 20 s long."""
    allocator, waits = Allocator(), list[float]()
    for client in range(10_000):
        allocator.join(str(client))
        waits.append(allocator.quotas_within_s)
    assert min(waits) >= 3 * allocator.round_s


def test_workers_that_come_and_go_are_followed_within_5_s() -> None:
    simulation = Simulation([Accelerator()], Work(rows=1024))
    simulation.join(50, within_s=1.0)
    simulation.join(50, at=15.0, within_s=0.1)
    simulation.leave(50, at=30.0)
    simulation.run(45.0)
    for change in (0.0, 15.0, 30.0):
        assert simulation.throughput(change + 5, change + 15) > 0.9
    assert simulation.in_flight < 20


@pytest.mark.parametrize(
    ("first", "second", "statistics"), [(10, 10, False), (40, 10, True), (10, 40, False)]
)
def test_two_clusters_share_a_server_equally(first: int, second: int, statistics: bool) -> None:
    simulation = Simulation([SLOW], Work(), schedulers=2, statistics=statistics)
    simulation.join(first, within_s=1.0)
    simulation.join(second, at=20.0, within_s=1.0, scheduler=1)
    simulation.run(110.0)
    rows = simulation.rows(since=70.0)
    assert 0.4 < sum(rows[first:]) / sum(rows) < 0.6
    assert simulation.throughput(since=70.0) > 0.9
    # A queue of a few batches, as of one scheduler.
    assert simulation.in_flight < 30


def test_a_service_that_grows_and_shrinks_is_followed() -> None:
    simulation = Simulation([SLOW], Work())
    simulation.join(20, within_s=1.0)
    simulation.run(20.0)
    simulation.change(0, replace(SLOW, instances=4), at=20.0)
    simulation.run(50.0)
    assert simulation.throughput(since=35.0) > 0.9
    simulation.change(0, SLOW, at=50.0)
    simulation.run(80.0)
    assert simulation.throughput(since=55.0) > 0.9
    assert simulation.in_flight < 20


def test_a_server_that_is_not_saturated_delays_nobody() -> None:
    # 70 requests a second, of the 142 that it could answer.
    simulation, *_ = simulate(100, Work(cpu_s=100 / 70), until=60, warm=30)
    waits = sorted(a.at - a.made_at for a in simulation.answered if a.at > 30)
    assert waits[len(waits) // 2] < 0.015
    assert waits[int(0.99 * len(waits))] < 0.1


KEY = URL, "m", "1"


def totals(rows: int) -> dict[Any, float]:
    """Return those of a worker that has sent requests of ten rows and 0.5 s."""
    return {(KEY, "rows"): rows, (KEY, "requests"): rows / 10, (KEY, "trip_s"): 0.05 * rows}


def asked(requests: int, queue_s: float, compute_s: float) -> ModelStatistics:
    return ModelStatistics(requests=requests, queue_s=queue_s, compute_s=compute_s)


def test_what_other_clusters_send_is_seen() -> None:
    """By the server's own account, which is of all requests."""
    history = History(Allocator())
    for step in range(40):
        # Ten of its own a step, and thirty of others.
        history.report(totals(100 if step else 0), {})
        history.report({}, {SERVED: (KEY, asked(1000 + 40 * step, 1, 1))})
        if step == 0:
            # What was before is nobody's.
            assert history.versions[KEY].others is None
    others = history.versions[KEY].others
    assert others is not None
    assert abs(others - 0.75) < 0.01


def test_rounds_make_rates() -> None:
    allocator = Allocator()
    history = History(allocator)
    telemetry = {SERVED: Telemetry(3, 4, "1")}
    for now in (0.0, 1.0, 2.0):
        history.report(totals(100 if now else 0), {})
        allocator.report("a", telemetry, {URL: now == 2.0}, now)
        allocator.end_round(now)
        history.end_round(now)
    (version,) = history.versions.values()
    assert [rate for _, rate in version.rows_per_s] == [100.0, 100.0]
    assert version.rtt_s == 0.5
    assert allocator.demand(*KEY) == (3, 4, allocator.capacities[SERVED].limit)
    assert allocator.demand(URL, "m", "2")[:2] == (0, 0)
    assert allocator.circuits(URL) == [True]


def test_a_server_s_own_account_is_of_the_time_since_it_was_asked() -> None:
    history = History(Allocator())
    history.report(totals(10), {SERVED: (KEY, asked(10, 1.0, 3.0))})
    history.report({}, {SERVED: (KEY, asked(20, 1.1, 6.0))})
    newer = (URL, "m", "2")
    history.report({}, {SERVED: (newer, asked(30, 9.0, 9.0))})  # which nobody has used yet
    (version,) = history.versions.values()
    assert version.queue_s is not None
    assert round(version.queue_s, 6) == 0.01
    assert version.model_s == 0.3
    # Another version, which the next calls without one ask for, has an account of its own.
    history.report({(newer, "requests"): 1.0}, {SERVED: (newer, asked(1, 0.0, 0.5))})
    assert version.model_s == 0.3
    assert history.versions[newer].model_s == 0.5


def test_servers_behind_a_balancer_do_not_answer_for_each_other() -> None:
    """A second one may count more requests than the first, and less time for them."""
    history = History(Allocator())
    for counts in (asked(100, 50.0, 10.0), asked(120, 1.2, 0.6)):
        history.report(totals(100), {SERVED: (KEY, counts)})
    (version,) = history.versions.values()
    assert (version.queue_s, version.model_s) == (0.01, 0.005)
    assert history.allocator.capacities[SERVED].compute_s > 0


def test_a_pause_of_the_clients_does_not_lower_the_rate() -> None:
    """While little is in flight, answers tell what was sent, not what the server can do."""
    rounds = Rounds()
    names = [f"{number:02}" for number in range(40)]

    def run(number: int, answers: int, *, waiting: int) -> None:
        for _ in range(number):
            for name in names:
                rounds.report(name, waiting=waiting, answers=answers)
            rounds.end()

    run(12, 3, waiting=4)
    rate = rounds.allocator.capacities[SERVED].rate
    assert rate > 100
    for name in names[1:]:
        rounds.report(name, waiting=0, answers=0, in_flight=0)
    rounds.report(names[0], waiting=0, answers=1)
    rounds.end()
    assert rounds.allocator.capacities[SERVED].rate > rate / 2
