"""The pool against servers that fail when they are told to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.contract import Contract, TensorSpec
from sonic_coffea.pool import Pool, Settings, Share
from sonic_coffea.pool._call import Call, Piece
from sonic_coffea.pool._endpoint import Endpoint, choose
from sonic_coffea.pool._settings import read_servers
from sonic_coffea.transport import Address, Answer

if TYPE_CHECKING:
    from pathlib import Path

MODEL = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": [f"v{i}" for i in range(1)]})
Behaviour = Callable[[np.ndarray], Any]


class FakeExchange:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class FakeServer:
    """Answers ``y = 2 x`` on a thread of its own, or what `behaviour` says."""

    def __init__(self, url: str, *, max_rows: int | None = 4) -> None:
        self.address = Address.parse(url)
        self.max_rows = max_rows
        self.behaviour: Behaviour = lambda x: 2 * x
        self.gate = threading.Event()
        self.gate.set()
        self.lacks = False
        self.requests: list[np.ndarray] = []
        self.exchanges: list[FakeExchange] = []
        self.out = self.most_out = 0
        self.out_bytes = self.most_bytes = 0
        self.width = 1
        self.outputs: tuple[str, ...] = ("y",)
        self.closed = False
        self.lives = True
        self.asked = 0
        self._lock = threading.Lock()

    def contract(self, model: str, version: str | None) -> Contract:
        if self.lacks:
            raise errors.ModelNotFoundError("no such model", server=str(self.address))
        x = TensorSpec(name="x", datatype="FP32", shape=(1,))
        outputs = tuple(
            TensorSpec(name=name, datatype="FP32", shape=(self.width,)) for name in self.outputs
        )
        return Contract(
            model=model,
            version=version or "1",
            inputs=(x,),
            outputs=outputs,
            max_rows=self.max_rows,
        )

    def infer(
        self, contract: Contract, inputs: Mapping[str, np.ndarray], outputs: Any, **options: Any
    ) -> FakeExchange:
        x = inputs["x"].copy()
        exchange = FakeExchange()
        with self._lock:
            self.requests.append(x)
            self.exchanges.append(exchange)
            self.out += 1
            self.out_bytes += x.nbytes
            self.most_out = max(self.most_out, self.out)
            self.most_bytes = max(self.most_bytes, self.out_bytes)
        arguments = (x, exchange, options["done"])
        threading.Thread(target=self._answer, args=arguments, daemon=True).start()
        return exchange

    def _answer(self, x: np.ndarray, exchange: FakeExchange, done: Any) -> None:
        while not self.gate.wait(0.01):
            if exchange.cancelled.is_set():
                break
        cancelled = exchange.cancelled.is_set()
        answer = errors.CancelledError("cancelled") if cancelled else self.behaviour(x)
        with self._lock:
            self.out -= 1
            self.out_bytes -= x.nbytes
        if isinstance(answer, errors.SonicError):
            done(answer.at(server=str(self.address)))
            return
        outputs = answer if isinstance(answer, dict) else {"y": answer}
        done(Answer(outputs=outputs, version="1", sent_bytes=x.nbytes, received_bytes=8))

    def live(self, done: Any) -> None:
        self.asked += 1
        lives = self.lives
        threading.Thread(target=done, args=(None if lives else LOST,), daemon=True).start()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeServer]]:
    fakes = {f"grpc://s{i}:8001": FakeServer(f"grpc://s{i}:8001") for i in (1, 2)}
    monkeypatch.setattr(
        "sonic_coffea.pool._fleet.connect_transport", lambda url, **_: fakes[str(url)]
    )
    yield fakes
    for fake in fakes.values():
        fake.gate.set()


def pool_of(*urls: str, **options: Any) -> Pool:
    return Pool(Settings.make(urls, **options))


def objects(n: int) -> ak.Array:
    return ak.zip({"pt": np.arange(n, dtype=np.float32)})


def doubled(scores: ak.Array) -> list[float]:
    return (scores.v0 / 2).tolist()


def inferred(x: np.ndarray) -> np.ndarray:
    """Double, in a server's time."""
    time.sleep(0.01)
    return 2 * x


LOST = errors.ServerLostError("the connection to the server was lost: gone")


def test_many_small_requests_come_back_in_order(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    with pool_of("grpc://s1:8001") as pool:
        assert doubled(MODEL(objects(1001), pool=pool)) == list(range(1001))
    sizes = [len(r) for r in one.requests]
    assert sizes == [4] * 250 + [1]
    assert np.concatenate(one.requests).ravel().tolist() == list(range(1001))


def test_in_flight_is_bounded_in_number(servers: dict[str, FakeServer]) -> None:
    (one, two) = servers.values()
    one.gate.clear()
    two.gate.clear()
    with pool_of(*servers, in_flight=3) as pool:
        pending = MODEL.submit(objects(400), pool=pool)
        until(lambda: one.out == two.out == 3)
        one.gate.set()
        two.gate.set()
        assert doubled(pending.result(timeout_s=30)) == list(range(400))
    assert one.most_out == two.most_out == 3


def test_in_flight_is_bounded_in_bytes(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.gate.clear()
    with pool_of("grpc://s1:8001", in_flight=50, in_flight_bytes=40) as pool:
        pending = MODEL.submit(objects(400), pool=pool)
        until(lambda: one.out_bytes == 32)  # two requests of four float32; a third is too much
        one.gate.set()
        assert doubled(pending.result(timeout_s=30)) == list(range(400))
    assert one.most_bytes == 32


def test_a_request_larger_than_the_budget_travels_alone(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    with pool_of("grpc://s1:8001", in_flight_bytes=10) as pool:
        assert doubled(MODEL(objects(40), pool=pool)) == list(range(40))
    assert one.most_out == 1


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
    with pool_of("grpc://s1:8001", retry_for_s=0.5) as pool:
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
        assert len(one.requests) - before <= pool.settings.in_flight


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


def test_the_first_question_is_asked_again(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    answer = one.contract
    failures = iter([LOST, errors.OverloadError("busy")])

    def contract(model: str, version: str | None) -> Contract:
        for failure in failures:
            raise failure
        return answer(model, version)

    one.contract = contract  # type: ignore[method-assign]
    with pool_of("grpc://s1:8001") as pool:
        assert doubled(MODEL(objects(5), pool=pool)) == list(range(5))
        assert pool.servers[0].usable


def test_nobody_is_asked_for_ever(servers: dict[str, FakeServer]) -> None:
    asked = []

    def contract(model: str, version: str | None) -> Contract:
        asked.append(model)
        raise LOST

    for one in servers.values():
        one.contract = contract  # type: ignore[method-assign]
    with pool_of(*servers, retry_for_s=0.3) as pool:
        with pytest.raises(errors.ServerLostError):
            MODEL(objects(5), pool=pool)
        first = len(asked)
        assert first > 2
        # A runner that tries again learns at once that they are still gone.
        with pytest.raises(errors.ServerLostError):
            MODEL(objects(5), pool=pool)
        assert len(asked) == first + 2


def test_the_strictest_server_sets_the_limit(servers: dict[str, FakeServer]) -> None:
    one, two = servers.values()
    one.max_rows, two.max_rows = 7, 3
    with pool_of(*servers) as pool:
        assert doubled(MODEL(objects(50), pool=pool)) == list(range(50))
    assert max(len(r) for r in one.requests + two.requests) == 3


def test_servers_with_different_models_of_a_name_are_refused(
    servers: dict[str, FakeServer],
) -> None:
    _one, two = servers.values()
    two.width = 2
    with (
        pool_of(*servers) as pool,
        pytest.raises(errors.ContractError, match="different models of this name"),
    ):
        MODEL(objects(5), pool=pool)


def test_a_server_that_does_not_say_what_it_has_holds_up_nobody(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = servers.values()
    released = threading.Event()

    def contract(model: str, version: str | None) -> Contract:
        released.wait(60)
        raise LOST

    one.contract = contract  # type: ignore[method-assign]
    monkeypatch.setattr("sonic_coffea.pool._discovery._OTHERS_S", 0.05)
    with pool_of(*servers) as pool:
        assert doubled(MODEL(objects(50), pool=pool)) == list(range(50))
    released.set()


@pytest.fixture
def slow(servers: dict[str, FakeServer]) -> Iterator[SimpleNamespace]:
    """What of a model is asked of the first server, which does not say until it is released."""
    (one, _) = servers.values()
    answer, asked, released = one.contract, [], threading.Event()

    def contract(model: str, version: str | None) -> Contract:
        asked.append(model)
        if model == "slow":
            released.wait(60)
        return answer(model, version)

    one.contract = contract  # type: ignore[method-assign]
    yield SimpleNamespace(asked=asked, released=released)
    released.set()


SLOW = sonic.Model("slow", MODEL.inputs, MODEL.outputs)


def soon(call: Callable[[], Any]) -> Any:
    """Return what a call gives, unless it takes too long."""
    found: list[Any] = []
    threading.Thread(target=lambda: found.append(call()), daemon=True).start()
    until(lambda: bool(found))
    return found[0]


def test_a_model_does_not_wait_for_what_is_asked_about_another(slow: SimpleNamespace) -> None:
    third = sonic.Model("third", MODEL.inputs, MODEL.outputs)
    with pool_of("grpc://s1:8001") as pool:
        MODEL.check(pool)
        checked: list[Any] = []
        threads = [
            threading.Thread(target=lambda: checked.append(SLOW.check(pool))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        until(lambda: "slow" in slow.asked)
        for model in (MODEL, third):
            assert doubled(soon(lambda model=model: model(objects(4), pool=pool))) == [0, 1, 2, 3]
        slow.released.set()
        for thread in threads:
            thread.join()
        assert len(checked) == 4
        assert slow.asked.count("slow") == 1


@pytest.mark.parametrize("on_error", ["raise", "mask"])
def test_the_deadline_is_that_of_the_whole_call(slow: SimpleNamespace, on_error: str) -> None:
    with pool_of("grpc://s1:8001") as pool:

        def late() -> Any:
            with pytest.raises(errors.DeadlineError, match=r"within 0.05 s.*model slow") as caught:
                SLOW(objects(4), pool=pool, timeout_s=0.05, on_error=on_error)
            return caught.value

        assert soon(late)
        # Also of one who waits for what another asks.
        waiting = threading.Thread(target=lambda: SLOW.check(pool))
        waiting.start()
        until(lambda: len(slow.asked) == 2)
        assert soon(late)
        assert len(slow.asked) == 2
        slow.released.set()
        waiting.join()
        assert doubled(SLOW(objects(4), pool=pool, timeout_s=20)) == list(range(4))


def test_the_deadline_is_over_before_lost_servers_are_given_up(
    servers: dict[str, FakeServer],
) -> None:
    (one, _) = servers.values()

    def lost(*_: Any) -> Any:
        raise LOST

    one.contract = lost  # type: ignore[method-assign]
    variations = sonic.Variations(up=objects(2), down=objects(3))
    with (
        pool_of("grpc://s1:8001", retry_for_s=600) as pool,
        pytest.raises(errors.DeadlineError, match=r"within 0.05 s.*gone.*model m"),
    ):
        MODEL(variations, pool=pool, timeout_s=0.05)


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
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(objects(400), pool=pool)
        until(lambda: len(one.requests) > 4 and not one.out)
        one.most_out = 0
        until(lambda: len(one.requests) > 7)
        assert one.most_out == 1
        one.behaviour = inferred
        assert doubled(pending.result()) == list(range(400))
        assert one.most_out > 1


def test_the_number_in_flight_grows_while_answers_are_fast(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.behaviour = inferred
    with pool_of("grpc://s1:8001") as pool:
        MODEL(objects(800), pool=pool)
    assert one.most_out > 4


def refuses(*rows: int) -> Behaviour:
    """Fail requests that hold one of these rows."""

    def behave(x: np.ndarray) -> Any:
        if set(x.ravel().astype(int)) & set(rows):
            return errors.RequestError("out of memory")
        return 2 * x

    return behave


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
        assert pending.statistics.lost == pool.statistics.lost == 7
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
    with pool_of("grpc://s1:8001", retry_for_s=0.1) as pool:
        pending = MODEL.submit(objects(8), pool=pool, on_error="mask")
        assert pending.result().tolist() == [None] * 8
        assert str(pending.result().type) == "8 * ?{v0: float32}"
        assert pending.statistics.lost == 8
        hint = r"\(sonic-coffea check grpc://s1:8001 m tries it step by step\)"
        with pytest.raises(errors.ServerLostError, match=hint):
            MODEL(objects(8), pool=pool)


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


def test_idle_servers_take_turns(servers: dict[str, FakeServer]) -> None:
    with pool_of(*servers) as pool:
        for _ in range(6):
            MODEL(objects(1), pool=pool)
    assert [len(s.requests) for s in servers.values()] == [3, 3]


def test_overload_is_tried_again(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    refused = iter([True, False] * 5)

    def half(x: np.ndarray) -> Any:
        return errors.OverloadError("full") if next(refused, False) else 2 * x

    one.behaviour = half
    with pool_of("grpc://s1:8001", in_flight=1) as pool:
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
    with pool_of(*servers, in_flight=1) as pool:
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
    with pool_of("grpc://s1:8001", in_flight=2) as pool:
        pending = MODEL.submit(objects(12_000), pool=pool, on_error="mask")
        until(lambda: one.out == 2)
        one.lacks = True
        one.gate.set()
        scores = pending.result(timeout_s=30)
        assert ak.all(ak.is_none(scores))
        assert pending.statistics.lost == 12_000
        with pytest.raises(errors.ModelNotFoundError):
            MODEL(objects(4), pool=pool, timeout_s=30)


def test_what_goes_wrong_in_the_pool_itself_fails_what_waits(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: neither are rows lost without a word, nor does a later call hang."""
    real, wrong = choose, iter([True])

    def broken(*given: Any, **options: Any) -> Endpoint | None:
        if next(wrong, False):
            raise ZeroDivisionError
        return real(*given, **options)

    monkeypatch.setattr("sonic_coffea.pool._dispatcher.choose", broken)
    with pool_of(*servers) as pool:
        pending = MODEL.submit(objects(40), pool=pool, on_error="mask")
        with pytest.raises(errors.SonicError, match=r"ZeroDivisionError.*model m"):
            pending.result(timeout_s=20)
        assert doubled(MODEL(objects(40), pool=pool, timeout_s=20)) == list(range(40))


def test_a_request_that_was_about_to_leave_fails_with_the_pool(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(*servers) as pool:
        real, wrong = Endpoint.begin, iter([True])

        def broken(*given: Any) -> Any:
            attempt = real(*given)
            if next(wrong, False):
                raise ZeroDivisionError
            return attempt

        monkeypatch.setattr(Endpoint, "begin", broken)
        pending = MODEL.submit(objects(4), pool=pool)
        with pytest.raises(errors.SonicError, match="ZeroDivisionError"):
            pending.result(timeout_s=20)
        assert all(s.in_flight == 0 for s in pool.servers)
        assert doubled(MODEL(objects(40), pool=pool, timeout_s=20)) == list(range(40))


def test_a_server_without_the_model_is_passed_over(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.lacks = True
    with pool_of(*servers) as pool:
        assert doubled(MODEL(objects(10), pool=pool)) == list(range(10))
    assert one.requests == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x[:-1], "came back with shape .* for 4 rows"),
        (lambda x: {"z": x}, "the answer lacks output 'y'; it has z"),
        (lambda x: np.hstack([x, x]), "expected 1 values for labels v0"),
    ],
)
def test_wrong_answers_are_refused(
    servers: dict[str, FakeServer], answer: Behaviour, message: str
) -> None:
    (one, _) = servers.values()
    one.behaviour = answer
    with pool_of("grpc://s1:8001") as pool, pytest.raises(errors.ResponseError, match=message):
        MODEL(objects(8), pool=pool)


def test_an_answer_that_cannot_be_taken_is_an_error(servers: dict[str, FakeServer]) -> None:
    """Whatever goes wrong on the connection's thread, nobody waits for ever."""
    (one, _) = servers.values()
    one.behaviour = lambda _: {"y": None}
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(objects(8), pool=pool)
        with pytest.raises(errors.ResponseError, match="NoneType") as caught:
            pending.result(timeout_s=10)
        assert caught.value.server == "grpc://s1:8001"
        until(lambda: all(s.in_flight == 0 for s in pool.servers))


def test_an_input_that_cannot_be_packed_names_its_event(servers: dict[str, FakeServer]) -> None:
    with (
        pool_of("grpc://s1:8001") as pool,
        pytest.raises(errors.InputError, match="NaN or infinite in event 6"),
    ):
        MODEL(ak.zip({"pt": [0.0] * 6 + [np.nan]}), pool=pool)


def test_cancel(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.gate.clear()
    with pool_of("grpc://s1:8001", in_flight=2) as pool:
        pending = MODEL.submit(objects(100), pool=pool)
        other = MODEL.submit(objects(4), pool=pool)
        pending.cancel()
        with pytest.raises(errors.CancelledError):
            pending.result()
        one.gate.set()
        assert doubled(other.result(timeout_s=30)) == [0, 1, 2, 3]
    assert len(one.requests) <= 4  # the rest of the cancelled call never left
    assert pending.done()


def test_deadline_cancels_what_is_out(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.gate.clear()
    with pool_of("grpc://s1:8001") as pool:
        pending = MODEL.submit(objects(8), pool=pool)
        until(lambda: bool(one.exchanges))
        with pytest.raises(errors.DeadlineError, match="within 0.2 s"):
            pending.result(timeout_s=0.2)
        assert all(e.cancelled.wait(20) for e in one.exchanges)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_ctrl_c_cancels_what_is_out(
    servers: dict[str, FakeServer],
    timeout_s: float | None,
    interrupts: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (one, _) = servers.values()
    one.gate.clear()
    with pool_of("grpc://s1:8001", in_flight=4) as pool:
        pending = MODEL.submit(objects(100), pool=pool)
        until(lambda: one.out == pool.settings.in_flight)
        (call,) = (part.call for part in pending.parts)
        assert call is not None
        wait, waiting = call.wait, threading.Event()

        def noticed(timeout_s: float | None) -> bool:
            waiting.set()
            return wait(timeout_s)

        monkeypatch.setattr(call, "wait", noticed)
        thread = threading.Thread(target=lambda: waiting.wait(30) and interrupts())
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pending.result(timeout_s)
        thread.join()
        assert pending.done()
        assert all(e.cancelled.wait(20) for e in one.exchanges)
        assert len(one.requests) == pool.settings.in_flight
        one.gate.set()
        assert doubled(MODEL(objects(3), pool=pool)) == [0, 1, 2]


def test_close_is_final_idempotent_and_leaves_nothing(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    before = threading.active_count()
    one.gate.clear()
    pool = pool_of("grpc://s1:8001")
    pending = MODEL.submit(objects(100), pool=pool)
    pool.close()
    pool.close()
    assert one.closed
    with pytest.raises(errors.CancelledError):
        pending.result(timeout_s=5)
    with pytest.raises(errors.ServerLostError, match="has been closed"):
        MODEL(objects(1), pool=pool)
    one.gate.set()
    until(lambda: threading.active_count() <= before)


def test_a_call_that_comes_as_the_pool_is_closed(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(*servers) as pool:
        MODEL(objects(4), pool=pool)
        submit = pool._dispatcher.submit

        def late(*given: Any) -> None:
            pool.close()
            submit(*given)

        monkeypatch.setattr(pool._dispatcher, "submit", late)
        with pytest.raises(errors.ServerLostError, match="has been closed"):
            MODEL(objects(4), pool=pool, timeout_s=20)


def test_what_cannot_be_sent_as_the_pool_is_closed_is_cancelled(
    servers: dict[str, FakeServer],
) -> None:
    """The servers have not lost it, so that it is an error also where losses are None."""
    (one, _) = servers.values()
    pool = pool_of("grpc://s1:8001")

    def infer(*_: Any, **__: Any) -> Any:
        pool.close()
        raise ValueError("a closed channel")

    one.infer = infer  # type: ignore[method-assign]
    with pytest.raises(errors.CancelledError):
        MODEL(objects(4), pool=pool, timeout_s=20, on_error="mask")


def test_a_system_without_threads_for_a_moment(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(*servers) as pool:
        MODEL.check(pool)
        real, wrong = threading.Thread.start, iter([True])

        def start(thread: threading.Thread) -> None:
            if thread.name == "sonic-pool" and next(wrong, False):
                raise RuntimeError
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            MODEL.submit(objects(4), pool=pool)
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))


def test_calls_share_the_pool(servers: dict[str, FakeServer]) -> None:
    with pool_of(*servers) as pool:
        pending = [MODEL.submit(objects(n), pool=pool) for n in (100, 1, 57)]
        for one, n in zip(pending, (100, 1, 57), strict=True):
            assert doubled(one.result(timeout_s=30)) == list(range(n))
        each = sonic.statistics.Statistics()
        for one in pending:
            each += one.statistics
        whole, parts = pool.statistics.total(), each.total()
        assert (whole.rows, whole.requests) == (parts.rows, parts.requests) == (158, 41)
        assert whole.latencies.sum() == 41


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
        assert not any(sight.lost for sight in fleet.observe())
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
        assert all(sight.lost for sight in fleet.observe())
        endpoint.heard(7202.0)
        assert endpoint.lost_since(7202.0) is None


def test_servers_are_changed_while_rows_are_out(servers: dict[str, FakeServer]) -> None:
    one, two = servers.values()
    one.gate.clear()
    with pool_of(str(one.address), in_flight=2) as pool:
        pending = MODEL.submit(objects(40), pool=pool)
        until(lambda: one.out == 2)
        pool.use(str(two.address))
        until(lambda: len(two.requests) == 8)
        assert [s.url for s in pool.servers] == [str(two.address)]
        assert not one.closed
        one.gate.set()
        assert doubled(pending.result()) == list(range(40))
        until(lambda: one.closed)
        assert len(one.requests) == 2
        assert doubled(MODEL(objects(40), pool=pool)) == list(range(40))
        with pytest.raises(errors.ConfigError, match="did you mean 'grpc://s1:8001'"):
            pool.use("s1:8001")


def written(path: Path, text: str | bytes) -> None:
    """Write a file at once, later than it was written before."""
    at = path.stat().st_mtime_ns if path.exists() else 0
    new = path.with_suffix(".new")
    new.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(new, ns=(at + 10**9, at + 10**9))
    new.replace(path)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of servers, which is looked at often."""
    monkeypatch.setattr("sonic_coffea.pool._fleet._LOOK_S", 0.001)
    path = tmp_path / "servers.txt"
    written(path, "grpc://s1:8001\n")
    return path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"# caf\xe9\ngrpc://s2:8001\n", "can't decode byte 0xe9"),
        ("s2:8001\n", "did you mean 'grpc://s2:8001'"),
        ("grpc://s2:8001\ngrpc://s3:8001\n", "certificate is gone"),
    ],
)
def test_a_file_of_servers_that_cannot_be_used_changes_nothing(
    servers: dict[str, FakeServer],
    listed: Path,
    text: str | bytes,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, two = servers.values()
    reads = []

    def connect(url: str, **_: Any) -> FakeServer:
        if url not in servers:
            raise OSError("the certificate is gone")
        return servers[url]

    def read(path: str) -> tuple[str, ...]:
        reads.append(path)
        return read_servers(path)

    monkeypatch.setattr("sonic_coffea.pool._fleet.connect_transport", connect)
    monkeypatch.setattr("sonic_coffea.pool._fleet.read_servers", read)

    def scored() -> bool:
        return doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))

    with Pool(Settings.make(listed)) as pool:
        until(lambda: scored() and len(reads) == 1)
        written(listed, text)
        until(lambda: scored() and len(reads) > 4)
        said = [r.getMessage() for r in caplog.records if "stay as they are" in r.getMessage()]
        assert len(said) == 1
        assert str(listed) in said[0]
        assert reason in said[0]
        assert pool.settings.servers == ("grpc://s1:8001",)
        assert [s.url for s in pool.servers] == ["grpc://s1:8001"]
        assert not two.requests
        assert two.closed == ("s3" in str(text))  # it was connected, and is let go of
        written(listed, "grpc://s2:8001\n")
        until(lambda: scored() and bool(two.requests))
        assert pool.settings.servers == ("grpc://s2:8001",)


def test_a_file_of_servers_that_cannot_be_reached_holds_up_nobody(
    servers: dict[str, FakeServer], listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, reading = threading.Event(), threading.Event()

    def read(_: str) -> tuple[str, ...]:
        reading.set()
        released.wait(60)
        return ("grpc://s1:8001",)

    with Pool(Settings.make(listed)) as pool:
        monkeypatch.setattr("sonic_coffea.pool._fleet.read_servers", read)
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))
        assert reading.wait(20)
        assert pool.observe()[1] == {("m", None): 0}
        assert doubled(MODEL(objects(4), pool=pool, timeout_s=20)) == list(range(4))
        released.set()


def test_a_file_of_servers_that_changed_before_the_first_call(
    servers: dict[str, FakeServer], listed: Path
) -> None:
    _, two = servers.values()
    with Pool(Settings.make(listed)) as pool:
        written(listed, "grpc://s2:8001\n")
        until(lambda: len(MODEL(objects(4), pool=pool)) == 4 and bool(two.requests))


def test_a_server_that_is_taken_in_must_have_the_same_model(
    servers: dict[str, FakeServer],
) -> None:
    one, two = servers.values()
    one.behaviour = inferred
    two.width = 2
    with pool_of(str(one.address)) as pool:
        pending = MODEL.submit(objects(400), pool=pool)
        pool.use(list(servers))
        assert doubled(pending.result()) == list(range(400))
        assert two.requests == []
        with pytest.raises(errors.ContractError, match="different models"):
            MODEL(objects(3), pool=pool)


def test_a_server_that_returns_with_another_model_gets_no_rows(
    servers: dict[str, FakeServer],
) -> None:
    one, two = servers.values()
    two.gate.clear()

    def replaced(_: np.ndarray) -> Any:
        one.width = 2
        one.behaviour = lambda x: np.hstack([x, x])
        two.gate.set()
        return LOST

    one.behaviour = replaced
    with pool_of(*servers, in_flight=1) as pool:
        assert doubled(MODEL(objects(200), pool=pool)) == list(range(200))
    assert sum(len(x) for x in two.requests) == 200


def test_what_a_returning_server_refuses_is_said(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()

    def locked(model: str, version: str | None) -> Contract:
        raise errors.AccessError("another token, please", server="grpc://s1:8001")

    def lost(_: np.ndarray) -> Any:
        one.contract = locked  # type: ignore[method-assign]
        return LOST

    one.behaviour = lost
    with (
        pool_of("grpc://s1:8001", retry_for_s=60) as pool,
        pytest.raises(errors.AccessError, match=r"another token.*server grpc://s1:8001, model m"),
    ):
        MODEL(objects(20), pool=pool)


def test_an_ordered_list_is_used_in_its_order(servers: dict[str, FakeServer]) -> None:
    one, two = servers.values()
    one.behaviour = inferred
    with pool_of(str(two.address), str(one.address), balance="order") as pool:
        assert doubled(MODEL(objects(100), pool=pool)) == list(range(100))
        assert one.requests == []
        two.behaviour = lambda _: LOST
        assert doubled(MODEL(objects(100), pool=pool)) == list(range(100))
        assert sum(len(x) for x in one.requests) == 100


def test_a_straggler_is_sent_to_another_server(servers: dict[str, FakeServer]) -> None:
    one, two = servers.values()
    one.gate.clear()
    with pool_of(*servers, hedge_after_s=0.05) as pool:
        assert doubled(MODEL(objects(40), pool=pool)) == list(range(40))
        assert one.requests
        until(lambda: all(e.cancelled.is_set() for e in one.exchanges))
        assert pool.statistics.total().rows == 40
        assert sum(len(x) for x in two.requests) == 40
        assert doubled(MODEL(objects(4), pool=pool)) == list(range(4))


def test_nothing_is_sent_twice_unless_asked(servers: dict[str, FakeServer]) -> None:
    one, two = servers.values()
    one.behaviour = two.behaviour = inferred
    with pool_of(*servers) as pool:
        MODEL(objects(100), pool=pool)
    assert sum(len(x) for x in one.requests + two.requests) == 100


def test_a_failure_of_the_slower_of_two_is_nothing(servers: dict[str, FakeServer]) -> None:
    one, two = servers.values()
    sent = threading.Event()

    def slow(x: np.ndarray) -> Any:
        sent.wait(20)
        return 2 * x

    one.behaviour = slow
    two.behaviour = lambda _: (sent.set(), LOST)[1]
    with pool_of(*servers, hedge_after_s=0.01, balance="order") as pool:
        assert doubled(MODEL(objects(4), pool=pool)) == list(range(4))
        assert len(one.requests) == 1


def test_a_straggler_that_cannot_be_sent_again_is_waited_for(
    servers: dict[str, FakeServer],
) -> None:
    one, two = servers.values()
    one.gate.clear()
    tries: list[float] = []

    def infer(*_: Any, **__: Any) -> Any:
        tries.append(time.monotonic())
        raise MemoryError

    two.infer = infer  # type: ignore[method-assign]
    with pool_of(*servers, hedge_after_s=0.02, balance="order") as pool:
        MODEL.check(pool)
        begun = time.monotonic()
        pending = MODEL.submit(objects(4), pool=pool, on_error="mask")
        until(lambda: len(tries) > 2)
        one.gate.set()
        assert doubled(pending.result(timeout_s=20)) == list(range(4))
        assert pending.statistics.lost == pool.statistics.lost == 0
        assert pending.statistics.total().failures == len(tries)
        # It is tried again at its pace only.
        assert all(at - begun >= 0.02 * n for n, at in enumerate(tries, start=1))


class Rows(list[int]):
    """Rows that are where they are wanted."""

    segments = ()

    def wanted(self, start: int, stop: int) -> range:
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
    assert call.statistics.lost == 4


def test_a_share_that_ends_before_its_turn_holds_nobody(servers: dict[str, FakeServer]) -> None:
    """The scheduler has fallen silent: the worker goes by what it sees itself."""
    wanted = ("m", None)
    with pool_of("grpc://s1:8001") as pool:
        MODEL.check(pool)

        def allow(lasts_s: float) -> None:
            now = time.monotonic()
            share = Share(most=1, every_s=1000.0, turn_at=now + 900.0, until=now + lasts_s)
            pool.allow({("grpc://s1:8001", wanted): share}, [], lasts_s)

        allow(1000.0)
        pending = MODEL.submit(objects(4), pool=pool)
        until(lambda: pool.observe()[1] == {wanted: 1})
        allow(0.1)
        assert doubled(pending.result(timeout_s=20)) == list(range(4))


def test_a_fallback_that_is_lost_as_well_is_started_again_once(
    servers: dict[str, FakeServer],
) -> None:
    started = []

    def fallback() -> str:
        started.append(True)
        return "grpc://s2:8001"

    def lost(*_: Any) -> Any:
        raise LOST

    options = {"fallback": fallback, "fallback_after_s": 0.1, "retry_for_s": 0.3}
    with pool_of("grpc://s1:8001", **options) as pool:
        MODEL.check(pool)
        for one in servers.values():
            one.behaviour = lambda _: LOST
            one.contract = lost  # type: ignore[method-assign]
        with pytest.raises(errors.ServerLostError, match="gone"):
            MODEL(objects(4), pool=pool, timeout_s=30)
        assert len(started) == 2


def test_a_fallback_without_the_model_is_one_clear_error(servers: dict[str, FakeServer]) -> None:
    one, two = servers.values()
    one.lacks = two.lacks = True
    with pool_of("grpc://s1:8001", fallback=lambda: "grpc://s2:8001") as pool:
        found: list[Any] = []

        def ask() -> None:
            with pytest.raises(errors.ModelNotFoundError) as caught:
                MODEL.check(pool)
            found.append(caught.value)

        threading.Thread(target=ask, daemon=True).start()
        until(lambda: bool(found))


@pytest.mark.parametrize("error", [errors.ConfigError("no certificate"), SystemExit(3)])
def test_a_fallback_that_cannot_be_connected_is_not_waited_for(
    servers: dict[str, FakeServer], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = servers.values()

    def connect(url: str, **_: Any) -> FakeServer:
        if url not in servers:
            raise error
        return servers[url]

    monkeypatch.setattr("sonic_coffea.pool._fleet.connect_transport", connect)
    options = {"fallback": lambda: "grpc://s3:8001", "fallback_after_s": 0.1, "retry_for_s": 0.3}
    with pool_of("grpc://s1:8001", **options) as pool:
        MODEL.check(pool)
        one.behaviour = lambda _: LOST
        with pytest.raises(errors.ServerLostError, match="gone"):
            MODEL(objects(4), pool=pool, timeout_s=30)


def test_who_waits_for_a_contract_hears_that_the_pool_is_closed(
    servers: dict[str, FakeServer],
) -> None:
    pool = pool_of(*servers)
    pool.wait_for_turn(3600)
    waiting, found = threading.Event(), []
    pool._lock.wait_for = lambda *_: waiting.set() or wait_for(*_)  # type: ignore[method-assign]

    def ask() -> None:
        with pytest.raises(errors.ServerLostError, match="closed") as caught:
            MODEL.check(pool)
        found.append(caught.value)

    wait_for = threading.Condition.wait_for.__get__(pool._lock)
    threading.Thread(target=ask, daemon=True).start()
    assert waiting.wait(20)
    pool._fleet.close()
    until(lambda: bool(found))
    pool.close()


def test_states(servers: dict[str, FakeServer]) -> None:
    (one, _) = servers.values()
    one.behaviour = lambda _: LOST
    with pool_of(*servers) as pool:
        MODEL(objects(40), pool=pool)
        states = {s.url: s for s in pool.servers}
        assert states["grpc://s1:8001"].last_error is not None
        assert states["grpc://s2:8001"].usable
        assert "s1" in repr(pool)
