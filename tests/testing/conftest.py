"""A server of a model that doubles a number, four rows a request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.doubling import served

from sonic_coffea.testing import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(served(max_rows=4)) as server:
        yield server
