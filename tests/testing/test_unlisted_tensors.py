"""Servers that do not list what their models take and give: MLServer's and KServe's runtimes."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from tests.commands import run
from tests.doubling import MODEL, jets, served

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.ml_tools import triton_wrapper
from sonic_coffea.model._declaration import _warn_of_unlisted_tensors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

JETS = jets(*range(100))
TWICE = [2.0 * n for n in range(100)]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    _warn_of_unlisted_tensors.cache_clear()
    with FakeServer(served(lists_tensors=False), extensions=()) as running:
        yield running


def test_the_declaration_is_trusted_with_one_warning(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sonic_coffea")
    with Pool(Settings.make(server.url)) as pool:
        for _ in range(3):
            assert MODEL(JETS[:64], pool=pool).twice.tolist() == TWICE[:64]
        assert MODEL(JETS[:0], pool=pool).type.content.contents[0].primitive == "float32"
        assert [spec.name for spec in MODEL.check(pool).outputs] == ["y"]
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("sonic_coffea")]
    assert "does not list what model m takes and gives" in message


def test_what_comes_back_is_still_compared() -> None:
    def doubled_in_64_bits(inputs: Any) -> dict[str, Any]:
        return {"y": (2 * inputs["x"]).astype(np.float64)}

    wide = sonic.Model("m", MODEL.inputs, {"y": sonic.Output(["twice"], "float64")})
    model = FakeModel.of(wide, doubled_in_64_bits, lists_tensors=False)
    with (
        FakeServer({"m": model}, extensions=()) as running,
        Pool(Settings.make(running.url)) as pool,
        pytest.raises(errors.ResponseError, match="'y' came back as FP64, the model declares FP32"),
    ):
        MODEL(JETS[:4], pool=pool)


def test_beside_a_server_that_lists_them(server: FakeServer) -> None:
    with (
        FakeServer(served(), extensions=()) as other,
        Pool(Settings.make([server.url, other.url])) as pool,
    ):
        for _ in range(5):
            assert MODEL(JETS[:64], pool=pool).twice.tolist() == TWICE[:64]
        wrong = sonic.Model("m", {"z": sonic.Row("pt")}, {"y": ["twice"]})
        with pytest.raises(errors.ContractError, match="has no input 'z'"):
            wrong(JETS[:4], pool=pool)


class Wrapper(triton_wrapper):
    def prepare_awkward(self, output_list: Any, x: Any) -> Any:
        return [], {"output_list": output_list, "input_dict": {"x": x}}


def test_arrays_that_are_made_ready_by_hand(server: FakeServer) -> None:
    url = server.url.replace("grpc://", "triton+grpc://")
    wrapper = Wrapper(f"{url}/m", client_args={"ssl": False}, batch_size=8)
    x = np.arange(20, dtype=np.float32)[:, np.newaxis]
    assert wrapper(["y"], {"x": x})["y"][:, 0].tolist() == TWICE[:20]
    assert len(wrapper(["y"], {"x": x[:0]})["y"]) == 0
    assert ak.flatten(wrapper(["y"], ak.from_numpy(x))["y"]).tolist() == TWICE[:20]


def test_what_check_says(server: FakeServer) -> None:
    checked = run("check", server.url, "m", "--json")
    steps = {step["name"]: step for step in json.loads(checked.stdout)["steps"]}
    assert checked.returncode == 0
    assert "lists no tensors" in steps["model m"]["detail"]
    assert "inference" not in steps
