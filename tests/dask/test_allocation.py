"""Who gets how much of the servers: rules, and many workers in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonic_coffea.dask._allocation import Seen, Shares, Trips, deal
from sonic_coffea.pool import Quota
from sonic_coffea.tools._simulation import Accelerator, Simulation, Work, fairness

wants = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(0, 40))


@given(st.floats(0, 300), wants, st.integers(0, 1000))
def test_each_gets_what_it_wants_or_as_much_as_the_others(
    total: float, wants: dict[str, int], turn: int
) -> None:
    dealt = deal(total, wants, turn)
    assert dealt.keys() == wants.keys()
    assert all(given >= 1 for given in dealt.values())
    active = [name for name, want in wants.items() if want]
    assert sum(dealt[name] for name in active) <= max(int(total), len(active))
    unsatisfied = [dealt[name] for name in active if dealt[name] < wants[name]]
    if unsatisfied:
        # Who has less than it wants has as much as anyone, but for what cannot be divided.
        assert max(dealt.values()) <= min(unsatisfied) + 1


def test_what_cannot_be_divided_goes_round() -> None:
    wants = dict.fromkeys("abc", 9)
    got: Counter[str] = Counter()
    for turn in range(30):
        got.update(deal(4, wants, turn))
    assert set(got.values()) == {40}


def test_turns_are_spread_evenly_and_none_is_lost() -> None:
    share = Quota(1, every_s=10.0, turn_at=3.0, until=100.0).after(None)
    assert [share.room(0, now) for now in (0.0, 2.9, 3.0)] == [0, 0, 1]
    share.sent(3.5)  # a little late
    assert share.next_at == 13.0
    # The next message comes with other turns; one that was due is still there.
    late = Quota(1, 10.0, 24.0, 200.0).after(share)
    assert late.next_at == 13.0
    late.sent(14.5)
    assert late.next_at == 24.0
    assert Quota(1, 10.0, 15.0, 200.0).after(share).next_at == 15.0
    free = Quota(3, 0.0, 50.0, 100.0).after(share)
    free.sent(51.0)
    assert free.room(1, 51.0) == 2


def seen(out: int = 1, waiting: int = 5, number: int = 10, refused: int = 0) -> Seen:
    trips = {11: Trips(number=number, sum_s=0.01 * number, least_s=0.01)} if number else {}
    return Seen(out=out, waiting=waiting, rows=0, refused=refused, full=1.0, trips=trips)


SERVED = ("grpc://s:1", "m")


def test_a_worker_that_leaves_or_hangs_has_nothing() -> None:
    shares = Shares()
    for round_ in range(12):
        now = 0.5 * round_
        shares.report("a", {SERVED: seen()}, {}, now)
        shares.report("b", {SERVED: seen(number=0)}, {}, now)
        out = shares.hand_out(now)
    both = out["a"][SERVED].most
    shares.leave("b")
    for round_ in range(12, 24):
        now = 0.5 * round_
        shares.report("a", {SERVED: seen()}, {}, now)
        out = shares.hand_out(now)
    assert out.keys() == {"a"}
    alone = out["a"][SERVED].most
    assert alone >= 2 * both - 1
    # One that reports no more does not keep what it had.
    shares.report("c", {SERVED: seen(number=0)}, {}, 12.0)
    for round_ in range(24, 40):
        now = 0.5 * round_
        shares.report("a", {SERVED: seen()}, {}, now)
        out = shares.hand_out(now)
    assert out["a"][SERVED].most >= alone


def test_refusals_make_less() -> None:
    shares = Shares()
    values = []
    for round_ in range(20):
        shares.report("a", {SERVED: seen(refused=round_ > 12)}, {}, 0.5 * round_)
        shares.hand_out(0.5 * round_)
        values.append(shares.capacities[SERVED].value)
    assert values[12] > 8
    assert values[19] <= 1


def test_a_server_that_one_worker_lost_is_tried_by_two() -> None:
    shares = Shares()
    url = SERVED[0]
    for worker in "abcdef":
        shares.join(worker)
    shares.report("a", {SERVED: seen()}, {url: False}, 1.0)
    assert shares.lost_servers() == {}
    shares.report("b", {}, {url: True}, 2.0)
    lost = shares.lost_servers()
    assert lost[url][0] == "b"
    assert len(lost[url]) == 2
    assert lost[url][1] != "b"
    # It is b's network, if another has answers since.
    shares.report("c", {SERVED: seen()}, {url: False}, 3.0)
    assert shares.lost_servers() == {}
    shares.report("c", {}, {url: True}, 4.0)
    shares.report("b", {}, {url: False}, 4.5)
    assert shares.lost_servers()[url][0] == "c"
    shares.report("c", {SERVED: seen()}, {url: False}, 5.0)
    assert shares.lost_servers() == {}


def simulate(workers: int, work: Work, *, until: float, warm: float, **options: Any) -> Any:
    servers = options.pop("servers", [Accelerator()])
    simulation = Simulation(servers, work, **options)
    simulation.join(workers, within_s=1.0)
    simulation.run(until)
    late = [a for a in simulation.answered if a.at > warm]
    rows: Counter[int] = Counter()
    for answer in late:
        rows[answer.worker] += answer.rows
    throughput = sum(rows.values()) / (until - warm) / simulation.capacity_rows_per_s
    return simulation, throughput, fairness([rows[n] for n in range(workers)])


@pytest.mark.parametrize(
    ("workers", "rows", "until"),
    [(1, 1024, 20), (5, 1024, 20), (16, 100, 20), (100, 1024, 40), (1000, 1024, 100)],
)
def test_a_server_is_saturated_and_shared_evenly(workers: int, rows: int, until: float) -> None:
    simulation, throughput, evenness = simulate(
        workers, Work(rows=rows), until=until, warm=until / 2
    )
    assert throughput > 0.9
    assert evenness > 0.95
    # However many there are, as many requests are out.
    assert simulation.in_flight <= 3 * max(4, 2 * 1024 / rows)


def test_without_a_scheduler_a_thousand_workers_queue() -> None:
    """What the shares are for."""
    simulation, throughput, _ = simulate(1000, Work(rows=1024), until=20, warm=10, shares=False)
    assert throughput > 0.9
    assert simulation.in_flight > 1000


def test_unequal_servers() -> None:
    servers = [Accelerator(), Accelerator(instances=2)]
    _, throughput, evenness = simulate(20, Work(), until=40, warm=20, servers=servers)
    assert throughput > 0.9
    assert evenness > 0.95


def test_workers_that_come_and_go() -> None:
    simulation = Simulation([Accelerator()], Work(rows=1024))
    simulation.join(100, within_s=1.0)
    simulation.join(100, at=30.0, within_s=0.1)
    simulation.leave(100, at=60.0)
    simulation.run(90.0)

    def throughput(start: float, stop: float) -> float:
        rows = sum(a.rows for a in simulation.answered if start < a.at <= stop)
        return rows / (stop - start) / simulation.capacity_rows_per_s

    # Within five seconds of each change, all is as before.
    for change in (0.0, 30.0, 60.0):
        assert throughput(change + 5, change + 30) > 0.9
    assert simulation.in_flight < 20


def test_a_server_that_is_not_saturated_delays_nobody() -> None:
    # 70 requests a second, of the 142 that it could answer.
    simulation, *_ = simulate(100, Work(cpu_s=100 / 70), until=60, warm=30)
    waits = sorted(a.at - a.made_at for a in simulation.answered if a.at > 30)
    assert waits[len(waits) // 2] < 0.015
    assert waits[int(0.99 * len(waits))] < 0.1
