"""A stand-in for an accelerator: a model in a real Triton that sleeps instead of computing.

It sleeps for 2 ms per request and 5 µs per row, and returns two numbers of each row, so that a test
can tell which row an answer belongs to.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from distributed import Client, LocalCluster

import sonic_coffea as sonic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FIELDS = [f"f{i}" for i in range(10)]
FEATURES, LENGTH, MAX_ROWS = len(FIELDS), 64, 1024
MODEL = sonic.Model(
    "accelerator", inputs={"x": sonic.Padded(FIELDS, LENGTH)}, outputs={"y": ["a", "b"]}
)
LAUNCH_S, ROW_S = 2e-3, 5e-6

_MODEL = """
import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        self.launch_s = float(parameters["launch_s"]["string_value"])
        self.row_s = float(parameters["row_s"]["string_value"])
        self.first, self.output = config["input"][0]["name"], config["output"][0]["name"]

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, self.first).as_numpy() for r in requests]
        time.sleep(self.launch_s + self.row_s * sum(map(len, tensors)))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(self.output, t[:, :2, 0].copy())])
            for t in tensors
        ]
"""

_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: {max_rows}
input {{ name: "x" data_type: TYPE_FP32 dims: [ {features}, {length} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}
dynamic_batching {{ {batching} }}
instance_group {{ count: 1 kind: KIND_CPU }}
{parameters}
"""
_PARAMETERS = """
parameters {{ key: "launch_s" value {{ string_value: "{launch_s}" }} }}
parameters {{ key: "row_s" value {{ string_value: "{row_s}" }} }}
"""


def write(
    repository: Path,
    *,
    launch_s: float = LAUNCH_S,
    row_s: float = ROW_S,
    max_rows: int = MAX_ROWS,
    length: int = LENGTH,
    name: str = "accelerator",
    max_queue_size: int | None = None,
) -> Path:
    """Write the model repository, or add a model to it."""
    queue = f"default_queue_policy {{ max_queue_size: {max_queue_size} }}"
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL)
    (version.parent / "config.pbtxt").write_text(
        _CONFIG.format(
            name=name,
            max_rows=max_rows,
            features=FEATURES,
            length=length,
            parameters=_PARAMETERS.format(launch_s=launch_s, row_s=row_s),
            batching="" if max_queue_size is None else queue,
        )
    )
    return repository


def stand_in(repository: Path, model: str) -> Path:
    """Have a model of a repository do nothing for as long as an accelerator would work."""
    folder = repository / model
    (file,) = folder.glob("*/model.onnx")
    file.with_name("model.py").write_text(_MODEL)
    for built in (file, file.with_name("sonic-manifest.json")):
        built.unlink()
    config = folder / "config.pbtxt"
    text = config.read_text().replace('"onnxruntime"', '"python"')
    config.write_text(text + _PARAMETERS.format(launch_s=LAUNCH_S, row_s=ROW_S))
    return repository


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[sonic.LocalServer]:
    """Run a Triton with the stand-in; options as of `write`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        sonic.LocalServer(write(Path(folder) / "repository", **options)) as server,
    ):
        yield server


@contextlib.contextmanager
def workers(number: int, servers: Any, **options: Any) -> Iterator[Client]:
    """Run workers, processes with one thread each, that send messages to servers."""
    with (
        LocalCluster(
            n_workers=number, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
        sonic.connect(servers, client=client, **{"shared_memory": False, **options}),
    ):
        yield client


def padded(jets: ak.Array) -> list[ak.Array]:
    """Pad each field of jets with awkward, for the peers."""
    return [ak.fill_none(ak.pad_none(jets[f], LENGTH, axis=1, clip=True), 0) for f in FIELDS]


def in_awkward(jets: ak.Array) -> ak.Array:
    """Pad jets as coffea's documentation of its Triton client does: ``[N, 10, 64]``."""
    tensor = ak.concatenate([column[:, np.newaxis, :] for column in padded(jets)], axis=1)
    return ak.values_astype(tensor, "float32")


def compute(seconds: float) -> None:
    """Keep the core busy for so much of its time."""
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        sum(range(1000))


def collection(
    rows: int, *, mean: float, fields: Sequence[str] = FIELDS, seed: int = 1
) -> ak.Array:
    """Return ``events * 2 * var * {f0: float32, ...}`` with Poisson counts."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(mean, rows)
    total = int(counts.sum())
    numbers = {name: rng.exponential(size=total).astype(np.float32) + 0.1 for name in fields}
    return ak.unflatten(ak.unflatten(ak.zip(numbers), counts), np.full(rows // 2, 2))
