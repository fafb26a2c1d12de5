"""The contract that a pool requests before it sends rows, and how long it waits for that."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.pool.scripted import LOST, MODEL, ScriptedServer, doubled, objects, pool_of
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sonic_coffea.transport import Contract


def test_the_first_question_is_asked_again(servers: dict[str, ScriptedServer]) -> None:
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


def test_nobody_is_asked_for_ever(servers: dict[str, ScriptedServer]) -> None:
    asked = []

    def contract(model: str, version: str | None) -> Contract:
        asked.append(model)
        raise LOST

    for one in servers.values():
        one.contract = contract  # type: ignore[method-assign]
    with pool_of(*servers, retry_timeout_s=0.3) as pool:
        with pytest.raises(errors.ServerLostError):
            MODEL(objects(5), pool=pool)
        first = len(asked)
        assert first > 2
        # A runner that tries again learns at once that they are still gone.
        with pytest.raises(errors.ServerLostError):
            MODEL(objects(5), pool=pool)
        assert len(asked) == first + 2


def test_the_strictest_server_sets_the_limit(servers: dict[str, ScriptedServer]) -> None:
    one, two = servers.values()
    one.max_rows, two.max_rows = 7, 3
    with pool_of(*servers) as pool:
        assert doubled(MODEL(objects(50), pool=pool)) == list(range(50))
    assert max(len(r) for r in one.requests + two.requests) == 3


def test_servers_with_different_models_of_a_name_are_refused(
    servers: dict[str, ScriptedServer],
) -> None:
    _one, two = servers.values()
    two.width = 2
    with (
        pool_of(*servers) as pool,
        pytest.raises(errors.ContractError, match="different models of this name"),
    ):
        MODEL(objects(5), pool=pool)


@pytest.fixture
def slow(servers: dict[str, ScriptedServer]) -> Iterator[SimpleNamespace]:
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
        # Also of one who waits for what another asks: the server is asked once.
        waiting = threading.Thread(target=lambda: SLOW.check(pool))
        waiting.start()
        assert soon(late)
        assert slow.asked.count("slow") == 1
        slow.released.set()
        waiting.join()
        assert doubled(SLOW(objects(4), pool=pool, timeout_s=20)) == list(range(4))


def test_the_deadline_is_over_before_lost_servers_are_given_up(
    servers: dict[str, ScriptedServer],
) -> None:
    (one, _) = servers.values()

    def lost(*_: Any) -> Any:
        raise LOST

    variations = sonic.Variations(up=objects(2), down=objects(3))
    with pool_of("grpc://s1:8001") as pool:
        MODEL(variations, pool=pool)  # kernels are compiled by now
    one.contract = lost  # type: ignore[method-assign]
    with (
        pool_of("grpc://s1:8001", retry_timeout_s=600) as pool,
        pytest.raises(errors.DeadlineError, match=r"within 2 s.*gone.*model m"),
    ):
        MODEL(variations, pool=pool, timeout_s=2)


def test_why_servers_were_asked_again_is_told_when_the_time_is_over(
    servers: dict[str, ScriptedServer],
) -> None:
    (one, _) = servers.values()
    asked, released = [], threading.Event()

    def lost_then_slow(*_: Any) -> Any:
        asked.append(None)
        if len(asked) > 1:
            released.wait(60)
        raise LOST

    one.contract = lost_then_slow  # type: ignore[method-assign]
    with pool_of("grpc://s1:8001", retry_timeout_s=600) as pool:
        with pytest.raises(errors.DeadlineError, match=r"within 2 s.*gone"):
            MODEL(objects(4), pool=pool, timeout_s=2)
        assert len(asked) == 2
        released.set()


def test_a_server_without_the_model_is_passed_over(servers: dict[str, ScriptedServer]) -> None:
    (one, _) = servers.values()
    one.lacks = True
    with pool_of(*servers) as pool:
        assert doubled(MODEL(objects(10), pool=pool)) == list(range(10))
    assert one.requests == []


def test_who_waits_for_a_contract_hears_that_the_pool_is_closed(
    servers: dict[str, ScriptedServer],
) -> None:
    pool = pool_of(*servers)
    pool.join_cluster(3600, 1, 0.0)
    heard: list[Any] = []

    def ask() -> None:
        with pytest.raises(errors.ConfigError, match="closed") as caught:
            MODEL.check(pool)
        heard.append(caught.value)

    threading.Thread(target=ask, daemon=True).start()
    until(lambda: pool._engine.started)
    pool.close()
    until(lambda: bool(heard))


def test_a_declaration_is_compared_once_unless_it_changes(
    servers: dict[str, ScriptedServer],
) -> None:
    compared = []

    class Counted(sonic.Model):
        def compare(self, contract: Contract, *, server: str) -> Contract:
            compared.append(server)
            return super().compare(contract, server=server)

    model = Counted(MODEL.name, MODEL.inputs, {"y": ["v0"]})
    with pool_of(*servers) as pool:
        for _ in range(3):
            model(objects(1), pool=pool)
        assert len(compared) == 1
        model.outputs = {"z": sonic.Output(["v0"])}
        with pytest.raises(errors.ContractError, match="z"):
            model(objects(1), pool=pool)
