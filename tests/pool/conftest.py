"""Scripted servers in place of connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.pool.scripted import ONE, TWO, ScriptedServer


@pytest.fixture
def one() -> Iterator[ScriptedServer]:
    server = ScriptedServer(ONE)
    yield server
    server.gate.set()


@pytest.fixture
def two() -> Iterator[ScriptedServer]:
    server = ScriptedServer(TWO)
    yield server
    server.gate.set()
