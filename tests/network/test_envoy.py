"""Real proxies before real Tritons, whose versions roll over, and which refuse what is too much."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import awkward as ak
import pytest
from tests.network.proxies import Envoy, buffer, rate_limit, signed_tokens
from tests.network.tritons import Triton, restore
from tests.network.tritons import tritons as several_tritons
from tests.scored import same_scores
from tests.transport.shared import check, model, objects, write_models
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.reporting import Statistics
from sonic_coffea.transport import connect_transport

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


_QUEUED: dict[str, Any] = {"work": "time.sleep(0.02)", "rows": 8}
# What each does for a batch, and how Triton queues its requests.
_MODELS: dict[str, dict[str, Any]] = {
    "one": {"work": "pass"},
    "small": {"work": "pass", "rows": 8},
    "slow": {"work": "time.sleep(0.0003 * len(x))"},
    "hungry": {"work": "assert len(x) <= 500, 'CUDA out of memory. Tried to allocate 2.00 GiB'"},
    "short_queue": {**_QUEUED, "dynamic_batching": {"default_queue_policy": {"max_queue_size": 4}}},
    "impatient_queue": {
        **_QUEUED,
        "dynamic_batching": {"default_queue_policy": {"default_timeout_microseconds": 50_000}},
    },
}


@pytest.fixture
def serve(two_tritons: list[Triton], served_repository: Path) -> Any:
    """Return what has some Tritons load one of these models, and returns them."""

    def load(name: str = "one", number: int = 1) -> list[Triton]:
        write_models(served_repository, name, **_MODELS[name])
        for triton in two_tritons[:number]:
            triton.tell("Load", name)
        return two_tritons[:number]

    return load


def pool_of(url: str) -> Pool:
    return Pool(Settings.make(url, shared_memory=False))


def retries(pool: Pool, name: str, rows: int) -> int:
    """Score objects, and return how many requests were sent again."""
    before = pool.statistics.total()
    sent = objects(rows)
    check(model(name)(sent, pool=pool), sent)
    total = pool.statistics.total()
    assert (total.failures, total.rows - before.rows) == (0, rows)
    return int(total.retries - before.retries)


# What refuses: Envoy's settings, the model, and what the log says of it.
REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "Envoy's buffer": ({"filters": [buffer(500_000)]}, "one", "Payload Too Large"),
    "an accelerator's memory": ({}, "hungry", "out of memory"),
    # A full request takes 0.6 s; from then on, it depends on the time that they take.
    "a route's timeout": ({"route_timeout_s": 0.3}, "slow", ""),
}


@pytest.mark.parametrize(("settings", "name", "words"), REFUSALS.values(), ids=REFUSALS)
def test_requests_that_are_too_large_are_split(
    serve: Any, proxy: Any, caplog: Any, settings: Any, name: str, words: str
) -> None:
    """From then on, requests are smaller."""
    with proxy(serve(name), **settings) as running, pool_of(running.url) as pool:
        assert retries(pool, name, 6_000) > 0
        if words:
            assert retries(pool, name, 6_000) == 0
            (message,) = [r.message for r in caplog.records if "are split" in r.message]
            assert words in message
            assert "let requests be smaller: max_request_b" in message


@pytest.mark.parametrize("name", ["short_queue", "impatient_queue"])
def test_requests_refused_by_a_queue_are_sent_again(serve: Any, proxy: Any, name: str) -> None:
    """Of a model that does 50 requests a second, with 8 clients."""
    with proxy(serve(name)) as running:
        assert_shared(running.url, name, clients=8, rows=80)


@pytest.mark.parametrize("at_a_time", [True, False])
def test_requests_refused_by_a_proxy_are_sent_again(
    serve: Any, proxy: Any, at_a_time: bool
) -> None:
    """Those above a number at a time, of which few are sent, or in a second."""
    limit = {"max_requests": 4} if at_a_time else {"filters": [rate_limit(20, 5, 0.05)]}
    with proxy(serve("small", 2), **limit) as running:
        total = assert_shared(running.url, "small", clients=2, rows=2_000)
        assert not at_a_time or total.retries < total.requests / 2


def assert_shared(url: str, name: str, *, clients: int, rows: int) -> Any:
    """Score objects by several pools at a time, some of whose requests are refused."""
    sent = objects(rows)
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(pool_of(url)) for _ in range(clients)]
        for pending in [model(name).submit(sent, pool=pool) for pool in pools]:
            check(pending.result(timeout_s=60), sent)
        total = sum((pool.statistics for pool in pools), Statistics()).total()
        assert (total.failures, total.rows, total.retries > 0) == (0, clients * rows, True)
        assert all(pool.servers[0].circuit != "open" for pool in pools)
    return total


def test_shared_memory_through_a_balancer_is_an_error(serve: Any, proxy: Any) -> None:
    with (
        proxy(serve(number=2)) as running,
        Pool(Settings.make(running.url, shared_memory=True)) as pool,
    ):
        with pytest.raises(errors.ConfigError) as caught:
            until(lambda: model()(objects(40_000), pool=pool) is None)
        assert "shared_memory=True, but " in str(caught.value)
        assert "several servers behind the URL" in str(caught.value)


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


JWKS = {"keys": [{"kty": "oct", "alg": "HS256", "k": "a2V5"}]}


def expired_token() -> str:
    """Return a token that expired longer ago than Envoy allows for, which is 60 s.

    It is not signed: Envoy looks at the time first.
    """
    parts = {"alg": "HS256"}, {"iss": "tests", "exp": int(time.time() - 100)}
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in parts]
    return ".".join([*(part.rstrip("=") for part in encoded), "none"])


def test_tokens_that_stay_expired_are_named(
    two_tritons: list[Triton], proxy: Any, tagger: sonic.Model, jets: Any, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text(expired_token())
    with proxy(two_tritons, filters=[signed_tokens(JWKS)]) as running:
        settings = Settings.make(running.url, token_file=path, retry_timeout_s=0.5)
        with Pool(settings) as pool, pytest.raises(errors.TokenExpiredError, match="Jwt is expire"):
            tagger(jets, pool=pool)
        # Nobody renews a token that was given as text.
        settings = Settings.make(running.url, token=expired_token(), retry_timeout_s=60.0)
        with Pool(settings) as pool, pytest.raises(errors.AccessError, match="token_file="):
            tagger(jets, pool=pool)
        assert pool.statistics.total().retries == 0
