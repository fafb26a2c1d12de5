"""No row is lost while servers load another version of a model; calls have one version."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import awkward as ak
import pytest
from tests.network.tritons import Triton
from tests.scored import same_scores
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.transport import connect_transport

Rolling = tuple[sonic.Model, Callable[..., None]]


def answered(pool: Pool, more: int = 100) -> None:
    """Return after some more requests were answered."""
    before = pool.statistics.total().requests
    until(lambda: pool.statistics.total().requests >= before + more, what="answers")


@pytest.fixture
def rolling(
    tagger: sonic.Model, served_repository: Path, tagger_path: Path, two_tritons: list[Triton]
) -> Rolling:
    """Return a model of two Tritons, and what writes version 2, which they have once they load."""
    name = f"rolling_{secrets.token_hex(4)}"

    def write(version: int = 2) -> None:
        options: dict[str, Any] = {"max_batch_size": 16, "versions": "latest", "version": version}
        sonic.build_repository(served_repository, {name: tagger_path}, **options)

    write(1)
    for triton in two_tritons:
        triton.tell("Load", name)
    return sonic.Model(name, inputs=tagger.inputs, outputs=tagger.outputs), write


def test_metadata_and_configuration_are_of_one_server(
    rolling: Rolling, two_tritons: list[Triton], proxy: Any
) -> None:
    """Each second call is led to the server whose configuration knows another version's digest."""
    model, write = rolling
    write()
    two_tritons[1].tell("Load", model.name)
    seen = set()
    with proxy(two_tritons, policy="ROUND_ROBIN") as running:
        for _ in range(20):
            with contextlib.closing(connect_transport(running.url)) as connection:
                contract = connection.metadata(model.name, None)
                seen.add((contract.version, bool(contract.digest)))
    assert seen <= {("1", True), ("2", True)}


def test_calls_have_one_version_while_servers_roll_over(
    rolling: Rolling, two_tritons: list[Triton], proxy: Any, jets: Any, direct: list[Any]
) -> None:
    """Requests for version 1 that reach the other server are sent again; no row is lost."""
    model, write = rolling
    seen = set()

    def call() -> None:
        while "2" not in seen:
            seen.add(model(jets[:200], pool=pool).attrs["sonic"]["version"])

    with (
        proxy(two_tritons, policy="ROUND_ROBIN") as running,
        Pool(Settings.make(running.url)) as pool,
        ThreadPoolExecutor(3) as threads,
    ):
        calling = [threads.submit(call) for _ in range(3)]
        write()
        pending = model.submit(ak.concatenate([jets] * 20), pool=pool)
        answered(pool)
        two_tritons[1].tell("Load", model.name)
        assert not pending.done()
        scores = pending.result(timeout_s=120)
        same_scores(scores.top, direct * 20)
        assert scores.attrs["sonic"]["version"] == "1"
        assert pool.statistics.total().retries > 0
        two_tritons[0].tell("Load", model.name)
        for each in calling:
            each.result(60)
        assert seen >= {"1", "2"}
        assert pool.statistics.total().failures == 0
