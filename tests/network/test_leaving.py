"""No row is lost while servers restart, or load and unload a model; calls have one version."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import awkward as ak
import grpc
import pytest
from tests.network.tritons import restore, tritons
from tests.scored import Scored, same_scores
from tests.waiting import until
from tritonclient.grpc import service_pb2, service_pb2_grpc

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.network.tritons import Triton

# A machine with much to do takes long to load a model.
PATIENT: dict[str, Any] = {"retry_timeout_s": 60}
EXPLICIT = ["--model-control-mode=explicit", "--load-model=tagger"]


@pytest.fixture(scope="module")
def controlled(
    small_batches: Path, installation: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Triton]]:
    """Two Tritons whose models are loaded and unloaded when they are told to."""
    folder = tmp_path_factory.mktemp("tritons")
    with tritons(small_batches, folder, 2, arguments=EXPLICIT) as both:
        yield both


@pytest.fixture
def loaded(controlled: list[Triton]) -> list[Triton]:
    """The same, running, with the model."""
    restore(controlled)
    for triton in controlled:
        tell(triton, "Load")
    return controlled


def tell(triton: Triton, what: str, model: str = "tagger") -> None:
    """Have a Triton load or unload the model."""
    request = getattr(service_pb2, f"RepositoryModel{what}Request")(model_name=model)
    with grpc.insecure_channel(triton.url.removeprefix("grpc://")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        getattr(stub, f"RepositoryModel{what}")(request, timeout=60)


@contextlib.contextmanager
def calls(score: Callable[[], None]) -> Iterator[None]:
    """Have three threads call again and again; raise what a call fails with."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
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


@pytest.mark.parametrize("policy", ["LEAST_REQUEST", "ROUND_ROBIN"])
@pytest.mark.parametrize("number", [1, 2])
def test_no_row_is_lost_while_servers_are_restarted(
    two_tritons: list[Triton], proxy: Any, scored: Scored, policy: str, number: int
) -> None:
    """One of two, or both one after the other: each unloads its models while it answers."""
    with (
        proxy(two_tritons, policy=policy) as running,
        Pool(Settings.make(running.url)) as pool,
        calls(lambda: scored(pool)),
    ):
        answered(pool)
        for triton in two_tritons[:number]:
            triton.leave()
            answered(pool)
            triton.start()
            before = running.requests_of(triton)
            until(lambda t=triton, n=before: running.requests_of(t) > n + 20)
    assert pool.statistics.total().failures == 0


def test_calls_wait_while_a_lone_server_is_restarted(
    two_tritons: list[Triton], scored: Scored
) -> None:
    triton = two_tritons[0]
    with (
        Pool(Settings.make(triton.url, **PATIENT)) as pool,
        calls(lambda: scored(pool)),
    ):
        answered(pool)
        triton.leave()
        triton.start()
        answered(pool)


def test_no_row_is_lost_while_one_of_two_lacks_the_model(
    loaded: list[Triton], proxy: Any, scored: Scored
) -> None:
    """It says NOT_FOUND to each second request; new pools find the model, too."""
    with (
        proxy(loaded, policy="ROUND_ROBIN") as running,
        Pool(Settings.make(running.url)) as pool,
        calls(lambda: scored(pool)),
    ):
        answered(pool)
        tell(loaded[0], "Unload")
        before = pool.statistics.total().retries
        answered(pool, 300)
        assert pool.statistics.total().retries > before
        for _ in range(10):
            with Pool(Settings.make(running.url)) as new:
                scored(new)
        tell(loaded[0], "Load")
        answered(pool)


def test_calls_wait_while_no_server_has_the_model(
    loaded: list[Triton], proxy: Any, scored: Scored
) -> None:
    with (
        proxy(loaded) as running,
        Pool(Settings.make(running.url, **PATIENT)) as pool,
        calls(lambda: scored(pool)),
    ):
        answered(pool)
        for triton in loaded:
            tell(triton, "Unload")
        loading = threading.Timer(1.0, lambda: [tell(triton, "Load") for triton in loaded])
        loading.start()
        # A worker that is new asks for the model while nobody has it.
        with Pool(Settings.make(running.url, **PATIENT)) as new:
            scored(new)
        loading.join()
        answered(pool)


def test_calls_wait_for_a_server_that_is_back_before_its_model(
    loaded: list[Triton], scored: Scored
) -> None:
    """In 30 s of failed calls, "no server has the model any more", it was loaded long ago."""
    triton = loaded[0]
    tell(triton, "Unload")
    with Pool(Settings.make(triton.url, **PATIENT)) as pool:
        with pytest.raises(errors.ModelNotFoundError, match="does not have model 'taggr'"):
            pool.contract("taggr", None)
        loading = threading.Timer(1.0, tell, [triton, "Load"])
        loading.start()
        scored(pool)
        loading.join()
        tell(triton, "Unload")
        loading = threading.Timer(1.0, tell, [triton, "Load"])
        loading.start()
        scored(pool)
        loading.join()


def test_models_that_stay_away_are_given_up_in_time(loaded: list[Triton], scored: Scored) -> None:
    triton = loaded[0]
    with Pool(Settings.make(triton.url, retry_timeout_s=2)) as pool:
        scored(pool)
        tell(triton, "Unload")
        for _ in range(2):
            with pytest.raises(errors.ModelNotFoundError, match="tagger"):
                scored(pool)
        # At once, not after the 30 s for which a server with another model is left alone.
        tell(triton, "Load")
        scored(pool)


@pytest.fixture
def versions(
    tagger_path: Path, installation: Any, tmp_path: Path
) -> Iterator[tuple[Callable[[], None], list[Triton]]]:
    """Two Tritons that serve the latest version, and what writes version 2 beside version 1."""
    options: dict[str, Any] = {"max_batch_size": 16, "versions": "latest"}
    repository = tmp_path / "repository"
    sonic.build_repository(repository, {"tagger": tagger_path}, **options)

    def write() -> None:
        sonic.build_repository(repository, {"tagger": tagger_path}, version=2, **options)

    with tritons(repository, tmp_path, 2, arguments=EXPLICIT) as both:
        restore(both)
        yield write, both


def test_no_row_is_lost_while_servers_roll_over(
    versions: tuple[Callable[[], None], list[Triton]], proxy: Any, tagger: sonic.Model, jets: Any
) -> None:
    write, running = versions
    seen = set()

    def score() -> None:
        seen.add(tagger(jets[:200], pool=pool).attrs["sonic"]["version"])

    with (
        proxy(running, policy="ROUND_ROBIN") as balancer,
        Pool(Settings.make(balancer.url)) as pool,
        calls(score),
    ):
        answered(pool)
        write()
        for triton in running:
            tell(triton, "Load")
            answered(pool, 300)
        until(lambda: tagger(jets[:20], pool=pool).attrs["sonic"]["version"] == "2")
    assert seen >= {"1", "2"}


def test_metadata_and_configuration_are_of_one_server(
    versions: tuple[Callable[..., None], list[Triton]], proxy: Any
) -> None:
    """Each second call is led to the server whose configuration knows another version's digest."""
    write, running = versions
    write()
    tell(running[1], "Load")
    seen = set()
    with proxy(running, policy="ROUND_ROBIN") as balancer:
        for _ in range(20):
            with contextlib.closing(connect_transport(balancer.url)) as connection:
                contract = connection.contract("tagger", None)
                seen.add((contract.version, bool(contract.digest)))
    assert seen <= {("1", True), ("2", True)}


@pytest.fixture
def many(jets: Any, direct: list[Any]) -> tuple[Any, list[Any]]:
    """Jets of which one call has some thousand requests, and their scores."""
    return ak.concatenate([jets] * 20), direct * 20


def test_calls_have_one_version_while_servers_roll_over(
    versions: tuple[Callable[[], None], list[Triton]],
    proxy: Any,
    tagger: sonic.Model,
    many: tuple[Any, list[Any]],
) -> None:
    """Requests for version 1 that reach the other server are sent again."""
    write, running = versions
    objects, expected = many
    write()
    with (
        proxy(running, policy="ROUND_ROBIN") as balancer,
        Pool(Settings.make(balancer.url)) as pool,
    ):
        pending = tagger.submit(objects, pool=pool)
        answered(pool)
        tell(running[1], "Load")
        assert not pending.done()
        scores = pending.result(timeout_s=60)
        same_scores(scores.top, expected)
        total = pool.statistics.total()
        assert (total.failures, total.retries > 0) == (0, True)
    assert scores.attrs["sonic"]["version"] == "1"


def test_versions_that_all_servers_replace_are_named(
    versions: tuple[Callable[[], None], list[Triton]],
    tagger: sonic.Model,
    many: tuple[Any, list[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write, (triton, _) = versions
    objects, expected = many
    write()
    with Pool(Settings.make(triton.url)) as pool:
        pending = tagger.submit(objects, pool=pool)
        answered(pool)
        tell(triton, "Load")
        assert not pending.done()
        scores = pending.result(timeout_s=60)
        same_scores(scores.top, expected)
    assert scores.attrs["sonic"]["version"] == "1, 2"
    warnings = [message for message in caplog.messages if "no server has version 1" in message]
    assert len(warnings) == 1
