"""The fallback scores rows while no server has the model, if its files are the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import pytest
from tests.doubling import MODEL, jets, served, twice
from tests.pool.scenario import LOST, ONE, TWO, Scenario, contract, failure
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.pool._core import PoolCore
from sonic_coffea.testing import FakeServer

CONSTITUENTS = ak.Array([[[{"pt": 1.0, "eta": 2.0}], []], [[{"pt": 2.0, "eta": 1.0}]]])


@pytest.fixture
def remote() -> Iterator[FakeServer]:
    with FakeServer(served(max_rows=4)) as server:
        yield server


@pytest.fixture
def local() -> Iterator[FakeServer]:
    with FakeServer(served(max_rows=4)) as server:
        yield server


def pool_of(remote: FakeServer, fallback: Any, **options: Any) -> Pool:
    given = {"fallback_after_s": 0.1, "retry_timeout_s": 30, **options}
    return Pool(Settings.make(remote.url, fallback=fallback, **given))


def rows(server: FakeServer) -> int:
    return server.statistics["m", "rows"]


def test_fallbacks_score_from_the_loss_of_the_servers_until_one_is_back(
    remote: FakeServer, local: FakeServer
) -> None:
    started: list[str] = []

    def start() -> str:
        started.append(local.url)
        return local.url

    with pool_of(remote, start) as pool:
        assert twice(MODEL(jets(*range(40)), pool=pool)) == list(range(40))
        assert started == []
        remote.hold()
        before = len(remote.requests)
        pending = MODEL.submit(jets(*range(40)), pool=pool)
        until(lambda: len(remote.requests) > before)
        remote.stop()
        assert twice(pending.result(timeout_s=60)) == list(range(40))
        scored = {server: tally.rows for (server, *_), tally in pool.statistics}
        assert rows(local) == scored[local.url]
        assert scored[local.url] > 20
        before = rows(remote)
        remote.start()
        until(
            lambda: (
                twice(MODEL(jets(*range(4)), pool=pool)) == [0, 1, 2, 3] and rows(remote) > before
            )
        )
        before = rows(local)
        assert twice(MODEL(jets(*range(40)), pool=pool)) == list(range(40))
        assert rows(local) == before


@pytest.mark.parametrize(
    ("servers", "fallback", "warnings"),
    [("one", "one", 0), ("one", "", 1), ("", "two", 1), ("", "", 1), ("one", "two", 0)],
)
def test_fallbacks_score_unless_they_are_known_to_have_another_file(
    servers: str, fallback: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=1.2, retry_timeout_s=1)
    scenario.served = {ONE: contract(digest=servers), TWO: contract(digest=fallback)}
    slices = scenario.submit(20, contract=scenario.ask().outcome)
    scenario.served[ONE] = LOST
    scenario.lose(ONE)
    scenario.wait(1.5)
    scenario.tell(PoolCore.fallback_started, outcome=TWO)
    for _ in range(2):
        scenario.answer_all()
        scenario.wait(2)
        slices += scenario.submit(4, contract=contract(digest=servers))
    scenario.answer_all()
    scenario.wait(2)
    assert caplog.text.count("cannot be compared") == warnings
    if servers and fallback and fallback != servers:
        scenario.assert_failed(slices, errors.ContractError)
        message = "its files have the digest two, those of the servers one"
        assert all(message in str(error) for error in scenario.failed.values())
    else:
        assert set(scenario.delivered) == set(slices)
        assert set(scenario.delivered.values()) == {TWO}
        scenario.served[ONE] = contract(digest=servers)
        assert scenario.ask(anew=True).outcome.digest == servers  # the fallback counts only alone


def broken() -> str:
    raise ZeroDivisionError


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("fallback", "message"),
    [
        (broken, "an error in this process: ZeroDivisionError"),
        (lambda: "grpc://f:1,grpc://g:1", "expected a server as grpc://host:port"),
        ("grpc://127.0.0.1:9", "an error in this process: RuntimeError"),  # without threads
    ],
)
def test_fallbacks_that_cannot_be_used_are_not_waited_for(
    remote: FakeServer,
    fallback: Any,
    message: str,
    used: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def limited(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
        if thread.name == "sonic-fallback" and isinstance(fallback, str):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pool_of(remote, fallback, retry_timeout_s=0.3) as pool:
        if used:
            MODEL(jets(*range(4)), pool=pool)
        remote.stop()
        with pytest.raises(errors.ServerLostError):
            MODEL(jets(*range(4)), pool=pool)
    assert f"no fallback: {message}" in caplog.text


def test_this_process_takes_over_with_a_repository(
    repository: Path, tagger: sonic.Model, caplog: pytest.LogCaptureFixture
) -> None:
    with sonic.connect("grpc://127.0.0.1:9", fallback=repository, fallback_after_s=0.1) as pool:
        scores = tagger(CONSTITUENTS)
        scored = {server: tally.rows for (server, *_), tally in pool.statistics}
    assert scored == {repository.as_uri(): 3}
    with sonic.connect(repository):
        assert tagger(CONSTITUENTS).tolist() == scores.tolist()
    assert "rows are scored by the fallback file://" in caplog.text


@pytest.mark.server
def test_running_fallbacks_load_models_when_needed(
    repository: Path, installation: Any, tagger: sonic.Model
) -> None:
    def states() -> list[str]:
        return [model.state for model in local.metadata.models]

    explicit = ["--model-control-mode=explicit"]
    with sonic.LocalServer(repository, extra_args=explicit, stop_timeout_s=0.0) as local:
        assert "READY" not in states()
        not_found = pytest.raises(errors.ModelNotFoundError, match="and not loaded")
        with sonic.connect(local), not_found:
            tagger(CONSTITUENTS)
        with sonic.connect("grpc://127.0.0.1:9", fallback=local, fallback_after_s=0.1):
            scores = tagger(CONSTITUENTS)
        assert states() == ["READY"]
    with sonic.connect(repository):
        assert ak.almost_equal(tagger(CONSTITUENTS), scores)


def test_the_owner_of_the_fallback_ends_first(local: FakeServer, remote: FakeServer) -> None:
    """Then another is started."""
    with FakeServer(served(max_rows=4)) as second:
        urls = iter([local.url, second.url])
        with pool_of(remote, lambda: next(urls)) as pool:
            remote.stop()
            assert twice(MODEL(jets(*range(8)), pool=pool)) == list(range(8))
            local.stop()
            scores = MODEL(jets(*range(8)), pool=pool, timeout_s=60)
            assert twice(scores) == list(range(8))
            assert rows(second) >= 8


@pytest.mark.parametrize("digest", ["aa", "bb"])
def test_fallbacks_serve_the_same_file_while_servers_are_asked_anew(digest: str) -> None:
    """A call with a cache always asks anew; what servers gave before counts for the fallback."""
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=1, retry_timeout_s=3)
    scenario.served = {ONE: contract(digest="aa"), TWO: contract(digest=digest)}
    scenario.ask()
    scenario.served[ONE] = LOST
    waiter = scenario.ask(anew=True)
    scenario.wait(2)
    scenario.tell(PoolCore.fallback_started, outcome=TWO)
    scenario.wait(5)
    if digest == "aa":
        assert waiter.outcome == contract(digest="aa")
    else:
        assert isinstance(waiter.outcome, errors.SonicError)


def test_rows_wait_for_the_fallback_if_all_servers_have_another_model_now() -> None:
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=1, retry_timeout_s=5)
    slices = scenario.submit(20)
    scenario.served[ONE] = contract(width=2)
    scenario.lose(ONE, errors.ModelNotFoundError("unloaded"))
    scenario.wait(3)
    assert not scenario.failed
    assert scenario.fallbacks == 1
    scenario.tell(PoolCore.fallback_started, outcome=TWO)
    scenario.answer_all()
    assert set(scenario.delivered) == set(slices)
    assert set(scenario.delivered.values()) == {TWO}
    # A server that is named is no second choice.
    scenario.tell(PoolCore.servers_changed, servers=[ONE, TWO])
    assert scenario.endpoint(TWO).priority == scenario.endpoint(ONE).priority


def test_fallbacks_start_in_time_though_a_lost_server_says_nothing() -> None:
    scenario = Scenario(ONE, fallback="repository", fallback_after_s=1)
    scenario.submit(2)
    scenario.served[ONE] = None
    scenario.lose(ONE)
    scenario.wait(1.1)
    assert scenario.fallbacks == 1


def test_rows_due_for_a_fallback_wait_for_room() -> None:
    """The engine would go round and round."""
    options = {"max_in_flight_bytes": 16, "fallback": "repository", "fallback_after_s": 1}
    scenario = Scenario(ONE, lives=None, **options)
    scenario.submit(2)
    scenario.endpoint(ONE).breaker.open(LOST, scenario.now)
    scenario.now += 2
    scenario.tell()
    assert scenario.fallbacks == 0
    assert scenario.core.wakes_at() > scenario.now


def test_fallbacks_without_the_model_are_one_clear_error() -> None:
    absent = errors.ModelNotFoundError("no such model")
    scenario = Scenario(ONE, served=absent, fallback="repository")
    waiter = scenario.ask()
    assert scenario.fallbacks == 1
    assert waiter.outcome is None
    scenario.tell(PoolCore.fallback_started, outcome=TWO)
    scenario.wait(3)
    assert isinstance(waiter.outcome, errors.ModelNotFoundError)


def test_fallbacks_that_load_the_model_are_waited_for_though_no_server_was_ever_reached() -> None:
    scenario = Scenario(ONE, served=failure(errors.ServerLostError, unreached=True), fallback="dir")
    scenario.served[TWO] = None
    waiter = scenario.ask()
    scenario.tell(PoolCore.fallback_started, outcome=TWO)
    scenario.wait(10)
    assert waiter.outcome is None
    scenario.say(TWO, contract())
    assert waiter.outcome == contract()
