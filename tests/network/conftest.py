"""Two Tritons of a session, as new for each test, and an Envoy before them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.network.proxies import Envoy
from tests.network.tritons import Triton, restore
from tests.network.tritons import tritons as several_tritons

import sonic_coffea as sonic

# Tests load other models, and unload and load the tagger.
EXPLICIT = ["--model-control-mode=explicit", "--load-model=tagger"]


@pytest.fixture(scope="session")
def served_repository(tagger_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tagger, which takes 16 rows a request: some 170 requests for the jets."""
    path = tmp_path_factory.mktemp("served") / "repository"
    sonic.build_repository(path, {"tagger": tagger_path}, max_batch_size=16)
    return path


@pytest.fixture(scope="session")
def tritons(
    served_repository: Path, installation: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Triton]]:
    """Two, which do not run until they are restored."""
    folder = tmp_path_factory.mktemp("tritons")
    with several_tritons(served_repository, folder, 2, arguments=EXPLICIT) as both:
        yield both


@pytest.fixture
def two_tritons(tritons: list[Triton]) -> list[Triton]:
    """Two that run, and have the tagger."""
    restore(tritons)
    for triton in tritons:
        triton.tell("Load")
    return tritons


@pytest.fixture
def proxy(tmp_path: Path) -> Any:
    """Return what runs an Envoy before Tritons: ``with proxy(two, max_requests=4) as running``."""
    return partial(Envoy.before, folder=tmp_path)
