"""No row is lost while servers restart, or load and unload a model; calls have one version."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import awkward as ak
import pytest
from tests.network.tritons import Triton
from tests.scored import Scored, same_scores
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.transport import connect_transport

Rolling = tuple[sonic.Model, Callable[..., None]]

# A machine with much to do takes long to load a model.
PATIENT: dict[str, Any] = {"retry_timeout_s": 60}


@contextlib.contextmanager
def calls(score: Callable[[], None]) -> Iterator[None]:
    """Have three threads call again and again, with a pause that spares the machine.

    What a call fails with is raised.
    """
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.05):
            score()

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(work) for _ in range(3)]
        try:
            yield
        finally:
            over.set()
    for each in running:
        each.result()


@pytest.fixture
def scored(tagger: sonic.Model, jets: Any, direct: list[Any]) -> Scored:
    """Score fewer jets than elsewhere."""
    return Scored(tagger, jets[:200], direct[:200])


def answered(pool: Pool, more: int = 100) -> None:
    """Return after some more requests were answered."""
    before = pool.statistics.total().requests
    until(lambda: pool.statistics.total().requests >= before + more, what="answers")


def test_no_row_is_lost_while_servers_are_restarted(
    two_tritons: list[Triton], proxy: Any, scored: Scored
) -> None:
    """One after the other: each unloads its models while it answers."""
    with (
        proxy(two_tritons) as running,
        Pool(Settings.make(running.url)) as pool,
        calls(lambda: scored(pool)),
    ):
        answered(pool)
        for triton in two_tritons:
            triton.leave()
            answered(pool)
            triton.start()
            until(lambda t=triton: t.requests() > 20)
    assert pool.statistics.total().failures == 0


def test_no_row_is_lost_while_servers_lack_the_model(
    two_tritons: list[Triton], proxy: Any, scored: Scored
) -> None:
    """First one of two, which says NOT_FOUND to each second request; then both."""
    with (
        proxy(two_tritons, policy="ROUND_ROBIN") as running,
        Pool(Settings.make(running.url, **PATIENT)) as pool,
        calls(lambda: scored(pool)),
    ):
        answered(pool)
        two_tritons[0].tell("Unload")
        before = pool.statistics.total().retries
        answered(pool, 300)
        assert pool.statistics.total().retries > before
        for _ in range(10):  # new pools find the model, too
            with Pool(Settings.make(running.url)) as new:
                scored(new)
        two_tritons[1].tell("Unload")
        loading = threading.Timer(1.0, lambda: [triton.tell("Load") for triton in two_tritons])
        loading.start()
        # A worker that is new asks for the model while nobody has it.
        with Pool(Settings.make(running.url, **PATIENT)) as new:
            scored(new)
        loading.join()
        answered(pool)


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

    def version(number: int = 200) -> Any:
        return model(jets[:number], pool=pool).attrs["sonic"]["version"]

    with (
        proxy(two_tritons, policy="ROUND_ROBIN") as running,
        Pool(Settings.make(running.url)) as pool,
        calls(lambda: seen.add(version())),
    ):
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
        until(lambda: version(20) == "2")
    assert seen >= {"1", "2"}
    assert pool.statistics.total().failures == 0
