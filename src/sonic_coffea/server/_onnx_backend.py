"""A Triton Python model that runs the ONNX file beside it with onnxruntime.

Copied into model repositories as ``model.py``; it imports nothing of this package.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

Feed = dict[str, Any]


class TritonPythonModel:
    """Stack the requests that Triton has batched, run once, and split the outputs again."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; called once by the server."""
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        options = onnxruntime.SessionOptions()
        threads = parameters.get("intra_op_threads") or os.environ.get("OMP_NUM_THREADS", "0")
        options.intra_op_num_threads = int(threads) if threads.isdigit() else 0
        options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            str(folder / parameters.get("file", "model.onnx")),
            sess_options=options,
            providers=["CPUExecutionProvider"],
        )
        self.batched = int(config.get("max_batch_size", 0)) > 0
        self.inputs = [spec["name"] for spec in config["input"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request; one that fails gets an error of its own."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[Any, list[tuple[int, Feed]]] = {}
        for index, request in enumerate(requests):
            if request.is_cancelled():
                error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                responses[index] = pb_utils.InferenceResponse(error=error)
                continue
            try:
                feed = self._feed(request)
            except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the request
                responses[index] = _failed(error)
                continue
            wanted = tuple(sorted(request.requested_output_names()))
            shapes = tuple(array.shape[1:] for array in feed.values()) if self.batched else index
            groups.setdefault((wanted, shapes), []).append((index, feed))
        for (wanted, _), members in groups.items():
            self._answer(wanted, members, responses)
        return responses

    def finalize(self) -> None:
        """Let go of the model; called once by the server."""
        self.session = None

    def _feed(self, request: Any) -> Feed:
        feed = {}
        for name in self.inputs:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                raise ValueError(f"expected an input {name!r}, got none")
            feed[name] = _readable(tensor.as_numpy())
        return feed

    def _answer(
        self, wanted: tuple[str, ...], members: list[tuple[int, Feed]], responses: list[Any]
    ) -> None:
        feeds = [feed for _, feed in members]
        try:
            if len(members) == 1:
                outputs = [self.session.run(wanted, feeds[0])]
            else:
                outputs = self._run_stacked(wanted, feeds)
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the request
            if len(members) == 1:
                responses[members[0][0]] = _failed(error)
                return
            # One bad request must not fail those that happened to be batched with it.
            for member in members:
                self._answer(wanted, [member], responses)
            return
        for (index, _), arrays in zip(members, outputs, strict=True):
            tensors = [
                pb_utils.Tensor(n, _sendable(a)) for n, a in zip(wanted, arrays, strict=True)
            ]
            responses[index] = pb_utils.InferenceResponse(output_tensors=tensors)

    def _run_stacked(self, wanted: tuple[str, ...], feeds: list[Feed]) -> list[Any]:
        rows = [len(feed[self.inputs[0]]) for feed in feeds]
        stacked = {name: np.concatenate([feed[name] for feed in feeds]) for name in self.inputs}
        arrays = self.session.run(wanted, stacked)
        for name, array in zip(wanted, arrays, strict=True):
            if array.shape[:1] != (sum(rows),):
                raise ValueError(f"output {name!r} has shape {array.shape} for {sum(rows)} rows")
        edges = np.cumsum(rows)[:-1]
        return list(zip(*(np.split(array, edges) for array in arrays), strict=True))


def _failed(error: Exception) -> Any:
    message = f"{type(error).__name__}: {error}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))


def _readable(array: Any) -> Any:
    # Triton brings strings as bytes, of which onnxruntime would take the Python notation.
    if array.dtype == np.object_:
        flat = [s.decode() if isinstance(s, bytes) else s for s in array.ravel()]
        return np.array(flat, dtype=np.object_).reshape(array.shape)
    return array


def _sendable(array: Any) -> Any:
    array = np.asarray(array)
    # onnxruntime gives strings as Python objects of type str, Triton takes bytes.
    if array.dtype == np.object_:
        flat = [s.encode() if isinstance(s, str) else s for s in array.ravel()]
        return np.array(flat, dtype=np.object_).reshape(array.shape)
    return np.ascontiguousarray(array)
