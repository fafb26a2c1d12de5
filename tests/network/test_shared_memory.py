"""Shared memory with a URL on this machine behind which there are several servers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.network.tritons import tritons
from tests.transport.shared import check, files, model, objects, write_models
from tests.waiting import until
from tritonclient.grpc import InferenceServerClient

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


def registered(tritons: list[Triton]) -> list[str]:
    names: list[str] = []
    for triton in tritons:
        with InferenceServerClient(triton.url.removeprefix("grpc://")) as client:
            names += client.get_system_shared_memory_status().regions
    return names


@pytest.mark.parametrize(("policy", "channels"), [("ROUND_ROBIN", 4), ("LEAST_REQUEST", 1)])
def test_tensors_travel_in_messages_through_a_balancer(
    wide_tritons: list[Triton],
    envoy: Any,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    channels: int,
) -> None:
    """Neither server knows what was registered with the other; all connections learn it at once."""
    caplog.set_level(logging.INFO)
    sent = objects(40_000)
    with (
        envoy(wide_tritons, policy=policy) as running,
        Pool(Settings.make(running.url, channels=channels)) as pool,
    ):
        for _ in range(3):
            check(model()(sent, pool=pool), sent)
        assert pool.statistics.total().failures == 0
        refusals = [r.message for r in caplog.records if "cannot use shared memory" in r.message]
        assert len(refusals) == 1
        assert "known to one server behind the URL, and not to another" in refusals[0]
        until(lambda: files() == [])

        def settled() -> bool:
            """Whether no request of a call is sent again: half of them would be, on a region."""
            before = pool.statistics.total().retries
            check(model()(sent, pool=pool), sent)
            return pool.statistics.total().retries == before

        until(settled)
        assert files() == []
        until(lambda: registered(wide_tritons) == [])


def test_shared_memory_that_is_demanded_through_a_balancer(
    wide_tritons: list[Triton], envoy: Any
) -> None:
    sent = objects(40_000)
    with envoy(wide_tritons) as running:
        settings = Settings.make(running.url, shared_memory=True)
        with Pool(settings) as pool:
            with pytest.raises(errors.ConfigError) as caught:
                until(lambda: model()(sent, pool=pool) is None)
            assert "shared_memory=True, but " in str(caught.value)
            assert "known to one server behind the URL" in str(caught.value)
