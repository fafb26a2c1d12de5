"""Who gets how much of the servers: rules, and many workers in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from benchmarks.simulation import Accelerator, Simulation, Work, fairness
from hypothesis import given
from hypothesis import strategies as st

from sonic_coffea.dask._allocator import Allocator, Telemetry, max_min_fair
from sonic_coffea.pool import Quota, RttStatistics

demands = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(0, 40))


@given(st.floats(0, 300), demands, st.integers(0, 1000))
def test_each_gets_what_it_asks_for_or_as_much_as_the_others(
    total: float, demands: dict[str, int], rounds: int
) -> None:
    quotas = max_min_fair(total, demands, dict.fromkeys(demands, 1), rounds)
    assert quotas.keys() == demands.keys()
    assert all(quota >= 1 for quota in quotas.values())
    active = [name for name, demand in demands.items() if demand]
    assert sum(quotas[name] for name in active) <= max(int(total), len(active))
    unsatisfied = [quotas[name] for name in active if quotas[name] < demands[name]]
    if unsatisfied:
        # Who has less than it asks for has as much as anyone, but for what cannot be divided.
        assert max(quotas.values()) <= min(unsatisfied) + 1


def test_what_cannot_be_divided_goes_round() -> None:
    demands = dict.fromkeys("abc", 9)
    got: Counter[str] = Counter()
    for rounds in range(30):
        got.update(max_min_fair(4, demands, dict.fromkeys(demands, 1), rounds))
    assert set(got.values()) == {40}


def test_rounding_errors_give_nothing_to_who_has_enough() -> None:
    demands = {"light": 1, "b": 10, "c": 9, "d": 8}
    quotas = max_min_fair(12, demands, {"light": 3, "b": 1, "c": 1, "d": 1}, rounds=4)
    assert quotas["light"] == 3
    assert sum(quotas[name] for name in "bcd") == 11


def test_turns_are_spread_evenly_and_none_is_lost() -> None:
    quota = Quota(1, interval_s=10.0, turn_at=3.0, expires_at=100.0).after(None)
    assert [quota.room(0, now) for now in (0.0, 2.9, 3.0)] == [0, 0, 1]
    quota.sent(3.5)  # a little late
    assert quota.next_turn_at == 13.0
    # The next message comes with other turns; one that was due is still there.
    late = Quota(1, 10.0, 24.0, 200.0).after(quota)
    assert late.next_turn_at == 13.0
    late.sent(14.5)
    assert late.next_turn_at == 24.0
    assert Quota(1, 10.0, 15.0, 200.0).after(quota).next_turn_at == 15.0
    free = Quota(3, 0.0, 50.0, 100.0).after(quota)
    free.sent(51.0)
    assert free.room(1, 51.0) == 2


SERVED = "grpc://s:1", ("m", None)


class Rounds:
    """An allocator in rounds of 0.5 s."""

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.now = 0.0

    def report(
        self,
        client: str,
        waiting: int = 5,
        answers: int = 10,
        refused: int = 0,
        in_flight: int = 1,
    ) -> None:
        rtts = {11: (answers, 0.01 * answers, 0.01)} if answers else {}
        rtt = RttStatistics(refused=refused, trips=rtts)
        self.allocator.report(client, {SERVED: Telemetry(in_flight, waiting, rtt)}, {}, self.now)

    def end(self) -> dict[str, Any]:
        grants = self.allocator.allocate(self.now)
        self.now += 0.5
        return {name: models[SERVED] for name, models in grants.items() if models}


def test_a_worker_that_leaves_or_hangs_has_nothing() -> None:
    rounds = Rounds()
    for _ in range(12):
        rounds.report("a")
        rounds.report("b", answers=0)
        grants = rounds.end()
    both = grants["a"].max_in_flight
    rounds.allocator.leave("b")
    for _ in range(12):
        rounds.report("a")
        grants = rounds.end()
    assert grants.keys() == {"a"}
    alone = grants["a"].max_in_flight
    assert alone >= 2 * both - 1
    # One that reports no more does not keep what it had.
    rounds.report("c", answers=0)
    for _ in range(16):
        rounds.report("a")
        grants = rounds.end()
    assert grants["a"].max_in_flight >= alone


def test_turns_are_spread_evenly_after_some_have_left() -> None:
    rounds = Rounds()
    names = [f"{number:02}" for number in range(40)]
    for name in names:
        rounds.allocator.join(name)
    stay = random.Random(1).sample(names, 20)
    for name in set(names) - set(stay):
        rounds.allocator.leave(name)
    for _ in range(4):
        for name in stay:
            rounds.report(name, refused=1)
        grants = rounds.end()
    (interval_s,) = {grant.interval_s for grant in grants.values()}
    delays = sorted(grant.delay_s for grant in grants.values())
    assert max(b - a for a, b in pairwise(delays)) < 2 * interval_s / len(stay)


def test_a_client_of_some_weight_gets_as_much_as_so_many() -> None:
    rounds = Rounds()
    rounds.allocator.join("two", 2)
    rounds.allocator.join("one")
    for _ in range(6):
        rounds.report("two", waiting=500, answers=20)
        rounds.report("one", waiting=500)
        grants = rounds.end()
    assert abs(grants["two"].max_in_flight - 2 * grants["one"].max_in_flight) <= 2
    assert grants["one"].max_in_flight > 1
    # Also with fewer requests than clients, by turns.
    for _ in range(8):
        rounds.report("two", waiting=500, refused=1)
        rounds.report("one", waiting=500)
        grants = rounds.end()
    assert [grants[name].max_in_flight for name in ("two", "one")] == [2, 1]
    assert grants["one"].interval_s == 2 * grants["two"].interval_s > 0
    assert all(grant.delay_s <= grant.interval_s for grant in grants.values())


def test_refusals_make_less() -> None:
    rounds = Rounds()
    limits = []
    for round_ in range(20):
        rounds.report("a", refused=round_ > 12, in_flight=8)
        rounds.end()
        limits.append(rounds.allocator.capacities[SERVED].limit)
    assert limits[12] > 8
    assert limits[19] <= 1


def test_a_server_that_is_ejected_is_tried_by_two() -> None:
    allocator = Allocator()
    url = SERVED[0]
    answered = {SERVED: Telemetry(1, 5, RttStatistics(trips={11: (10, 0.1, 0.01)}))}
    for worker in "abcdef":
        allocator.join(worker)
    assert allocator.report("a", answered, {url: False}, 1.0) == []
    assert allocator.ejected() == {}
    assert allocator.report("b", {}, {url: True}, 2.0) == [url]
    assert allocator.report("b", {}, {url: True}, 2.5) == []
    ejected = allocator.ejected()
    assert ejected[url][0] == "b"
    assert len(ejected[url]) == 2
    assert ejected[url][1] != "b"
    # It is b's network, if another has answers since.
    allocator.report("c", answered, {url: False}, 3.0)
    assert allocator.ejected() == {}
    allocator.report("c", {}, {url: True}, 4.0)
    assert allocator.open_circuits(url) == 2
    assert allocator.report("b", {}, {url: False}, 4.5) == [url]
    assert allocator.ejected()[url][0] == "c"
    allocator.report("c", answered, {url: False}, 5.0)
    assert allocator.ejected() == {}


def simulate(workers: int, work: Work, *, until: float, warm: float, **options: Any) -> Any:
    servers = options.pop("servers", [Accelerator()])
    simulation = Simulation(servers, work, **options)
    simulation.join(workers, within_s=1.0)
    simulation.run(until)
    return simulation, simulation.throughput(since=warm), fairness(simulation.rows(since=warm))


@pytest.mark.parametrize(
    ("workers", "rows", "until"),
    [
        *((1, 1024, 20), (5, 1024, 20), (16, 100, 8), (100, 1024, 30)),
        pytest.param(400, 1024, 60, marks=pytest.mark.slow),
    ],
)
def test_a_server_is_saturated_and_shared_evenly(workers: int, rows: int, until: float) -> None:
    simulation, throughput, evenness = simulate(
        workers, Work(rows=rows), until=until, warm=until / 2
    )
    assert throughput > 0.9
    assert evenness > 0.95
    # However many there are, as many requests are in flight.
    assert simulation.in_flight <= 3 * max(4, 2 * 1024 / rows)


@pytest.mark.slow
def test_a_thousand_share_a_url_with_many_servers_from_the_start() -> None:
    # Rounds are of 2 s, and what is reported in one is of those before.
    server = Accelerator(launch_s=6e-3, row_s=1.5e-5, instances=10)
    simulation, _, evenness = simulate(1000, Work(), until=40, warm=20, servers=[server])
    assert all(simulation.throughput(t, t + 10) > 0.85 for t in (0, 10, 20, 30))
    assert evenness > 0.95


@pytest.mark.parametrize("servers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_clients_that_all_begin_with_several_chunks_are_not_each_others_queue(servers: int) -> None:
    """By their own limits, the first 500 requests would fill one server's queue for 35 s."""
    simulation = Simulation([SLOW] * servers, Work())
    simulation.join(100, within_s=1.0)
    for second in range(2, 60, 8):
        simulation.run(second)
        assert simulation.in_flight < 200
    assert all(simulation.throughput(t, t + 8) > 0.85 for t in range(2, 50, 8))
    # A client has its turns at one server after the other.
    assert fairness(simulation.rows(since=18)) > 0.95


def test_first_quotas_are_waited_for_while_more_clients_come() -> None:
    """The rate is known after three rounds, which ten thousand clients make 20 s long."""
    allocator, waits = Allocator(), list[float]()
    for client in range(10_000):
        allocator.join(str(client))
        waits.append(allocator.quotas_within_s)
    assert min(waits) >= 3 * allocator.round_s


def test_without_a_scheduler_a_thousand_workers_queue() -> None:
    """What the quotas are for."""
    simulation, throughput, _ = simulate(1000, Work(rows=1024), until=10, warm=5, weights=())
    assert throughput > 0.9
    assert simulation.in_flight > 1000


def test_unequal_servers() -> None:
    servers = [Accelerator(), Accelerator(instances=2)]
    _, throughput, evenness = simulate(20, Work(), until=16, warm=8, servers=servers)
    assert throughput > 0.9
    assert evenness > 0.95


def test_workers_that_come_and_go() -> None:
    simulation = Simulation([Accelerator()], Work(rows=1024))
    simulation.join(50, within_s=1.0)
    simulation.join(50, at=15.0, within_s=0.1)
    simulation.leave(50, at=30.0)
    simulation.run(45.0)

    # Within five seconds of each change, all is as before.
    for change in (0.0, 15.0, 30.0):
        assert simulation.throughput(change + 5, change + 15) > 0.9
    assert simulation.in_flight < 20


# A batch takes long, so that there are few of them to simulate.
SLOW = Accelerator(launch_s=2e-2, row_s=5e-5)


@pytest.mark.parametrize(
    ("workers", "weights"), [(10, (1.0, 1.0)), (10, (3.0, 1.0)), (40, (1.0, 3.0))]
)
def test_schedulers_that_know_nothing_of_each_other_share_by_weight(
    workers: int, weights: tuple[float, float]
) -> None:
    simulation = Simulation([SLOW], Work(), weights=weights)
    simulation.join(workers, within_s=1.0)
    simulation.join(10, at=20.0, within_s=1.0, scheduler=1)
    simulation.run(140.0)
    rows = simulation.rows(since=80.0)
    part = sum(rows[workers:]) / sum(rows)
    assert abs(part - weights[1] / sum(weights)) < 0.05
    assert simulation.throughput(since=80.0) > 0.9
    # A queue of a few batches, as of one scheduler.
    assert simulation.in_flight < 30


def test_a_scheduler_makes_room_only_while_it_does_not_know_the_servers() -> None:
    simulation, throughput, _ = simulate(
        5, Work(), until=220, warm=170, servers=[SLOW], weights=(1.0, 1.0)
    )
    assert throughput > 0.99  # at 180 s, too
    # When another has come, both do.
    simulation.join(5, at=225.0, scheduler=1)
    simulation.run(300.0)
    rows = simulation.rows(since=260.0)
    assert abs(sum(rows[5:]) / sum(rows) - 0.5) < 0.05


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
