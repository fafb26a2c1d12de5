"""Rows that a server loses: tried again elsewhere, None if asked, or one clear error."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from tests.pool.fakes import LOST, MODEL, FakeServer, doubled, inferred, objects, pool_of, refuses
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Quota
from sonic_coffea.pool._call import Call, Piece
from sonic_coffea.pool._endpoint import Endpoint, choose
from sonic_coffea.transport import Answer

if TYPE_CHECKING:
    from sonic_coffea.transport import Contract


def test_rows_of_a_lost_server_go_to_another(servers: dict[str, FakeServer]) -> None:
    (one, two) = servers.values()
    one.behaviour = lambda _: LOST
    with pool_of(*servers) as pool:
        pending = MODEL.submit(objects(500), pool=pool)
        assert doubled(pending.result(timeout_s=30)) == list(range(500))
        total = pool.statistics.total()
        assert total.rows == 500
        assert total.retries >= 1
        assert total.failures == 0
        assert {s for (s, _, _), t in pool.statistics if t.rows} == {str(two.address)}


def test_one_server_that_is_gone_is_one_clear_error(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.behaviour = lambda x: LOST if x[0, 0] >= 100 else 2 * x
    with pool_of("grpc://s1:8001", retry_timeout_s=0.5) as pool:
        events = ak.unflatten(objects(200), [2] * 100)
        with pytest.raises(errors.ServerLostError) as caught:
            MODEL(events, pool=pool)
        error = caught.value
        assert error.server == "grpc://s1:8001"
        assert error.model == "m"
        assert error.rows is not None
        assert error.rows[0] >= 100
        assert error.events == (error.rows[0] // 2, error.rows[1] // 2)
        # Who runs the chunk again hears it at once, after one more try.
        one.behaviour = lambda _: LOST
        before = len(one.requests)
        with pytest.raises(errors.ServerLostError):
            MODEL(events, pool=pool)
        assert len(one.requests) - before <= pool.settings.max_in_flight


def test_a_server_that_returns_is_used_again(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    failed = threading.Event()

    def once(_: np.ndarray) -> Any:
        one.behaviour = lambda x: 2 * x
        failed.set()
        return LOST

    one.behaviour = once
    with pool_of("grpc://s1:8001") as pool:
        assert doubled(MODEL(objects(50), pool=pool)) == list(range(50))
    assert failed.is_set()


def test_a_server_that_hangs_is_found_out(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It owes answers, and does not say that it lives: its rows go elsewhere, and are cancelled."""
    one, two = servers.values()
    monkeypatch.setattr("sonic_coffea.pool._endpoint._QUIET_S", 0.05)
    one.gate.clear()
    one.lives = False
    with pool_of(*servers) as pool:
        assert doubled(MODEL(objects(50), pool=pool)) == list(range(50))
        assert one.requests
        until(lambda: all(e.cancelled.is_set() for e in one.exchanges))
        assert pool.statistics.total().rows == 50
        assert sum(len(r) for r in two.requests) == 50


def test_what_is_given_up_while_it_is_sent_is_cancelled(servers: dict[str, FakeServer]) -> None:
    """Its server is found silent just then; whoever finds out has nothing to cancel yet."""
    one, two = servers.values()
    with pool_of(*servers, balance="priority") as pool:
        MODEL.check(pool)
        (endpoint,) = (e for e in pool._fleet.endpoints if e.url == "grpc://s1:8001")
        real = one.infer

        def infer(*given: Any, **options: Any) -> Any:
            exchange = real(*given, **options)
            (attempt,) = endpoint.attempts
            thread = threading.Thread(target=pool._dispatcher._ended, args=(attempt, LOST))
            thread.start()
            thread.join()
            return exchange

        one.gate.clear()
        one.infer = infer  # type: ignore[method-assign]
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))
        assert len(two.requests) == 1
        until(lambda: [e.cancelled.is_set() for e in one.exchanges] == [True], timeout_s=20)


def test_a_server_that_answers_while_it_is_asked_whether_it_lives(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the question, it is not lost."""
    (one, _) = servers.values()
    monkeypatch.setattr("sonic_coffea.pool._endpoint._QUIET_S", 0.05)
    answers = {row: threading.Event() for row in (0, 4)}
    one.behaviour = lambda x: 2 * x if answers[int(x[0, 0])].wait(20) else LOST
    asked: list[Any] = []
    one.live = asked.append  # type: ignore[method-assign]
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(objects(8), pool=pool)
        until(lambda: bool(asked) and one.out == 2)
        answers[0].set()
        until(lambda: pool.statistics.total().requests == 1)
        asked[0](LOST)
        assert pool.servers[0].usable
        answers[4].set()
        assert doubled(pending.result(timeout_s=20)) == list(range(8))
        assert len(one.requests) == 2


def test_what_is_answered_cannot_be_lost_any_more(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may find out at this moment that the server is silent."""
    (one, _) = servers.values()
    with pool_of("grpc://s1:8001") as pool:
        MODEL.check(pool)
        dispatcher = pool._dispatcher
        real, first = dispatcher._record, iter([True])
        taken: list[Any] = []

        def begin(*given: Any) -> Any:
            taken.append(begun(*given))
            return taken[-1]

        def record(*given: Any) -> None:
            if next(first, False):
                thread = threading.Thread(target=dispatcher._ended, args=(taken[0], LOST))
                thread.start()
                thread.join()
            real(*given)

        begun = Endpoint.begin
        monkeypatch.setattr(Endpoint, "begin", begin)
        monkeypatch.setattr(dispatcher, "_record", record)
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))
        assert len(one.requests) == 2
        assert pool.statistics.total().retries == 0


def test_whatever_a_loss_does_nobody_waits_for_ever(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, _) = servers.values()
    one.behaviour = lambda _: LOST
    with pool_of("grpc://s1:8001") as pool:
        MODEL.check(pool)
        monkeypatch.setattr(Endpoint, "failed", lambda *_: 1 / 0)
        with pytest.raises(errors.ResponseError, match="division by zero"):
            MODEL(objects(4), pool=pool, timeout_s=20)
        until(lambda: all(s.in_flight == 0 for s in pool.servers))


def test_a_server_that_is_slow_and_lives_is_waited_for(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = servers.values()
    monkeypatch.setattr("sonic_coffea.pool._endpoint._QUIET_S", 0.01)
    one.gate.clear()
    with pool_of(*servers) as pool:
        pending = MODEL.submit(objects(50), pool=pool)
        until(lambda: one.asked > 2 and not two.out)
        assert not pending.done()
        one.gate.set()
        assert doubled(pending.result()) == list(range(50))
        assert pool.statistics.total().retries == 0


def test_a_server_that_is_back_is_tried_with_one_request(
    servers: dict[str, FakeServer],
) -> None:
    (one, _) = servers.values()
    one.behaviour = lambda _: LOST
    with pool_of("grpc://s1:8001", retry_timeout_s=60) as pool:
        pending = MODEL.submit(objects(400), pool=pool)
        until(lambda: len(one.requests) > 4 and not one.out)
        one.most_out = 0
        until(lambda: len(one.requests) > 7)
        assert one.most_out == 1
        one.behaviour = inferred
        assert doubled(pending.result()) == list(range(400))
        assert one.most_out > 1


def test_rows_that_are_lost_are_none_if_asked(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.behaviour = refuses(5, 18)
    array = ak.unflatten(objects(20), [3, 0, 10, 7])
    array = ak.mask(array, array.pt != 2)
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(array, pool=pool, on_error="mask")
        scores = pending.result()
        # Nineteen rows in requests of four: the None is not sent.
        flat = ak.flatten(scores.v0)
        assert flat.tolist() == [
            None if n == 2 or 5 <= n <= 8 or n >= 17 else 2.0 * n for n in range(20)
        ]
        assert ak.num(scores).tolist() == [3, 0, 10, 7]
        assert pending.statistics.masked == 7
        until(lambda: pool.statistics.masked == 7)
        with pytest.raises(errors.RequestError, match="rows 4..7"):
            MODEL(array, pool=pool)


def test_lost_rows_of_several_outputs(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.outputs = ("y", "z")
    one.behaviour = lambda x: refuses(5)(x) if 5 in x else {"y": 2 * x, "z": 3 * x}
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["v0"], "z": None})
    with pool_of("grpc://s1:8001") as pool:
        scores = model(objects(8), pool=pool, on_error="mask")
    assert scores.tolist() == [
        {"y": {"v0": 2.0 * n}, "z": 3.0 * n} if n < 4 else None for n in range(8)
    ]


def test_without_any_server_all_is_none(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()

    def contract(model: str, version: str | None) -> Contract:
        raise LOST

    one.contract = contract  # type: ignore[method-assign]
    with pool_of("grpc://s1:8001", retry_timeout_s=0.1) as pool:
        pending = MODEL.submit(objects(8), pool=pool, on_error="mask")
        assert pending.result().tolist() == [None] * 8
        assert str(pending.result().type) == "8 * ?{v0: float32}"
        assert pending.statistics.masked == 8
        hint = r"\(sonic-coffea check grpc://s1:8001 m tries it step by step\)"
        with pytest.raises(errors.ServerLostError, match=hint) as caught:
            MODEL(ak.unflatten(objects(8), [2, 0, 6]), pool=pool)
        assert caught.value.model == "m"
        assert caught.value.events == (0, 3)


def test_what_is_wrong_is_not_masked(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    array = ak.zip({"pt": np.array([1, np.nan], np.float32)})
    with pool_of("grpc://s1:8001") as pool:
        with pytest.raises(errors.InputError, match="NaN"):
            MODEL(array, pool=pool, on_error="mask")
        with pytest.raises(errors.ConfigError, match="did you mean 'mask'"):
            MODEL(array, pool=pool, on_error="masked")
        one.behaviour = lambda _: errors.AccessError("no")
        with pytest.raises(errors.AccessError):
            MODEL(objects(3), pool=pool, on_error="mask")
        one.lacks = True
        with pytest.raises(errors.ModelNotFoundError):
            sonic.Model("other", MODEL.inputs, MODEL.outputs)(
                objects(3), pool=pool, on_error="mask"
            )


def test_overload_is_tried_again(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    refused = iter([True, False] * 5)

    def half(x: np.ndarray) -> Any:
        return errors.OverloadError("full") if next(refused, False) else 2 * x

    one.behaviour = half
    with pool_of("grpc://s1:8001", max_in_flight=1) as pool:
        assert doubled(MODEL(objects(20), pool=pool)) == list(range(20))
        assert pool.statistics.total().retries >= 1


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestError("no"),
        errors.AccessError("no"),
        errors.DeadlineError("no"),
    ],
)
def test_what_cannot_help_is_not_tried_again(
    servers: dict[str, FakeServer], error: errors.SonicError
) -> None:
    (one, two) = servers.values()
    one.behaviour = two.behaviour = lambda _: error
    with pool_of(*servers, max_in_flight=1) as pool:
        with pytest.raises(type(error), match="no"):
            MODEL(objects(3), pool=pool)
        assert len(one.requests) + len(two.requests) == 1


def test_a_model_that_is_unloaded_is_found_elsewhere(servers: dict[str, FakeServer]) -> None:
    (one, two) = servers.values()
    one.behaviour = lambda _: errors.ModelNotFoundError("unloaded")
    with pool_of(*servers) as pool:
        assert doubled(MODEL(objects(100), pool=pool)) == list(range(100))
        two.behaviour = lambda _: errors.ModelNotFoundError("unloaded")
        with pytest.raises(errors.ModelNotFoundError):
            MODEL(objects(100), pool=pool)
        one.lacks = two.lacks = True
        with pytest.raises(errors.ModelNotFoundError):
            MODEL(objects(100), pool=pool)


def test_thousands_of_requests_whose_model_is_gone_are_given_up(
    servers: dict[str, FakeServer],
) -> None:
    (one, _) = servers.values()
    one.gate.clear()
    one.behaviour = lambda _: errors.ModelNotFoundError("unloaded")
    with pool_of("grpc://s1:8001", max_in_flight=2) as pool:
        pending = MODEL.submit(objects(12_000), pool=pool, on_error="mask")
        until(lambda: one.out == 2)
        one.lacks = True
        one.gate.set()
        scores = pending.result(timeout_s=30)
        assert ak.all(ak.is_none(scores))
        assert pending.statistics.masked == 12_000
        with pytest.raises(errors.ModelNotFoundError):
            MODEL(objects(4), pool=pool, timeout_s=30)


def test_the_server_that_lost_rows_is_the_last_to_get_them_again() -> None:
    """Even if it is the only one that is idle."""
    idle, busy = (Endpoint(u, [FakeServer(u)], 8) for u in ("grpc://s1:8001", "grpc://s2:8001"))  # type: ignore[list-item]
    piece = Piece(SimpleNamespace(wanted=("m", None)), 0, 4, 16, 0)  # type: ignore[arg-type]
    for _ in range(3):
        busy.begin(piece, 0.0)
    assert choose(piece, [idle, busy], 0.0) is None  # nobody knows yet what they have
    for endpoint in (idle, busy):
        endpoint.has(("m", None), 0.0, there=True)
    assert choose(piece, [idle, busy], 0.0) is idle
    piece.last_server = idle.url
    assert choose(piece, [idle, busy], 0.0) is busy
    assert choose(piece, [idle], 0.0) is idle
    idle.has(("m", None), 0.0, there=False)
    assert choose(piece, [idle], 1.0) is None
    # Models can be loaded later; it is asked then.
    assert not idle.ask(("m", None), 1.0)
    assert idle.ask(("m", None), 100.0)
    assert not idle.ask(("m", None), 100.0)


def test_a_loss_among_answers_is_that_of_the_request() -> None:
    """As behind a balancer with a dead server; the second loss of the same rows is the server's."""
    endpoint = Endpoint("grpc://s1:8001", [FakeServer("grpc://s1:8001")], 8)  # type: ignore[list-item]
    call = SimpleNamespace(wanted=("m", None), contract=SimpleNamespace(max_rows=4))
    early, late = (Piece(call, 0, 4, 16, number) for number in (0, 1))  # type: ignore[arg-type]
    endpoint.has(call.wanted, 0.0, there=True)
    lost, answered = endpoint.begin(early, 1.0), endpoint.begin(late, 2.0)
    assert not endpoint.partly(lost)
    endpoint.answered(answered, 3.0)
    assert endpoint.partly(lost)
    early.attempts = 1
    assert not endpoint.partly(lost)
    early.attempts = 0
    endpoint.failed(errors.ServerLostError("gone"), 4.0)
    assert not endpoint.partly(lost)


def test_what_others_have_lost_counts_for_as_long_as_they_say_it(
    servers: dict[str, FakeServer],
) -> None:
    """An idle worker would have no patience with the same server an hour later."""
    wanted = ("m", None)
    with pool_of("grpc://s1:8001", fallback=lambda: "grpc://s2:8001") as pool:
        MODEL.check(pool)
        fleet = pool._fleet
        (endpoint,) = fleet.endpoints
        for now in (100.0, 101.5, 103.0, 104.5, 106.0):
            endpoint.spare(LOST, now + 2.0, now)
            # It is tried after a while, whatever others say.
            assert endpoint.away_until == min(now + 2.0, 105.0)
        assert fleet.falls_back_at(wanted, 107.0) == 100.0 + pool.settings.fallback_after_s
        # What was heard is not told as seen.
        assert not any(sight.circuit_open for sight in fleet.observe())
        assert endpoint.lost_since(107.0) == 100.0
        assert endpoint.lost_since(108.0) is None
        assert fleet.falls_back_at(wanted, 108.0) == float("inf")
        # Later, others lose it again, and have it back.
        endpoint.spare(LOST, 3602.0, 3600.0)
        assert endpoint.away_until == 3602.0
        endpoint.try_again(3601.0)
        assert endpoint.lost_since(3601.0) is None
        # Then this process does.
        endpoint.failed(LOST, 7200.0)
        assert endpoint.lost_since(7201.0) == 7200.0
        assert all(sight.circuit_open for sight in fleet.observe())
        endpoint.heard(7202.0)
        assert endpoint.lost_since(7202.0) is None


class Rows(list[int]):
    """Rows that are where they are wanted."""

    segments = ()

    def selection(self, start: int, stop: int) -> range:
        return range(start, stop)

    def events_of(self, start: int, stop: int) -> tuple[int, int]:
        return start, stop

    def pack(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {"x": np.asarray(self[start:stop])}


def test_a_piece_is_over_once() -> None:
    """Were one counted for another, the other's rows would be left out without a word."""
    placed: list[Any] = []
    place = SimpleNamespace(place=lambda wanted, *_: placed.append(wanted))
    contract = FakeServer("grpc://s1:8001").contract("m", None)
    call = Call(contract, Rows(range(12)), {"y": place}, ["y"], version=None, mask=True)
    first, second, third = (Piece(call, 4 * n, 4 * n + 4, 16, n) for n in range(3))
    answer = Answer(outputs={}, version="1", sent_bytes=0, received_bytes=0)
    call.expect(3)
    assert call.fail(LOST, first) == 4
    assert call.fail(LOST, first) == 0
    call.arrived(first, answer)
    call.arrived(second, answer)
    call.arrived(second, answer)
    assert call.fail(LOST, second) == 0
    assert not call.over
    call.arrived(third, answer)
    assert call.over
    assert placed == [range(4, 8), range(8, 12)]
    assert call.lost == [range(4)]
    assert call.statistics.masked == 4


def test_a_piece_that_is_lost_while_its_answer_is_put_in_its_place_is_over_once() -> None:
    """As when the slower of two servers fails at that moment."""
    contract = FakeServer("grpc://s1:8001").contract("m", None)
    place = SimpleNamespace(place=lambda *_: call.fail(LOST, first))
    call = Call(contract, Rows(range(8)), {"y": place}, ["y"], version=None, mask=True)
    first, second = (Piece(call, 4 * n, 4 * n + 4, 16, n) for n in range(2))
    call.expect(2)
    call.arrived(first, Answer(outputs={}, version="1", sent_bytes=0, received_bytes=0))
    assert not call.over
    assert call.lost == [range(4)]
    assert call.fail(LOST, second) == 4
    assert call.over


def test_a_share_that_ends_before_its_turn_holds_nobody(servers: dict[str, FakeServer]) -> None:
    """The scheduler has fallen silent: the worker goes by what it sees itself."""
    wanted = ("m", None)
    with pool_of("grpc://s1:8001") as pool:
        MODEL.check(pool)

        def allow(lasts_s: float) -> None:
            now = time.monotonic()
            share = Quota(1, 1000.0, turn_at=now + 900.0, expires_at=now + lasts_s)
            pool.set_quotas({("grpc://s1:8001", wanted): share}, [], lasts_s)

        allow(1000.0)
        pending = MODEL.submit(objects(4), pool=pool)
        until(lambda: pool.telemetry()[1] == {wanted: 1})
        allow(0.1)
        assert doubled(pending.result(timeout_s=20)) == list(range(4))
