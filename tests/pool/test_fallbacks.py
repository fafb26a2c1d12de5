"""A fallback that is lost, lacks the model, or cannot be connected."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.pool.scripted import LOST, MODEL, ScriptedServer, objects, pool_of
from tests.waiting import until

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings


def test_a_fallback_that_is_lost_as_well_is_started_again_once(
    servers: dict[str, ScriptedServer],
) -> None:
    started = []

    def fallback() -> str:
        started.append(True)
        return "grpc://s2:8001"

    def lost(*_: Any) -> Any:
        raise LOST

    options = {"fallback": fallback, "fallback_after_s": 0.1, "retry_timeout_s": 0.3}
    with pool_of("grpc://s1:8001", **options) as pool:
        MODEL.check(pool)
        for one in servers.values():
            one.behaviour = lambda _: LOST
            one.contract = lost  # type: ignore[method-assign]
        with pytest.raises(errors.ServerLostError, match="gone"):
            MODEL(objects(4), pool=pool, timeout_s=30)
        assert len(started) == 2


def test_a_fallback_without_the_model_is_one_clear_error(
    servers: dict[str, ScriptedServer],
) -> None:
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
    servers: dict[str, ScriptedServer], error: BaseException
) -> None:
    one, _ = servers.values()

    def connecting(url: str, **_: Any) -> ScriptedServer:
        if url not in servers:
            raise error
        return servers[url]

    options = {
        "fallback": lambda: "grpc://s3:8001",
        "fallback_after_s": 0.1,
        "retry_timeout_s": 0.3,
    }
    with Pool(Settings.make("grpc://s1:8001", **options), connect=connecting) as pool:
        MODEL.check(pool)
        one.behaviour = lambda _: LOST
        with pytest.raises(errors.ServerLostError, match="gone"):
            MODEL(objects(4), pool=pool, timeout_s=30)
