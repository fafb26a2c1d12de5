"""A stand-in for an accelerator: a model in a real Triton that sleeps instead of computing.

It sleeps for 2 ms per request and 5 µs per row, and returns two numbers of each row, so that a test
can tell which row an answer belongs to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FEATURES, LENGTH, MAX_ROWS = 10, 64, 1024
LAUNCH_S, ROW_S = 2e-3, 5e-6

_MODEL = """
import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.launch_s = float(parameters["launch_s"]["string_value"])
        self.row_s = float(parameters["row_s"]["string_value"])

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "x").as_numpy() for r in requests]
        time.sleep(self.launch_s + self.row_s * sum(map(len, tensors)))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", t[:, :2, 0].copy())]) for t in tensors
        ]
"""

_ZEROS = """
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.first = config["input"][0]["name"]
        self.outputs = {o["name"]: [int(n) for n in o["dims"]] for o in config["output"]}

    def execute(self, requests):
        rows = [
            pb_utils.get_input_tensor_by_name(r, self.first).shape()[0] for r in requests
        ]
        time.sleep(LAUNCH_S + ROW_S * sum(rows))
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(o, np.zeros([n, *d], "float32")) for o, d in self.outputs.items()]
            )
            for n in rows
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
            launch_s=launch_s,
            row_s=row_s,
            batching="" if max_queue_size is None else queue,
        )
    )
    return repository


def stand_in(repository: Path, model: str) -> Path:
    """Have a model of a repository do nothing for as long as an accelerator would work."""
    folder = repository / model
    (file,) = folder.glob("*/model.onnx")
    constants = f"LAUNCH_S, ROW_S = {LAUNCH_S}, {ROW_S}\n"
    file.with_name("model.py").write_text(constants + _ZEROS)
    file.unlink()
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace('"onnxruntime"', '"python"'))
    return repository
