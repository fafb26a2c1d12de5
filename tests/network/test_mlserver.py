"""A real MLServer, another implementation of the protocol, scores jets right."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import awkward as ak
import numpy as np
import pytest
import uv
from tests.network.processes import Service, accepts
from tests.ports import held_port

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

RUNTIME = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Sums(MLModel):
    async def load(self):
        return True

    async def predict(self, payload):
        x = NumpyCodec.decode_input(payload.inputs[0])
        sums = np.stack([x.sum(axis=(1, 2)), x[:, 0, 0]], axis=1)
        output = NumpyCodec.encode_output("y", sums)
        return InferenceResponse(model_name=self.name, outputs=[output])
"""
MODEL = sonic.Model("sums", {"x": sonic.Padded("pt", 4)}, {"y": ["sum", "first"]})


@pytest.fixture(scope="module")
def mlserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run one in an environment of its own; yield its URL."""
    python = ["--python", sys.executable]
    run = [uv.find_uv_bin(), "tool", "run", *python, "--from", "mlserver>=1.7", "mlserver"]
    installed = subprocess.run([*run, "--version"], check=False, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"MLServer cannot be installed: {installed.stderr.strip()}")
    folder = tmp_path_factory.mktemp("mlserver")
    with contextlib.ExitStack() as stack:
        names = ("http_port", "grpc_port", "metrics_port")
        ports = {name: stack.enter_context(held_port()) for name in names}
        settings = {**ports, "host": "127.0.0.1", "parallel_workers": 0}
        (folder / "settings.json").write_text(json.dumps(settings))
        declared = {"name": MODEL.name, "implementation": "runtime.Sums"}
        (folder / "model-settings.json").write_text(json.dumps(declared))
        (folder / "runtime.py").write_text(RUNTIME)
        ready = partial(accepts, ports["grpc_port"])
        stack.enter_context(Service([*run, "start", folder], folder / "mlserver.log", ready))
        yield f"grpc://127.0.0.1:{ports['grpc_port']}"


def test_jets_are_scored_by_mlserver(mlserver: str, caplog: pytest.LogCaptureFixture) -> None:
    counts = np.arange(3000) % 6
    pt = np.random.default_rng(1).random(int(counts.sum()), np.float32)
    jets = ak.unflatten(ak.zip({"pt": ak.unflatten(pt, counts)}, depth_limit=1), [1000, 0, 2000])
    caplog.set_level(logging.WARNING, "sonic_coffea")
    with Pool(Settings.make(mlserver)) as pool:
        scores = MODEL(jets, pool=pool)
        assert ak.num(scores).tolist() == [1000, 0, 2000]
        sums = ak.flatten(ak.sum(jets.pt[:, :, :4], axis=-1))
        np.testing.assert_allclose(ak.flatten(scores.sum), sums, rtol=1e-6)
        firsts = ak.fill_none(ak.firsts(ak.flatten(jets.pt), axis=1), 0.0)
        assert ak.flatten(scores["first"]).tolist() == firsts.tolist()
        with pytest.raises(sonic.errors.ModelNotFoundError, match="did you mean 'sums'"):
            sonic.Model("summs", MODEL.inputs, MODEL.outputs)(jets, pool=pool)
    assert [r.getMessage() for r in caplog.records if "does not list" in r.getMessage()]
