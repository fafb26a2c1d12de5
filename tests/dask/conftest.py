"""A real Triton whose model takes its time, and dask clusters of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from distributed import Client, LocalCluster

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Answers with the double of each row, after 50 ms for a batch; -1 is an error of the model.
_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.05)
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if (x == -1).any():
                error = pb_utils.TritonError("minus one")
                responses.append(pb_utils.InferenceResponse([], error))
                continue
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * x)]))
        return responses
"""
_CONFIG = """
name: "double"
backend: "python"
max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
MODEL = sonic.Model("double", {"x": sonic.Row("pt")}, {"y": ["twice"]})


def write_repository(path: Path) -> Path:
    version = path / "double" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL)
    (version.parent / "config.pbtxt").write_text(_CONFIG)
    return path


@pytest.fixture(scope="session")
def slow_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("slow") / "repository")


@pytest.fixture(scope="session")
def slow_server(slow_repository: Path, installation: Any) -> Iterator[sonic.LocalServer]:
    with sonic.LocalServer(slow_repository) as server:
        yield server


def local_cluster(workers: int = 2, **options: Any) -> LocalCluster:
    """Return a cluster of workers with one thread each; its dashboard takes a free port."""
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0", **options
    )


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Client]:
    """The client of one worker with one thread, for tests that leave it as it was.

    A worker of its own takes a test some seconds: it compiles, and numba takes its time to end.
    """
    with local_cluster(1) as cluster, Client(cluster) as client:
        yield client


def multiplied(factor: float = 2, **options: Any) -> dict[str, FakeModel]:
    """Return the models of a fake server, whose factor tells which server scored a row."""
    return {"double": FakeModel.of(MODEL, lambda inputs: {"y": factor * inputs["x"]}, **options)}


def jets(first: int, number: int) -> ak.Array:
    return ak.zip({"pt": np.arange(first, first + number, dtype=np.float32)})


def twice(scores: Any) -> list[float]:
    return ak.to_list(scores.twice)
