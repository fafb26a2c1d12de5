"""Four Tritons of a session, of which a proxy takes some, as new for each test."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from tests.network.proxies import Envoy
from tests.network.tritons import restore
from tests.network.tritons import tritons as several_tritons

import sonic_coffea as sonic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.network.proxies import Proxy
    from tests.network.tritons import Triton


@pytest.fixture(scope="session")
def small_batches(tagger_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tagger, which takes 16 rows a request: some 170 requests for the jets."""
    path = tmp_path_factory.mktemp("small") / "repository"
    sonic.build_repository(path, {"tagger": tagger_path}, max_batch_size=16)
    return path


@pytest.fixture(scope="session")
def tritons(
    small_batches: Path, installation: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Triton]]:
    """Four, which do not run until they are restored."""
    with several_tritons(small_batches, tmp_path_factory.mktemp("tritons"), 4) as all_four:
        yield all_four


@pytest.fixture
def two_tritons(tritons: list[Triton]) -> list[Triton]:
    """Two that run."""
    restore(tritons[:2])
    return tritons[:2]


@pytest.fixture
def proxy(tmp_path: Path) -> Any:
    """Return what runs a proxy before Tritons: ``with proxy(two, Nginx, body="1m") as running``."""

    @contextlib.contextmanager
    def run(tritons: list[Triton], kind: type[Proxy] = Envoy, **settings: Any) -> Iterator[Proxy]:
        restore(tritons)
        with kind.before(tritons, tmp_path, **settings) as running:
            yield running

    return run
