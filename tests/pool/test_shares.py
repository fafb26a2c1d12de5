"""Which of several shares' rows leave first, in one process and among many."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.simulation import Accelerator, Simulation, Work, fairness
from tests.pool.scenario import ONE, Scenario

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.dask._allocator import weighted_fair
from sonic_coffea.pool import DEFAULT, Share
from sonic_coffea.pool import _events as e
from sonic_coffea.pool._shares import current_share

SIGNAL = Share("signal", 3.0)


def answered_first(scenario: Scenario, number: int) -> Counter[str]:
    """Answer so many requests, and count whose they were."""
    names: Counter[str] = Counter()
    for _ in range(number):
        scenario.now += 0.01
        names[scenario.in_flight[0].slice.call.share.name] += 1
        scenario.answer(scenario.in_flight[0])
    return names


def test_rows_that_wait_leave_by_weight() -> None:
    scenario = Scenario(ONE, max_in_flight=2)
    scenario.submit(1)
    # Of many calls as of one.
    for _ in range(30):
        scenario.submit(1)
    slices = scenario.submit(40, share=SIGNAL)
    names = answered_first(scenario, 42)
    assert 9 <= names[""] <= 13
    # Each in the order of its rows, and all of them in the end.
    scenario.answer_all()
    signal = [s for s in scenario.delivered if s.call.share == SIGNAL]
    assert signal == slices
    assert len(scenario.delivered) == 71


def test_a_share_without_rows_saves_nothing_for_later() -> None:
    scenario = Scenario(ONE, max_in_flight=2)
    scenario.submit(30)
    answered_first(scenario, 25)
    scenario.submit(20, share=SIGNAL)
    scenario.submit(20)
    names = answered_first(scenario, 20)
    assert 3 <= names[""] <= 9


def test_rows_that_are_cancelled_cost_their_share_nothing() -> None:
    scenario = Scenario(ONE, max_in_flight=2)
    scenario.submit(40)
    # Two leave, and nobody waits for the others any more.
    signal = scenario.submit(90, share=SIGNAL)
    answered_first(scenario, 2)
    signal[0].call.over = True
    scenario.tell(e.CallEnded(signal[0].call))
    scenario.submit(20, share=SIGNAL)
    names = answered_first(scenario, 20)
    assert 13 <= names["signal"] <= 17


@pytest.mark.parametrize("workers", [(2, 2), (20, 5), (10, 40)])
def test_workers_of_a_cluster_share_by_weight(workers: tuple[int, int]) -> None:
    simulation = Simulation([Accelerator(launch_s=2e-2, row_s=5e-5)], Work())
    simulation.join(workers[0], within_s=1.0)
    simulation.join(workers[1], within_s=1.0, share=SIGNAL)
    simulation.run(50.0)
    rows = simulation.rows(since=20.0)
    first = [n for n, w in simulation.shares.items() if w == DEFAULT]
    ordinary = [rows[n] for n in first]
    signal = [rows[n] for n in simulation.shares if n not in first]
    assert abs(sum(signal) / sum(rows) - 0.75) < 0.08
    assert simulation.throughput(since=20.0) > 0.9
    assert fairness(ordinary) > 0.9
    assert fairness(signal) > 0.9


def test_what_one_share_does_not_need_is_for_the_others() -> None:
    weights = {"a": 1.0, "b": 3.0, "c": 2.0}
    assert weighted_fair(12.0, {"a": 50, "b": 50, "c": 50}, weights) == {"a": 2, "b": 6, "c": 4}
    assert weighted_fair(12.0, {"a": 50, "b": 0, "c": 1}, weights) == {"a": 11, "b": 0, "c": 1}
    # Before they ask for it.
    assert weighted_fair(12.0, {"a": 1, "b": 1, "c": 1}, weights) == {"a": 2.5, "b": 5.5, "c": 4}


def test_calls_have_the_share_in_which_they_are_made() -> None:
    assert current_share() == DEFAULT
    with sonic.share("alice", weight=2):
        assert current_share() == Share("alice", 2.0)
        with sonic.share("bob"):
            assert current_share() == Share("bob", 1.0)
        assert current_share() == Share("alice", 2.0)
    assert current_share() == DEFAULT
    with pytest.raises(errors.ConfigError, match="share 'x': expected a number of more than 0"):
        sonic.share("x", weight=0).__enter__()
    with pytest.raises(errors.ConfigError, match=r"expected a str, got \['x'\]"):
        sonic.share(["x"]).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (1.0, DEFAULT),
        (2.0, Share("Analysis", 2.0)),
        ({"TT": 3.0}, Share("Analysis TT", 3.0)),
        ({"QCD": 3.0}, Share("Analysis TT", 1.0)),
    ],
)
def test_a_processor_has_the_share_of_its_dataset(weight: Any, expected: Share) -> None:
    seen = []

    class Recorder(sonic.Model):
        def submit(self, *_: Any, **__: Any) -> Any:
            seen.append(current_share())
            raise errors.InputError("enough")

    class Analysis(sonic.SonicProcessor):
        __qualname__ = "Analysis"
        share_weight = weight
        models = {"m": Recorder("m", {"x": sonic.Row("pt")}, {"y": None})}  # noqa: RUF012

        def acquire(self, events: Any) -> Any:
            return {"m": events}

    with pytest.raises(errors.InputError):
        Analysis().process(SimpleNamespace(metadata={"dataset": "TT"}))
    assert seen == [expected]
