from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.transport.shared import files, write_models

import sonic_coffea as sonic


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "repository"
    write_models(path, "one", "two")
    return path


@pytest.fixture(scope="module")
def wide_server(wide: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    with sonic.LocalServer(wide, stop_timeout_s=0.1) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert files() == []
