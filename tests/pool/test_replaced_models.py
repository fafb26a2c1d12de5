"""A model that is given other files under the same version number is noticed, and soon."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest
from coffea.processor import accumulate
from tests.doubling import MODEL, Doubling, jets, served
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import Pending, errors, provenance
from sonic_coffea.pool._core import PoolCore
from sonic_coffea.pool._tuning import LATE_S, QUIET_S, VALID_S
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import Contract

from .scenario import KEY, LOST, ONE, TWO, Scenario, contract

A, B = contract(digest="a"), contract(digest="b")


def scenario_of(*urls: str) -> Scenario:
    """Return servers that had model A when they were asked, and have B."""
    scenario = Scenario(*urls, served=A)
    assert scenario.ask().outcome == A
    scenario.served = {ONE: B, TWO: B}
    return scenario


def test_servers_are_asked_again_when_nothing_was_answered_for_a_while() -> None:
    """A server may have been restarted; while a pool is used, that is noticed."""
    scenario = scenario_of(ONE)
    for _ in range(100):
        scenario.submit(contract=A)
        scenario.answer_all()
        scenario.wait(0.9 * QUIET_S)
        assert scenario.ask().outcome == A
    scenario.wait(QUIET_S)
    assert scenario.ask().outcome == B


@pytest.mark.parametrize("error", [LOST, errors.RequestError("unexpected shape")])
def test_servers_are_asked_again_after_a_loss_or_a_refusal(error: errors.SonicError) -> None:
    scenario = scenario_of(ONE)
    scenario.lives[ONE] = True
    scenario.submit(3, contract=A)
    scenario.fail(scenario.in_flight[0], error)
    assert scenario.ask().outcome == A  # which has just been said
    scenario.answer(scenario.in_flight[0])
    scenario.wait(VALID_S)
    scenario.fail(scenario.in_flight[0], error)
    assert scenario.ask().outcome == B
    # Rows of a call that began before fail, and hold up no others.
    old, new = scenario.submit(contract=A), scenario.submit(contract=B)
    scenario.answer_all()
    assert isinstance(scenario.failed[old[0]], errors.ContractError)
    assert scenario.delivered[new[0]] == ONE


def test_rows_of_a_model_that_is_gone_fail_when_callers_are_told_of_another() -> None:
    scenario = scenario_of(ONE)
    scenario.served = {ONE: LOST, TWO: contract(width=2)}
    asked = scenario.ask(anew=True)
    slices = scenario.submit(contract=A)
    scenario.tell(PoolCore.servers_changed, servers=[TWO])
    assert asked.outcome == contract(width=2)
    scenario.assert_failed(slices, errors.ContractError)


def doubted(scenario: Scenario) -> None:
    """Have a request refused long after the contract was given."""
    scenario.wait(VALID_S)
    scenario.submit(contract=scenario.told[ONE, KEY])
    scenario.fail(scenario.in_flight[0], errors.RequestError("unexpected shape"))


@pytest.mark.parametrize(
    "outcome", [errors.OverloadError("not now"), errors.ModelNotFoundError("not now"), None]
)
def test_known_contracts_serve_while_servers_do_not_answer(outcome: object) -> None:
    scenario = scenario_of(ONE)
    doubted(scenario)
    scenario.served = {ONE: outcome}
    waiter = scenario.ask()
    scenario.wait(LATE_S)
    assert waiter.outcome == A


@pytest.mark.parametrize(
    ("same", "other"), [(A, B), (contract(max_rows=None), contract(max_rows=4))]
)
def test_servers_that_alone_have_another_model_get_no_rows(same: Contract, other: Contract) -> None:
    scenario = Scenario(served=same)
    assert scenario.ask().outcome == same
    doubted(scenario)
    scenario.served[TWO] = other
    assert scenario.ask().outcome == same
    slices = scenario.submit(8, contract=same)
    assert not scenario.at(TWO)
    scenario.answer_all()
    assert set(scenario.delivered) == set(slices)
    assert scenario.ask().outcome == same


JETS = ak.unflatten(jets(1.0, 2.0, 3.0), [2, 0, 1])


def fake(digest: str, factor: float = 2.0) -> FakeModel:
    model = served(lambda inputs: {"y": factor * inputs["x"]})["m"]
    return dataclasses.replace(model, digest=digest)


def digest_of(scores: ak.Array) -> str:
    return str(scores.attrs["sonic"]["digest"])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({"m": fake("a")}) as running:
        yield running


@pytest.fixture
def pool(server: FakeServer) -> Iterator[sonic.Pool]:
    with sonic.connect(server.url) as connected:
        yield connected


def test_provenance_of_a_server_that_was_started_anew(server: FakeServer, pool: sonic.Pool) -> None:
    pending = MODEL.submit(JETS, pool=pool)
    until(pending.done)
    server.stop()
    server.models["m"] = fake("b", 3.0)
    server.start()
    # `check` asks in any case; what was answered before is of the first file.
    assert MODEL.check(pool).digest == "b"
    assert digest_of(pending.result()) == "a"
    assert digest_of(MODEL(JETS, pool=pool)) == "b"
    server.models["m"] = fake("c", 5.0)
    time.sleep(QUIET_S)
    scores = MODEL(JETS, pool=pool)
    assert digest_of(scores) == "c"
    assert scores.twice.tolist() == [[5.0, 10.0], [], [15.0]]


def replaced_after(server: FakeServer, requests: int, new: FakeModel) -> None:
    """Replace the model as the server is about to answer a request."""
    old = server.models["m"]

    def function(inputs: object) -> object:
        if len(server.requests) >= requests:
            server.models["m"] = new
        return old.function(inputs)  # type: ignore[arg-type]

    server.models["m"] = dataclasses.replace(old, function=function, max_rows=1)


def test_long_calls_that_see_two_files_fail(server: FakeServer) -> None:
    with sonic.connect(server.url, max_in_flight=1) as pool:
        replaced_after(server, 2, fake("b", 3.0))
        server.hold()
        pending = MODEL.submit(JETS, pool=pool)
        time.sleep(QUIET_S)
        server.release()
        for file in ("b", "a"):  # also when the first is back before the scores are asked for again
            server.models["m"] = fake(file, 3.0)
            with pytest.raises(errors.ContractError, match="digest a before .* has b now"):
                pending.result()
        server.models["m"] = fake("b", 3.0)
        assert digest_of(MODEL(JETS, pool=pool)) == "b"


class Listing(Doubling):
    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        return {"scores": ak.flatten(scores["m"].twice).tolist()}


def test_reports_of_runs_that_see_two_files_say_so(server: FakeServer, pool: sonic.Pool) -> None:
    """Each chunk is scored by one file, and the sum of the chunks by both."""
    chunks = [Listing().process(JETS)]
    server.models["m"] = fake("b", 3.0)
    assert MODEL.check(pool).digest == "b"
    chunks += [Listing().process(JETS), Listing().process(JETS)]
    out = accumulate(chunks)
    assert out["scores"] == [2.0, 4.0, 6.0] + 2 * [3.0, 6.0, 9.0]
    assert any("m v1 had 2 files" in advice for advice in sonic.report(out).advice)
    assert sonic.report(accumulate(chunks[1:])).advice == []


def test_calls_that_two_versions_score_name_both(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """If no server has the first any more."""
    other = "2\n\x1b[2J"
    with sonic.connect(server.url, max_in_flight=1) as pool:
        replaced_after(server, 2, dataclasses.replace(fake("b", 3.0), versions=(other,)))
        scores = MODEL(JETS, pool=pool)
    assert scores.twice.tolist() == [[2.0, 4.0], [], [9.0]]
    assert scores.attrs["sonic"]["version"] == f"1, {other}"
    assert caplog.text.count("no server has version '1' of model 'm' any more") == 1
    assert all(message.isprintable() for message in caplog.messages)


def test_all_processes_choose_the_newest_version(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pool asks the servers in an order of its own."""
    newer = dataclasses.replace(fake("b", 3.0), versions=("9", "10"))
    with FakeServer({"m": newer}) as other:
        for _ in range(8):
            with sonic.connect([server.url, other.url]) as pool:
                made_by = MODEL(JETS, pool=pool).attrs["sonic"]
            assert (made_by["version"], made_by["digest"]) == ("10", "b")
            assert made_by["servers"] == [other.url]
    assert caplog.text.count("rows are scored by version '10', on the servers that have it") == 8


def test_the_digest_is_unknown_if_no_server_tells_it_in_time_after_a_long_call(
    tmp_path: Path,
) -> None:
    asked, told = threading.Event(), threading.Event()

    class Slow(FakeServer):
        def answer(self, method: str, request: Any, context: Any) -> Any:
            if method == "ModelConfig" and self.requests:
                asked.set()
                told.wait(60)
            return super().answer(method, request, context)

    with Slow({"m": fake("a")}) as server, sonic.connect(server.url) as pool:

        def long_call() -> Pending:
            server.hold()
            pending = MODEL.submit(JETS, pool=pool)
            time.sleep(QUIET_S)
            server.release()
            until(pending.done)
            return pending

        late = long_call()
        assert late.result(timeout_s=0.5).attrs["sonic"]["digest"] is None
        assert asked.is_set()
        told.set()
        assert digest_of(late.result()) == "a"
        untold = long_call()
        server.refuse("ModelConfig", grpc.StatusCode.UNAVAILABLE, "not now")
        scores = untold.result()
    assert scores.twice.tolist() == [[2.0, 4.0], [], [6.0]]
    assert scores.attrs["sonic"]["digest"] is None
    provenance.to_parquet(scores, tmp_path / "scores.parquet", scores)
    (record,) = provenance.read(tmp_path / "scores.parquet")["models"]
    assert record["digest"] is None


def test_servers_that_join_without_a_digest_make_it_unknown() -> None:
    one = dataclasses.replace(fake("a"), max_rows=1)
    with (
        FakeServer({"m": one}) as server,
        FakeServer({"m": dataclasses.replace(one, digest="")}) as other,
        sonic.connect(server.url, max_in_flight=1) as pool,
    ):
        assert digest_of(MODEL(JETS, pool=pool)) == "a"
        pool.set_servers([server.url, other.url])
        server.hold()  # so that the other one gets rows, too
        pending = MODEL.submit(JETS, pool=pool)
        until(lambda: len(other.requests) > 1)
        server.release()
        made_by = pending.result().attrs["sonic"]
        assert made_by["servers"] == sorted([server.url, other.url])
        assert made_by["digest"] is None


def test_models_that_do_not_fit_are_asked_for_again(server: FakeServer, pool: sonic.Pool) -> None:
    server.models["m"] = fake("")
    MODEL(JETS, pool=pool)
    server.models["m"] = dataclasses.replace(
        fake(""),
        outputs={"y": ("float32", (2,))},
        function=lambda inputs: {"y": np.zeros((len(inputs["x"]), 2), np.float32)},
    )
    for error in (errors.ResponseError, errors.ContractError):
        with pytest.raises(error):
            MODEL(JETS, pool=pool)
    server.models["m"] = fake("c", 5.0)
    assert digest_of(MODEL(JETS, pool=pool)) == "c"


def test_another_version_than_was_asked_for_is_refused(
    server: FakeServer, pool: sonic.Pool
) -> None:
    pinned = sonic.Model("m", MODEL.inputs, MODEL.outputs, version=1)
    server.answer_wrongly(lambda answer: setattr(answer, "model_version", "2"))
    with pytest.raises(errors.ResponseError, match="version 2 answered, and version 1") as caught:
        pinned(JETS, pool=pool)
    assert caught.value.server == server.url


def test_several_files_behind_one_url_are_never_in_the_cache(tmp_path: Path) -> None:
    """Requests go to one and to the other by turns, those for the digest too."""
    pods = itertools.cycle([fake("a"), fake("b", 3.0)])

    class Balanced(FakeServer):
        def answer(self, method: str, request: Any, context: Any) -> Any:
            self.models["m"] = next(pods)
            return super().answer(method, request, context)

    with (
        Balanced({"m": fake("a")}) as server,
        sonic.connect(server.url, cache=tmp_path / "scores") as pool,
    ):
        for _ in range(6):
            pending = MODEL.submit(JETS, pool=pool)
            with pytest.raises(errors.ContractError, match="servers have different files"):
                pending.result()
            assert pending.statistics.cache_hits == 0
