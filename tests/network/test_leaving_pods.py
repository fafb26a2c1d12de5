"""Tritons that leave, unload and come back behind one URL: no call fails of it."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.network.tritons import tritons as run_tritons
from tests.waiting import until
from tritonclient.grpc import InferenceServerClient

from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.network.tritons import Triton

    import sonic_coffea as sonic


class Calls:
    """Calls in two threads, one after the other in each, from `start` until `finish`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]
        self.failures: list[Exception] = []
        self.done = 0

    def __enter__(self) -> Calls:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.is_set() and not self.failures:
            try:
                self._call()
            except Exception as error:  # noqa: BLE001  the test shows it
                self.failures.append(error)
            self.done += 1

    def some(self, number: int = 3) -> None:
        """Wait for some more calls, or a failed one."""
        wanted = self.done + number
        until(lambda: self.done >= wanted or bool(self.failures), 60, "some more calls")


@pytest.fixture
def calls(tagger: sonic.Model, jets: Any, direct: list[Any], compare: Any) -> Any:
    """Return what calls by a pool, and compares, until it is left."""

    @contextlib.contextmanager
    def run(pool: Pool) -> Iterator[Calls]:
        with Calls(lambda: compare(tagger(jets, pool=pool).top, direct)) as running:
            yield running
            running.some()
        assert running.failures == []
        assert pool.statistics.total().failures == 0

    return run


@pytest.fixture(scope="module")
def explicit_tritons(
    small_batches: Path, installation: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Triton]]:
    """Two whose model is loaded and unloaded by request."""
    control = ["--model-control-mode=explicit", "--load-model=tagger", "--exit-timeout-secs=5"]
    folder = tmp_path_factory.mktemp("explicit")
    with run_tritons(small_batches, folder, 2, arguments=control) as running:
        yield running


@pytest.mark.parametrize("policy", ["LEAST_REQUEST", "ROUND_ROBIN"])
def test_a_roll_over(two_tritons: list[Triton], envoy: Any, calls: Any, policy: str) -> None:
    """One after the other is asked to end, and another takes its place."""
    with (
        envoy(two_tritons, policy=policy) as running,
        Pool(Settings.make(running.url)) as pool,
        calls(pool) as made,
    ):
        for triton in two_tritons:
            made.some()
            triton.leave()
            made.some(1)
            triton.start()


def test_one_unloads_and_loads(explicit_tritons: list[Triton], envoy: Any, calls: Any) -> None:
    """It says that the model has no versions, is not ready, or is not known."""
    one = explicit_tritons[0]
    with (
        envoy(explicit_tritons, policy="ROUND_ROBIN") as running,
        Pool(Settings.make(running.url)) as pool,
        contextlib.closing(InferenceServerClient(f"{one.address}:{one.port}")) as client,
        calls(pool) as made,
    ):
        for _ in range(2):
            made.some()
            client.unload_model("tagger")
            until(lambda: not client.is_model_ready("tagger"), what="the end of the model")
            made.some()
            client.load_model("tagger")


def test_a_pool_that_finds_it_unloaded_in_one(
    explicit_tritons: list[Triton],
    envoy: Any,
    tagger: sonic.Model,
    jets: Any,
    direct: list[Any],
    compare: Any,
) -> None:
    """Its calls of metadata are led to those that have it, and to the one that has not."""
    one = explicit_tritons[0]
    with (
        envoy(explicit_tritons, policy="ROUND_ROBIN") as running,
        contextlib.closing(InferenceServerClient(f"{one.address}:{one.port}")) as client,
    ):
        client.unload_model("tagger")
        until(lambda: not client.is_model_ready("tagger"), what="the end of the model")
        try:
            for _ in range(4):
                with Pool(Settings.make(running.url)) as pool:
                    compare(tagger(jets, pool=pool).top, direct)
                    assert pool.statistics.total().failures == 0
        finally:
            client.load_model("tagger")


@pytest.mark.parametrize("behind", [True, False])
def test_a_lone_one_is_started_again(
    two_tritons: list[Triton], envoy: Any, calls: Any, behind: bool
) -> None:
    """With a balancer before it, and without: a few seconds in which nothing gets through."""
    alone = two_tritons[0]
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(envoy([alone])).url if behind else alone.url
        alone.restore()
        pool = stack.enter_context(Pool(Settings.make(url)))
        made = stack.enter_context(calls(pool))
        made.some()
        alone.leave()
        time.sleep(0.5)  # as long as nobody listens, connections are refused
        alone.start()
