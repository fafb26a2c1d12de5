"""How soon threads take turns: sooner while a pool is in use, and as the user has it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from tests.pool.scripted import MODEL, ScriptedServer, objects, pool_of

from sonic_coffea.pool import _process

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_other_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_process, "_users", set())
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_threads_take_turns_sooner_while_a_pool_is_in_use(
    servers: dict[str, ScriptedServer],
) -> None:
    sys.setswitchinterval(0.005)
    with pool_of(*servers) as pool:
        assert sys.getswitchinterval() == 0.005
        MODEL(objects(1), pool=pool)
        soon = sys.getswitchinterval()
        with pool_of(*servers) as other:
            MODEL(objects(1), pool=other)
        assert sys.getswitchinterval() == soon < 0.002
    assert sys.getswitchinterval() == 0.005


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_a_user_has_set_stays(servers: dict[str, ScriptedServer], when: str) -> None:
    sys.setswitchinterval(0.003 if when == "before" else 0.005)
    with pool_of(*servers) as pool:
        MODEL(objects(1), pool=pool)
        if when == "meanwhile":
            sys.setswitchinterval(0.003)
    assert sys.getswitchinterval() == 0.003
