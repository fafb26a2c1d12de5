"""A model of large tensors, the regions of shared memory, and a server that is held up."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from tests.waiting import until
from tritonclient.grpc import InferenceServerClient

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Two inputs of different types and widths; answers after 10 ms.
_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.01)
        answers = []
        for request in requests:
            x, n = (pb_utils.get_input_tensor_by_name(request, k).as_numpy() for k in "xn")
            y = np.stack([x.sum(axis=1), x[:, 0] * n[:, 0]], axis=1).astype(np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 2048
input {{ name: "x" data_type: TYPE_FP32 dims: [ 256 ] }}
input {{ name: "n" data_type: TYPE_INT64 dims: [ 3 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}
"""


def model(name: str = "one") -> sonic.Model:
    return sonic.Model(
        name,
        {"x": sonic.Dense("x", (256,)), "n": sonic.Dense("n", (3,), dtype="int64")},
        {"y": ["total", "product"]},
    )


def objects(rows: int, seed: int = 1) -> ak.Array:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 100, (rows, 256)).astype(np.float32)
    return ak.zip({"x": x, "n": rng.integers(0, 100, (rows, 3))}, depth_limit=1)


def check(scores: ak.Array, sent: ak.Array) -> None:
    x, n = ak.to_numpy(sent.x), ak.to_numpy(sent.n)
    np.testing.assert_array_equal(scores.total, x.sum(axis=1))
    np.testing.assert_array_equal(scores["product"], x[:, 0] * n[:, 0])


def write_models(repository: Path, *names: str, code: str = _MODEL) -> None:
    for name in names:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(code)
        (repository / name / "config.pbtxt").write_text(_CONFIG.format(name=name))


def pool_of(server: Any, **options: Any) -> Pool:
    return Pool(Settings.make(server, **{"shared_memory": True, **options}))


def _names(pid: int | str | None) -> str:
    """Return the pattern of the names of a process's regions; by default, of this one."""
    return f"sonic-coffea-client-{os.getpid() if pid is None else pid}-*"


def files(pid: int | None = None) -> list[str]:
    """Return the files of a process's regions: other processes may run tests, too."""
    memory = Path("/dev/shm")  # noqa: S108
    return sorted(
        path.name
        for folder in (".", "sonic-coffea-*")  # a local server has a folder of its own
        for path in memory.glob(f"{folder}/{_names(pid)}")
    )


@contextlib.contextmanager
def registered(server: sonic.LocalServer) -> Iterator[Callable[..., list[str]]]:
    """Return a function that asks the server for the regions of a process."""
    with InferenceServerClient(server.url) as client:

        def regions(pid: int | str | None = None) -> list[str]:
            return fnmatch.filter(client.get_system_shared_memory_status().regions, _names(pid))

        yield regions


# It works on a request until a file is removed, and creates another when it begins.
_HELD = """
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        open("{folder}/begun", "w").close()
        while os.path.exists("{folder}/held"):
            time.sleep(0.002)
        rows = [len(pb_utils.get_input_tensor_by_name(r, "x").as_numpy()) for r in requests]
        answers = [np.zeros((n, 2), np.float32) for n in rows]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for y in answers]
"""


class Held:
    """A repository whose model works on a request until it is released."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = folder / "repository"
        self._begun, self._held = folder / "begun", folder / "held"
        if not self.repository.exists():
            write_models(self.repository, "one", code=_HELD.format(folder=folder))

    def hold(self) -> None:
        self._begun.unlink(missing_ok=True)
        self._held.touch()

    def release(self) -> None:
        self._held.unlink()

    def wait(self) -> None:
        until(self._begun.exists)

    def submit(self, pool: Pool) -> sonic.Pending:
        """Return a call whose one request the server works on until it is released."""
        model()(objects(1), pool=pool)
        self.hold()
        pending = model().submit(objects(2000), pool=pool)
        self.wait()
        return pending
