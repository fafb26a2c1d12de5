"""The pool with scripted servers in place of connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.pool.scripted import ONE, TWO, ScriptedServer


@pytest.fixture
def servers() -> Iterator[dict[str, ScriptedServer]]:
    scripted = {url: ScriptedServer(url) for url in (ONE, TWO)}
    yield scripted
    for server in scripted.values():
        server.gate.set()


@pytest.fixture
def one(servers: dict[str, ScriptedServer]) -> ScriptedServer:
    return servers[ONE]
