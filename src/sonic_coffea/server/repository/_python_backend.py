"""A Triton Python model that runs what is beside it: a network, trees, or a Python function.

Copied into model repositories as ``model.py``, and beside the local server in place of the native
backends, with `_runner` as ``sonic_runner.py``; neither imports this package. The file to run is
named in ``sonic-manifest.json``, or, as for the native backends, in the model's configuration.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import sonic_runner  # type: ignore[import-not-found,unused-ignore]
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

# The parameters that set the threads of this backend, and of the native backends.
_THREADS = ("intra_op_threads", "intra_op_thread_count", "INTRA_OP_THREAD_COUNT")
Feed = dict[str, Any]

# A thread of Triton's library writes to shared memory every 0.3 s. After a second without a write,
# Triton considers this process dead, and answers its requests with errors. If the process only
# stalled, Triton would take its late answer for the answer to the next request. That thread cannot
# be observed, so a stall of the thread below counts as a stall of both; the interpreter's lock may
# have caused it.
_STALL_S = float(os.environ.get("SONIC_COFFEA_STALL_S", "0.65"))


class Pulse:
    """Ends this process, and the server, when it has stood still while Triton waited for it."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._stalled_until = -math.inf
        self._awaited_until = -math.inf
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def begin(self) -> None:
        """Record that Triton waits for an answer."""
        self._awaited_until = math.inf
        self._look()
        # What arrives soon after a stall may have been sent during the stall.
        if time.monotonic() < self._stalled_until + 1.5:
            self._end()

    def end(self) -> None:
        """Record that the answer leaves."""
        self._look()
        self._awaited_until = time.monotonic() + 0.1

    def _beat(self) -> None:
        while True:
            time.sleep(0.1)
            self._look()
            self._last = time.monotonic()

    def _look(self) -> None:
        at, now = self._last, time.monotonic()
        if now - at > _STALL_S:
            self._last = self._stalled_until = now
            # A request may have come meanwhile, after which Triton may send no more.
            if at < self._awaited_until or now - at > max(1.0, _STALL_S):
                self._end()

    @staticmethod
    def _end() -> None:
        message = (
            "the model's process stood still, and its answers might be taken for those to other "
            "requests; the server ends\n"
        )
        os.write(2, message.encode())
        server = os.getppid()
        # A container's first process takes no SIGKILL from inside.
        os.kill(server, signal.SIGTERM if server == 1 else signal.SIGKILL)
        os._exit(1)


class TritonPythonModel:
    """Stack the requests that Triton has batched, run once, and split the outputs again."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        manifest = _manifest(folder, config)
        parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        # Files may be replaced before a restart, or while the server polls.
        told = parameters.get(f"sha256.{folder.name}")
        sonic_runner.check_unchanged(sonic_runner.changes(folder, manifest, told))
        # For pickles, and modules that are no .py files; no other model is in this process.
        path = folder / manifest["file"]
        sys.path.append(str(path.parent))
        limits = (parameters.get(key) for key in _THREADS)
        threads = next(filter(None, limits), os.environ.get("OMP_NUM_THREADS", "0"))
        try:
            self.run = sonic_runner.load(path, manifest, int(threads) if threads.isdigit() else 0)
        except ImportError as error:
            raise ImportError(
                f"model {args['model_name']!r} needs {error.name}, which the server's environment "
                f"lacks ({error}); add it: sonic-coffea server install --with {error.name}"
            ) from None
        self.batched = int(config.get("max_batch_size", 0)) > 0
        self.inputs = [spec["name"] for spec in manifest["inputs"]]
        self.pulse = Pulse()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request; one that fails gets an error of its own."""
        self.pulse.begin()
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
            requested = tuple(sorted(request.requested_output_names()))
            shapes = tuple(array.shape[1:] for array in feed.values()) if self.batched else index
            groups.setdefault((requested, shapes), []).append((index, feed))
        for (requested, _), members in groups.items():
            answers = self._answer([feed for _, feed in members], requested)
            for (index, _), answer in zip(members, answers, strict=True):
                responses[index] = answer
        self.pulse.end()
        return responses

    def _feed(self, request: Any) -> Feed:
        tensors = {n: pb_utils.get_input_tensor_by_name(request, n) for n in self.inputs}
        return {name: tensor.as_numpy() for name, tensor in tensors.items()}

    def _answer(self, feeds: list[Feed], requested: tuple[str, ...]) -> list[Any]:
        try:
            outputs = self._run(feeds, requested)
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the request
            if len(feeds) == 1:
                return [_failed(error)]
            # One bad request must not fail the others of its batch.
            return [answer for feed in feeds for answer in self._answer([feed], requested)]
        named = ([*map(pb_utils.Tensor, requested, arrays)] for arrays in outputs)
        return [pb_utils.InferenceResponse(output_tensors=tensors) for tensors in named]

    def _run(self, feeds: list[Feed], requested: tuple[str, ...]) -> list[Any]:
        if len(feeds) == 1:
            return [self.run(feeds[0], requested).values()]
        rows = [len(feed[self.inputs[0]]) for feed in feeds]
        stacked = {name: np.concatenate([feed[name] for feed in feeds]) for name in self.inputs}
        outputs = self.run(stacked, requested)
        for name, array in outputs.items():
            if array.shape[:1] != (sum(rows),):
                raise ValueError(f"output {name!r} has shape {array.shape} for {sum(rows)} rows")
        edges = np.cumsum(rows)[:-1]
        return list(zip(*(np.split(array, edges) for array in outputs.values()), strict=True))


def _manifest(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a version's manifest, or the same entries from the model's configuration."""
    path = folder / sonic_runner.MANIFEST
    if path.is_file():
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return manifest
    if not config["input"] or not config["output"]:
        raise ValueError(
            f"expected the inputs and outputs of {folder} in its config.pbtxt, got none; "
            "build_repository writes them"
        )
    rows = [-1] if int(config.get("max_batch_size", 0)) > 0 else []
    outputs = [
        {
            "name": spec["name"],
            "dtype": np.dtype(pb_utils.triton_string_to_numpy(spec["data_type"])).name,
            "shape": [*rows, *map(int, spec.get("reshape", {}).get("shape", spec["dims"]))],
        }
        for spec in config["output"]
    ]
    kind = "torchscript" if config.get("backend") == "pytorch" else "onnx"
    file = config.get("default_model_filename") or "model.onnx"
    return {"kind": kind, "file": file, "inputs": config["input"], "outputs": outputs}


def _failed(error: Exception) -> Any:
    message = f"{type(error).__name__}: {error}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
