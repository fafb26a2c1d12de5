"""Shared memory with a URL on this machine behind which there are several servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.network.tritons import tritons
from tests.transport.shared import model, objects, write_models
from tests.waiting import until

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.network.tritons import Triton


@pytest.fixture(scope="module")
def wide_tritons(
    installation: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Triton]]:
    wide = tmp_path_factory.mktemp("wide")
    write_models(wide, "one", "two")
    with tritons(wide, tmp_path_factory.mktemp("tritons"), 2) as running:
        yield running


def test_shared_memory_through_a_balancer_is_an_error(
    wide_tritons: list[Triton], proxy: Any
) -> None:
    sent = objects(40_000)
    with proxy(wide_tritons) as running:
        settings = Settings.make(running.url, shared_memory=True)
        with Pool(settings) as pool:
            with pytest.raises(errors.ConfigError) as caught:
                until(lambda: model()(sent, pool=pool) is None)
            assert "shared_memory=True, but " in str(caught.value)
            assert "several servers behind the URL" in str(caught.value)
