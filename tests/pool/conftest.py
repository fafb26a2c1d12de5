"""The pool with scripted servers in place of connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.pool.scripted import ONE, TWO, ScriptedServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def servers() -> Iterator[dict[str, ScriptedServer]]:
    scripted = {url: ScriptedServer(url) for url in (ONE, TWO)}
    yield scripted
    for server in scripted.values():
        server.gate.set()


@pytest.fixture
def one(servers: dict[str, ScriptedServer]) -> ScriptedServer:
    return servers[ONE]
