from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper
from tests.onnx_files import save_onnx

from sonic_coffea.server import LocalServer, build_repository

from .support import function


def save_classifier(path: Path, *, features: int = 8, ir_version: int = 9):
    """Two dense layers and a softmax: [N, features] -> [N, 2], with weights that never change."""
    rng = np.random.default_rng(7)
    sizes = {"first": (features, 16), "second": (16, 2)}
    weights = {name: rng.normal(size=size).astype("float32") for name, size in sizes.items()}
    graph = f"""(float[N, {features}] x) => (float[N, 2] scores) {{
        hidden = MatMul(x, first)
        active = Relu(hidden)
        logits = MatMul(active, second)
        scores = Softmax<axis = 1>(logits)
    }}"""
    constants = tuple(numpy_helper.from_array(array, name) for name, array in weights.items())
    return save_onnx(path, graph, constants, ir_version=ir_version)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("onnx") / "classifier.onnx")


@pytest.fixture(scope="session")
def repository(tmp_path_factory, classifier) -> Path:
    """A model, and another one whose second version is not served."""
    path = tmp_path_factory.mktemp("served") / "repository"
    labels = {"top": ["q", "t"]}
    build_repository(path, {"top": classifier}, max_batch_size=64, labels=labels)
    build_repository(path, {"pinned": classifier})
    return build_repository(path, {"pinned": classifier}, version=2, versions=[1])


@pytest.fixture(scope="session")
def light(tmp_path_factory) -> Path:
    """A repository whose one model loads quickly, for tests of processes."""
    folder = tmp_path_factory.mktemp("light")
    echo = function(folder / "echo.py", "def echo(x): return {'y': x}\n")
    return build_repository(folder / "repository", {"echo": echo})


@pytest.fixture(scope="session")
def never_ready(tmp_path_factory) -> Path:
    """A repository whose one model does not load before its time is over."""
    folder = tmp_path_factory.mktemp("never_ready")
    code = "import time\ntime.sleep(600)\ndef wait(x): return {'y': x}\n"
    return build_repository(folder / "repository", {"wait": function(folder / "wait.py", code)})


@pytest.fixture(scope="session")
def serve(installation):
    """Make servers that end at once and for good, unless a test says otherwise."""
    return functools.partial(LocalServer, threads=1, stop_timeout_s=0.0, restart=False)


@pytest.fixture(scope="session")
def server(repository, serve):
    """A server that no test ends."""
    with serve(repository) as running:
        yield running
