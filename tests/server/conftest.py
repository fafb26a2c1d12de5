from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server import LocalServer, Served, build_repository, ensure

if TYPE_CHECKING:
    from pathlib import Path


def save_classifier(path: Path, *, features: int = 8, rows: str | int = "N", ir_version: int = 9):
    """Two dense layers and a softmax: [N, features] -> [N, 2], with weights that never change."""
    rng = np.random.default_rng(7)
    first = rng.normal(size=(features, 16)).astype("float32")
    second = rng.normal(size=(16, 2)).astype("float32")
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "second"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, features])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [rows, 2])],
        [numpy_helper.from_array(first, "first"), numpy_helper.from_array(second, "second")],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=ir_version), str(path))
    return path


@pytest.fixture(scope="session")
def installation():
    try:
        return ensure()
    except ServerStartError as error:
        if sys.platform == "linux" and os.environ.get("SONIC_COFFEA_REQUIRE_SERVER"):
            raise
        pytest.skip(f"no local server here: {error}")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("onnx") / "classifier.onnx")


@pytest.fixture(scope="session")
def repository(tmp_path_factory, classifier) -> Path:
    path = tmp_path_factory.mktemp("served") / "repository"
    return build_repository(
        path, {"top": classifier}, max_batch_size=64, labels={"top": ["q", "t"]}
    )


@pytest.fixture(scope="session")
def light(tmp_path_factory) -> Path:
    """A repository whose one model loads quickly, for tests of processes."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "echo.py").write_text("def echo(x): return {'y': x}\n")
    row = ("float32", ["N", 2])
    echo = Served(f"{folder / 'echo.py'}:echo", inputs={"x": row}, outputs={"y": row})
    return build_repository(folder / "repository", {"echo": echo})


@pytest.fixture(scope="session")
def serve(installation):
    """Make servers that end at once and for good, but for the tests of just that."""
    # A model's process that stands still on a loaded machine would end its server.
    env = {"SONIC_COFFEA_STALL_S": "30"}
    options = {"threads": 1, "stop_timeout_s": 0.0, "restart": False, "env": env}
    return functools.partial(LocalServer, installation=installation, **options)


@pytest.fixture(scope="session")
def server(repository, serve, private_state):
    """A server that no test ends."""
    # Where the tests of all folders look for it, whichever ran before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SONIC_COFFEA_STATE_DIR", str(private_state))
        running = serve(repository).start()
    with running:
        yield running
