"""The pool with scripted servers in place of connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.pool.scripted import ScriptedServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def servers() -> Iterator[dict[str, ScriptedServer]]:
    scripted = {f"grpc://s{i}:8001": ScriptedServer(f"grpc://s{i}:8001") for i in (1, 2)}
    yield scripted
    for server in scripted.values():
        server.gate.set()
