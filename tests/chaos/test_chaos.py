"""The long test finds wrong rows, errors and hanging calls; its faults leave a URL whole."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import awkward as ak
import grpc
import numpy as np
import pytest
from tests.chaos.load import SUMS, Load, difference, expected
from tests.chaos.world import FAULTS, ROUTES, is_possible, plan
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.world import Fault


def first(number: int, seed: int) -> list[Fault]:
    return list(itertools.islice(plan(seed), number))


def test_seeds_decide_which_faults_there_are() -> None:
    assert first(200, 7) == first(200, 7) != first(200, 8)
    assert {fault.kind for fault in first(1000, 7)} == set(FAULTS)


def test_one_url_stays_whole_but_for_outages() -> None:
    busy: set[str] = set()
    for fault in first(1000, 3):
        if not is_possible(fault, busy):
            busy.clear()  # all others end before
            assert is_possible(fault, busy)
        assert busy.isdisjoint(fault.parts)
        busy.update(fault.parts)
        whole = [route for route, parts in ROUTES.items() if busy.isdisjoint(parts)]
        assert whole or fault.kind == "outage"


def sums(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    one, two = inputs["features"][:, 0], inputs["features"][:, 1]
    return {"scores": np.stack([one.sum(axis=1), (one * two).sum(axis=1)], axis=1)}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({SUMS.name: FakeModel.of(SUMS, sums)}) as running, sonic.connect(running.url):
        yield running


def found_by_calls(most: int) -> list[str]:
    """Return what calls find wrong, until one of them does, or some were made."""
    load = Load(1, 60.0)
    with ThreadPoolExecutor(1) as threads:
        calls = threads.submit(load.call, 0)
        until(lambda: calls.done() or bool(load.problems) or load.calls >= most)
        load.over.set()
    return load.problems


def test_wrong_rows_are_found() -> None:
    scores = ak.to_list(expected()[10:30])
    last = next(event for event in reversed(scores) if event)
    assert difference(ak.Array(scores), 10, 30) == ""
    last[0]["product"] += 0.01
    assert "1 wrong product" in difference(ak.Array(scores), 10, 30)
    del last[0]
    assert "another number of rows" in difference(ak.Array(scores), 10, 30)


def test_errors_are_found(server: FakeServer) -> None:
    assert found_by_calls(30) == []
    server.fail(grpc.StatusCode.INVALID_ARGUMENT, "no", times=99)
    (problem,) = found_by_calls(30)
    assert "thread 0, events" in problem
    assert "RequestError" in problem


def test_calls_that_hang_are_found(server: FakeServer) -> None:
    load = Load(1, 0.2)
    server.hold()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(load.call, 0)
        while not load.problems:
            load.check_time()
        load.over.set()
        server.release()
    assert "a call of thread 0 takes more than 0 s" in load.problems
