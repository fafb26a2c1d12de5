"""The pool with scripted servers in place of connections."""

from __future__ import annotations

import pytest
from tests.pool.scripted import ScriptedServer


@pytest.fixture
def servers() -> dict[str, ScriptedServer]:
    return {f"grpc://s{i}:8001": ScriptedServer(f"grpc://s{i}:8001") for i in (1, 2)}


@pytest.fixture(autouse=True)
def gates_open(servers: dict[str, ScriptedServer]):
    yield
    for server in servers.values():
        server.gate.set()
