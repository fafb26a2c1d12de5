"""The pool with fakes for servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.pool.fakes import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeServer]]:
    fakes = {f"grpc://s{i}:8001": FakeServer(f"grpc://s{i}:8001") for i in (1, 2)}
    monkeypatch.setattr(
        "sonic_coffea.pool._fleet.connect_transport", lambda url, **_: fakes[str(url)]
    )
    yield fakes
    for fake in fakes.values():
        fake.gate.set()
