"""Tritons behind a balancer, shared by the tests of a module, and as new before each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.network.envoy import Envoy
from tests.network.haproxy import HAProxy
from tests.network.nginx import Nginx
from tests.network.tritons import tritons as run_tritons

import sonic_coffea as sonic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.network.processes import Proxy
    from tests.network.tritons import Triton


@pytest.fixture(scope="session")
def small_batches(tagger_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tagger, which takes 16 rows a request: some 170 requests for the jets."""
    path = tmp_path_factory.mktemp("small") / "repository"
    sonic.build_repository(path, {"tagger": tagger_path}, max_batch_size=16)
    return path


@pytest.fixture(scope="module")
def four_tritons(
    small_batches: Path, installation: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Triton]]:
    with run_tritons(small_batches, tmp_path_factory.mktemp("tritons"), 4) as running:
        yield running


@pytest.fixture(scope="module")
def two_tritons(
    small_batches: Path, installation: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Triton]]:
    with run_tritons(small_batches, tmp_path_factory.mktemp("tritons"), 2) as running:
        yield running


@pytest.fixture
def envoy(tmp_path: Path) -> Any:
    """Return what runs an Envoy before Tritons: ``with envoy(tritons, max_…=…) as running``."""
    return partial(_run, Envoy, tmp_path)


@pytest.fixture
def nginx(tmp_path: Path) -> Any:
    """Return what runs an nginx before Tritons."""
    return partial(_run, Nginx, tmp_path)


@pytest.fixture
def haproxy(tmp_path: Path) -> Any:
    """Return what runs an HAProxy before Tritons."""
    return partial(_run, HAProxy, tmp_path)


def _run(
    kind: type[Proxy], folder: Path, tritons: list[Triton], **settings: Any
) -> AbstractContextManager[Proxy]:
    """Have all Tritons as they were at first, and then a balancer before them."""
    for triton in tritons:
        triton.restore()
    return kind.before(tritons, folder, **settings)
