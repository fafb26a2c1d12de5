"""What SuperSONIC's proxy answers: a refused index, limited connections, routes that are cut."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.commands import run
from tests.doubling import MODEL, jets, served
from tests.network.toxics import ToxicProxy

from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeServer
from sonic_coffea.transport import connect_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

CUT = "upstream request timeout"
# On a machine that is busy, an answer is late as if its server hung.
PATIENT: dict[str, Any] = {"hedge_after_s": 60.0}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(served(max_rows=4)) as running:
        yield running


@pytest.fixture
def saturated(server: FakeServer) -> FakeServer:
    """Its proxy refuses the index: status CANCELLED, no words."""
    server.refuse("RepositoryIndex", grpc.StatusCode.CANCELLED)
    return server


def test_inference_goes_on_while_the_index_is_refused(saturated: FakeServer) -> None:
    with Pool(Settings.make(saturated.url, **PATIENT)) as pool:
        assert MODEL(jets(*range(40)), pool=pool).twice.tolist() == [2.0 * n for n in range(40)]
        assert pool.statistics.total().retries == 0


def test_a_model_that_is_not_there_is_known_without_the_index(saturated: FakeServer) -> None:
    saturated.unload("m")
    with (
        Pool(Settings.make(saturated.url)) as pool,
        pytest.raises(errors.ModelNotFoundError, match="does not have"),
    ):
        MODEL(jets(*range(4)), pool=pool)


def test_what_a_refused_index_means_is_said(saturated: FakeServer) -> None:
    connection = connect_transport(saturated.url)
    with pytest.raises(errors.OverloadError, match=r"no new clients .* SuperSONIC .* saturated"):
        connection.index()
    connection.close()
    listed = run("models", saturated.url)
    assert listed.returncode == 1
    assert "admits no new clients at the moment" in listed.stderr.replace("\n", " ")
    assert "Traceback" not in listed.stderr
    checked = run("check", saturated.url, "--json")
    steps = {step["name"]: step for step in json.loads(checked.stdout)["steps"]}
    assert "admits no new clients" in steps["models"]["detail"]
    for done in (checked, run("check", saturated.url, "m", "--json")):
        assert done.returncode == 0
        assert all(step["ok"] for step in json.loads(done.stdout)["steps"])


@pytest.mark.parametrize("channels", [1, 3])
def test_few_connections_that_last(server: FakeServer, channels: int) -> None:
    """However many calls, threads and pools' looks at the server there are."""
    options = {"channels": channels}
    with ToxicProxy(server.url) as proxy, Pool(Settings.make(proxy.url, **options)) as pool:
        for _ in range(3):
            pendings = [MODEL.submit(jets(*range(40)), pool=pool) for _ in range(10)]
            for pending in pendings:
                assert len(pending.result(timeout_s=60)) == 40
        assert proxy.connections == channels


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED], ids=str
)
def test_routes_that_are_cut_slow_the_sender_down(server: FakeServer, code: Any) -> None:
    with Pool(Settings.make(server.url, **PATIENT)) as pool:
        MODEL(jets(*range(400)), pool=pool)
        server.fail(code, CUT, times=3, every=5)
        assert MODEL(jets(*range(400)), pool=pool).twice.tolist() == [2.0 * n for n in range(400)]
        assert pool.statistics.total().retries == 3
        assert pool.statistics.masked == 0


def test_a_request_that_is_always_cut(server: FakeServer) -> None:
    server.fail(grpc.StatusCode.UNAVAILABLE, CUT, times=1000)
    with (
        Pool(Settings.make(server.url, request_timeout_s=1.0)) as pool,
        pytest.raises(errors.OverloadError, match=r"upstream request timeout; .*max_request_bytes"),
    ):
        MODEL(jets(*range(4)), pool=pool)
