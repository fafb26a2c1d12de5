"""The contract that a pool requests before it sends rows, and how long it waits for that."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.pool.scripted import MODEL, ScriptedServer, doubled, objects, pool_of
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sonic_coffea.transport import Contract


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
