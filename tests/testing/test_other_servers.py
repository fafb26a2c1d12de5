"""Servers that answer otherwise than Triton: SuperSONIC's proxy, and runtimes without metadata.

The proxy refuses the index, limits connections and cuts routes. MLServer's and KServe's runtimes do
not list what their models take and give.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest
from tests.commands import run
from tests.doubling import MODEL, jets, served
from tests.network.toxics import ToxicProxy

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.ml_tools import triton_wrapper
from sonic_coffea.model._declaration import warn_once
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import connect_transport

CUT = "upstream request timeout"
# On a machine that is busy, an answer is late as if its server hung.
PATIENT: dict[str, Any] = {"hedge_after_s": 60.0}
JETS = jets(*range(100))
TWICE = [2.0 * n for n in range(100)]


@pytest.fixture
def saturated(fake: FakeServer) -> FakeServer:
    """Its proxy refuses the index: status CANCELLED, no words."""
    fake.refuse("RepositoryIndex", grpc.StatusCode.CANCELLED)
    return fake


def checked(*arguments: str) -> dict[str, Any]:
    """Return the steps of the command `check`, which finds nothing wrong."""
    done = run("check", *arguments, "--json")
    assert done.returncode == 0
    steps = json.loads(done.stdout)["steps"]
    assert all(step["ok"] for step in steps)
    return {step["name"]: step for step in steps}


def test_inference_needs_no_index(saturated: FakeServer) -> None:
    with Pool(Settings.make(saturated.url, **PATIENT)) as pool:
        assert MODEL(JETS, pool=pool).twice.tolist() == TWICE
        assert pool.statistics.total().retries == 0
    saturated.unload("m")
    with (
        Pool(Settings.make(saturated.url)) as pool,
        pytest.raises(errors.ModelNotFoundError, match="does not have"),
    ):
        MODEL(JETS[:4], pool=pool)


def test_refused_indices_are_explained(saturated: FakeServer) -> None:
    with (
        connect_transport(saturated.url) as connection,
        pytest.raises(errors.OverloadError, match=r"no new clients .* SuperSONIC .* saturated"),
    ):
        connection.index()
    listed = run("models", saturated.url)
    assert listed.returncode == 1
    assert "admits no new clients at the moment" in listed.stderr.replace("\n", " ")
    assert "Traceback" not in listed.stderr
    assert "admits no new clients" in checked(saturated.url)["models"]["detail"]
    checked(saturated.url, "m")


@pytest.mark.parametrize("channels", [1, 3])
def test_few_connections_that_last(fake: FakeServer, channels: int) -> None:
    """However many calls, threads and pools' looks at the server there are."""
    options = {"channels": channels}
    with ToxicProxy(fake.url) as proxy, Pool(Settings.make(proxy.url, **options)) as pool:
        for _ in range(3):
            pendings = [MODEL.submit(JETS[:40], pool=pool) for _ in range(10)]
            assert [len(pending.result(timeout_s=60)) for pending in pendings] == [40] * 10
        assert proxy.connections == channels


def test_requests_that_are_always_cut_are_an_error(fake: FakeServer) -> None:
    fake.fail(grpc.StatusCode.UNAVAILABLE, CUT, times=1000)
    with (
        Pool(Settings.make(fake.url, request_timeout_s=5.0)) as pool,
        pytest.raises(errors.OverloadError, match=r"upstream request timeout; .*max_request_bytes"),
    ):
        MODEL(JETS[:4], pool=pool)


@pytest.fixture
def unlisted() -> Iterator[FakeServer]:
    """It does not list what its model takes and gives."""
    warn_once.cache_clear()
    with FakeServer(served(lists_tensors=False), extensions=()) as running:
        yield running


def test_the_declaration_is_trusted_with_one_warning(
    unlisted: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sonic_coffea")
    with Pool(Settings.make(unlisted.url)) as pool:
        for _ in range(3):
            assert MODEL(JETS[:64], pool=pool).twice.tolist() == TWICE[:64]
        assert MODEL(JETS[:0], pool=pool).type.content.contents[0].primitive == "float32"
        assert [spec.name for spec in MODEL.check(pool).outputs] == ["y"]
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("sonic_coffea")]
    assert "does not list what model m takes and gives" in message
    steps = checked(unlisted.url, "m")
    assert "lists no tensors" in steps["model m"]["detail"]
    assert "inference" not in steps


def test_unlisted_outputs_are_compared_when_they_come_back(unlisted: FakeServer) -> None:
    wide = sonic.Model("m", MODEL.inputs, {"y": sonic.Output(["twice"], "float64")})
    unlisted.models["m"] = FakeModel.of(
        wide, lambda inputs: {"y": (2 * inputs["x"]).astype(np.float64)}, lists_tensors=False
    )
    with (
        Pool(Settings.make(unlisted.url)) as pool,
        pytest.raises(errors.ResponseError, match="'y' came back as FP64, the model declares FP32"),
    ):
        MODEL(JETS[:4], pool=pool)


def test_a_server_beside_it_lists_the_tensors(unlisted: FakeServer, fake: FakeServer) -> None:
    with Pool(Settings.make([unlisted.url, fake.url])) as pool:
        for _ in range(5):
            assert MODEL(JETS[:64], pool=pool).twice.tolist() == TWICE[:64]
        wrong = sonic.Model("m", {"z": sonic.Row("pt")}, {"y": ["twice"]})
        with pytest.raises(errors.ContractError, match="has no input 'z'"):
            wrong(JETS[:4], pool=pool)


class Wrapper(triton_wrapper):
    def prepare_awkward(self, output_list: Any, x: Any) -> Any:
        return [], {"output_list": output_list, "input_dict": {"x": x}}


def test_wrappers_need_no_list_of_tensors(unlisted: FakeServer) -> None:
    url = unlisted.url.replace("grpc://", "triton+grpc://")
    wrapper = Wrapper(f"{url}/m", client_args={"ssl": False}, batch_size=8)
    x = np.arange(20, dtype=np.float32)[:, np.newaxis]
    assert wrapper(["y"], {"x": x})["y"][:, 0].tolist() == TWICE[:20]
    assert len(wrapper(["y"], {"x": x[:0]})["y"]) == 0
    assert ak.flatten(wrapper(["y"], ak.from_numpy(x))["y"]).tolist() == TWICE[:20]
