"""Runs a model: a network, trees, or a Python function, in this process or in Triton's.

Triton's Python backend runs copies of this file: ``model.py`` in model repositories, and beside the
local server in place of the native backends. So it imports nothing of this package, and a library
of models only when a model needs it. The file to run is named in ``sonic-manifest.json``, or, as
for the native backends, in the model's configuration.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# From input tensors by name, and the names of the requested outputs, to outputs by name.
Runner = Callable[[dict[str, Any], Sequence[str]], dict[str, Any]]

SCRIPT = Path(__file__)
MANIFEST = "sonic-manifest.json"
# The folder of Python's compiled modules.
_IGNORED = "__pycache__"
# The parameters that set the threads of this backend, and of the native backends.
THREADS = ("intra_op_threads", "intra_op_thread_count", "INTRA_OP_THREAD_COUNT")

# A thread of Triton's library writes to shared memory every 0.3 s. After a second without a write,
# Triton considers this process dead, and answers its requests with errors. If the process only
# stalled, Triton would take its late answer for the answer to the next request. That thread cannot
# be observed, so a stall of the thread below counts as a stall of both; the interpreter's lock may
# have caused it.
_STALL_S = float(os.environ.get("SONIC_COFFEA_STALL_S", "0.65"))


def load(path: Path, manifest: Mapping[str, Any], threads: int) -> Runner:
    """Load a version's file; return what runs it, and returns the requested outputs.

    Requests and responses hold strings as bytes. Models take them as text, and may return either.
    The runner raises a ValueError if an output is not there, or has another shape or dtype than
    declared, and a TypeError if strings are declared, and an output holds other objects.
    """
    run = _LOADERS[manifest["kind"]](path, manifest, threads)
    declared = {tensor["name"]: tensor for tensor in manifest["outputs"]}

    def run_declared(feed: dict[str, Any], requested: Sequence[str]) -> dict[str, Any]:
        texts = {n: _each(bytes.decode, t) if t.dtype == np.object_ else t for n, t in feed.items()}
        returned = run(texts, requested)
        return {name: _as_declared(declared[name], returned) for name in requested}

    return run_declared


def _as_declared(declared: Mapping[str, Any], returned: Mapping[str, Any]) -> Any:
    """Return a declared tensor of those that a model returned."""
    name, dtype, shape = (declared[entry] for entry in ("name", "dtype", "shape"))
    if name not in returned:
        names = ", ".join(map(repr, returned)) or "nothing"
        raise ValueError(f"output {name!r} is declared, but the model returned {names}")
    if np.ma.is_masked(returned[name]):
        raise ValueError(f"output {name!r} has masked values; expected an array without a mask")
    array = np.asarray(returned[name])
    is_text = array.dtype.kind in "OSU"
    got = "bytes" if is_text else array.dtype.name
    fits = len(array.shape) == len(shape) and all(
        want in (-1, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits or got != dtype.replace("object", "bytes"):
        raise ValueError(
            f"output {name!r} is declared {dtype} {shape}, "
            f"but the model returned {got} {list(array.shape)}"
        )
    if is_text:
        return _each(_encoded, array)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))  # in this machine's order


def _encoded(value: Any) -> bytes:
    # Triton would write None and numbers as text.
    if not isinstance(value, str | bytes):
        raise TypeError(f"expected strings as declared, but the model returned {value!r}")
    return value.encode() if isinstance(value, str) else value


def _each(function: Callable[[Any], Any], array: Any) -> Any:
    return np.vectorize(function, otypes=[np.object_])(array)


def _load_onnx(path: Path, _manifest: Mapping[str, Any], threads: int) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(path), sess_options=options, providers=["CPUExecutionProvider"]
    )
    return lambda feed, requested: dict(zip(requested, session.run(requested, feed), strict=True))


def _load_torchscript(path: Path, manifest: Mapping[str, Any], threads: int) -> Runner:
    import torch  # type: ignore[import-not-found,unused-ignore]

    if threads:
        torch.set_num_threads(threads)
    module = torch.jit.load(str(path), map_location="cpu").eval()
    inputs, outputs = (_places(manifest[kind]) for kind in ("inputs", "outputs"))
    are_arguments = {*inputs} <= {argument.name for argument in module.forward.schema.arguments}

    def run(feed: dict[str, Any], _requested: Sequence[str]) -> dict[str, Any]:
        # A copy: the server's memory is read-only, which torch does not know.
        given = {name: torch.from_numpy(array.copy()) for name, array in feed.items()}
        with torch.inference_mode():
            if are_arguments:
                tensors = module(**given)
            else:
                tensors = module(*(given[name] for name in sorted(given, key=inputs.__getitem__)))
        if not isinstance(tensors, dict):
            listed = tensors if isinstance(tensors, tuple | list) else [tensors]
            tensors = {name: listed[k] for name, k in outputs.items() if k < len(listed)}
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    return run


def _places(tensors: list[dict[str, Any]]) -> dict[str, int]:
    """Return the places of tensors as Triton's own backend has them.

    They are the numbers after ``__``, or else those in the configuration.
    """
    names = [tensor["name"] for tensor in tensors]
    numbers = [name.partition("__")[2] for name in names]
    is_numbered = all(number.isdecimal() for number in numbers)
    return dict(zip(names, map(int, numbers) if is_numbered else range(len(names)), strict=True))


def _load_trees(path: Path, manifest: Mapping[str, Any], threads: int) -> Runner:
    (output,) = manifest["outputs"]
    predict: Callable[[Any], Any]
    if path.suffix == ".txt":
        import lightgbm  # type: ignore[import-not-found,unused-ignore]

        trees = lightgbm.Booster(model_file=str(path))
        predict = functools.partial(trees.predict, num_threads=threads)
    else:
        import xgboost  # type: ignore[import-not-found,unused-ignore]

        forest = xgboost.Booster({"nthread": threads}, model_file=str(path))
        # Of trees that stopped early, XGBoost's own estimators use those up to the best; 0 is all.
        count = int(forest.attr("best_iteration") or -1) + 1
        predict = functools.partial(forest.inplace_predict, iteration_range=(0, count))

    def run(feed: dict[str, Any], _requested: Sequence[str]) -> dict[str, Any]:
        (rows,) = feed.values()
        scores = np.asarray(predict(rows), output["dtype"])
        # One number a row comes without an axis for it.
        return {output["name"]: scores.reshape(len(rows), *output["shape"][1:])}

    return run


def _load_function(path: Path, manifest: Mapping[str, Any], _threads: int) -> Runner:
    function = getattr(_importer(path.parent)(path.stem), manifest["function"])
    # Users' code need not be safe for threads: a Triton runs it once at a time, too.
    one_at_a_time = threading.Lock()

    def run(feed: dict[str, Any], _requested: Sequence[str]) -> dict[str, Any]:
        with one_at_a_time:
            # Copies: a function may write to its inputs, which may be the user's own arrays.
            outputs = function(**{name: array.copy() for name, array in feed.items()})
            if not isinstance(outputs, dict):
                raise TypeError(
                    f"expected {manifest['function']} to return a dict of arrays, "
                    f"got {type(outputs).__name__}"
                )
            # The next call may write to the same arrays.
            return {name: np.array(values, subok=True) for name, values in outputs.items()}

    return run


def _importer(folder: Path) -> Callable[..., Any]:
    """Return the ``__import__`` of a model's files, which finds these files before other modules.

    Other models of the process, and the process itself, may have modules of the same names.
    """
    loaded: dict[str, Any] = {}

    def load_or_import(name: str, *context: Any, **options: Any) -> Any:
        file = folder / f"{name}.py"
        if name in loaded or not file.is_file():
            return loaded.get(name) or builtins.__import__(name, *context, **options)
        module = types.ModuleType(f"sonic_served_{id(loaded)}_{name}")
        module.__file__ = str(file)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": load_or_import}
        loaded[name] = sys.modules[module.__name__] = module
        try:
            # Python's loaders take what they compiled before from a file as old and as long.
            code = compile(file.read_bytes(), file, "exec", dont_inherit=True)
            exec(code, module.__dict__)  # noqa: S102
        except BaseException:
            del loaded[name]
            raise
        return module

    return load_or_import


_LOADERS: Mapping[str, Callable[[Path, Mapping[str, Any], int], Runner]] = {
    "onnx": _load_onnx,
    "torchscript": _load_torchscript,
    "xgboost": _load_trees,
    "lightgbm": _load_trees,
    "function": _load_function,
}


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def changes(folder: Path, manifest: Mapping[str, Any], served_digest: str | None) -> list[str]:
    """Say what has changed in a version since the build: its files, and its digest for clients.

    `served_digest` is the digest in the model's configuration, which reaches clients.
    """
    expected = {folder / name: digest for name, digest in manifest.get("files", {}).items()}
    present = {path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST}
    messages = []
    for path in sorted(present | expected.keys()):
        if path not in expected:
            if _IGNORED not in path.parts:
                messages.append(f"{path} is new")
        elif not path.is_file():
            messages.append(f"{path} is gone")
        elif checksum(path) != expected[path]:
            messages.append(f"{path} was changed")
    if served_digest not in (None, manifest.get("digest", served_digest)):
        # As after a copy of a version's folder from another repository.
        config = folder.parent / "config.pbtxt"
        messages.append(f"the digest of version {folder.name} in {config} was changed")
    return messages


def check_unchanged(changed: Sequence[str], error: type[Exception] = ValueError) -> None:
    """Refuse a version whose scores would be taken for those of other files.

    New files are left alone: a function may have written them.
    """
    for change in changed:
        if not change.endswith(" is new"):
            raise error(
                f"{change} since the version was built, and clients would take its scores for "
                "those of the file before; build it again with the option overwrite, or as the "
                "version 'next'"
            )


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
        self.triton = importlib.import_module("triton_python_backend_utils")
        manifest = self._manifest(folder, config)
        parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        # Files may be replaced before a restart, or while the server polls.
        served_digest = parameters.get(f"sha256.{folder.name}")
        check_unchanged(changes(folder, manifest, served_digest))
        # For pickles, and modules that are no .py files; no other model is in this process.
        path = folder / manifest["file"]
        sys.path.append(str(path.parent))
        limits = (parameters.get(key) for key in THREADS)
        threads = next(filter(None, limits), os.environ.get("OMP_NUM_THREADS", "0"))
        try:
            self.run = load(path, manifest, int(threads) if threads.isdigit() else 0)
        except ImportError as error:
            raise ImportError(
                f"model {args['model_name']!r} needs {error.name}, which the server's environment "
                f"lacks ({error}); add it: sonic-coffea server install --with {error.name}"
            ) from None
        self.batched = int(config.get("max_batch_size", 0)) > 0
        self.inputs = [spec["name"] for spec in config["input"]]
        self.pulse = Pulse()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request; one that fails gets an error of its own."""
        self.pulse.begin()
        live = [request for request in requests if not request.is_cancelled()]
        answers = dict(zip(map(id, live), self._answer(live), strict=True))
        cancelled = self._failed("cancelled", self.triton.TritonError.CANCELLED)
        responses = [answers.get(id(request), cancelled) for request in requests]
        self.pulse.end()
        return responses

    def _answer(self, requests: list[Any]) -> list[Any]:
        """Answer requests by one run; if that fails, each by a run of its own."""
        if len(requests) == 1 or self.batched:
            try:
                return self._run(requests)
            except (Exception, SystemExit) as error:  # noqa: BLE001  of the request
                if len(requests) == 1:
                    return [self._failed(f"{type(error).__name__}: {error}")]
        return [answer for request in requests for answer in self._answer([request])]

    def _run(self, requests: list[Any]) -> list[Any]:
        tensor_of, tensor = self.triton.get_input_tensor_by_name, self.triton.Tensor
        feeds = [{n: tensor_of(r, n).as_numpy() for n in self.inputs} for r in requests]
        requested = [sorted(request.requested_output_names()) for request in requests]
        outputs = self._run_stacked(feeds, sorted(set().union(*requested)))
        return [
            self.triton.InferenceResponse([tensor(name, arrays[name]) for name in names])
            for names, arrays in zip(requested, outputs, strict=True)
        ]

    def _run_stacked(self, feeds: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
        if len(feeds) == 1:
            return [self.run(feeds[0], names)]
        rows = [len(feed[self.inputs[0]]) for feed in feeds]
        stacked = {name: np.concatenate([feed[name] for feed in feeds]) for name in self.inputs}
        outputs = self.run(stacked, names)
        for name, array in outputs.items():
            if array.shape[:1] != (sum(rows),):
                raise ValueError(f"output {name!r} has shape {array.shape} for {sum(rows)} rows")
        parts = zip(*(np.split(outputs[n], np.cumsum(rows)[:-1]) for n in names), strict=True)
        return [dict(zip(names, arrays, strict=True)) for arrays in parts]

    def _failed(self, message: str, *code: Any) -> Any:
        return self.triton.InferenceResponse(error=self.triton.TritonError(message, *code))

    def _manifest(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        """Return a version's manifest, or the same entries from the model's configuration."""
        path = folder / MANIFEST
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
                "dtype": np.dtype(self.triton.triton_string_to_numpy(spec["data_type"])).name,
                "shape": [*rows, *map(int, spec.get("reshape", {}).get("shape", spec["dims"]))],
            }
            for spec in config["output"]
        ]
        kind = "torchscript" if config.get("backend") == "pytorch" else "onnx"
        file = config.get("default_model_filename") or "model.onnx"
        tensors = {"inputs": config["input"], "outputs": outputs}
        # A configuration that was copied from another model has the digest of that model's file.
        return {"kind": kind, "file": file, **tensors, "digest": checksum(folder / file)}
