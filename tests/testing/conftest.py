"""A server of a model that doubles a number, four rows a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.doubling import served

from sonic_coffea.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(served(max_rows=4)) as server:
        yield server
