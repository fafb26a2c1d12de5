"""Runs a model: in Triton's Python backend, and in this process.

Copied beside ``model.py`` as ``sonic_runner.py``: it imports nothing of this package, and a library
of models only when a model needs it.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# From input tensors by name, and the names of the requested outputs, to outputs by name.
Runner = Callable[[dict[str, Any], Sequence[str]], dict[str, Any]]

MANIFEST = "sonic-manifest.json"
# The folder of Python's compiled modules.
_IGNORED = "__pycache__"


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
    return _each(_encoded, array) if is_text else np.ascontiguousarray(array)


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
            return {name: _copied(name, values) for name, values in outputs.items()}

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
        unique = f"sonic_served_{id(loaded)}_{name}"
        spec = importlib.util.spec_from_file_location(unique, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"expected Python source, got {file}")
        loaded[name] = module = importlib.util.module_from_spec(spec)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": load_or_import}
        sys.modules[module.__name__] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del loaded[name]
            raise
        return module

    return load_or_import


def _copied(name: str, values: Any) -> Any:
    """Return a new array in the byte order of this machine, which has a value everywhere."""
    if np.ma.is_masked(values):
        raise ValueError(f"output {name!r} has masked values; expected an array without a mask")
    array = np.asarray(values)
    return array.astype(array.dtype.newbyteorder("="))


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


def changes(folder: Path, manifest: Mapping[str, Any], told: str | None) -> list[str]:
    """Say what has changed in a version since the build: its files, and its digest for clients.

    `told` is the digest in the model's configuration, which reaches clients.
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
    if told not in (None, manifest.get("digest", told)):
        # As after a copy of a version's folder from another repository.
        config = folder.parent / "config.pbtxt"
        messages.append(f"the digest of version {folder.name} in {config} was changed")
    return messages


def check_unchanged(changed: Sequence[str]) -> None:
    """Refuse a version whose scores would be taken for those of other files.

    New files are left alone: a function may have written them.
    """
    for change in changed:
        if not change.endswith(" is new"):
            raise ValueError(
                f"{change} since the version was built, and clients would take its scores for "
                "those of the file before; build it again with the option overwrite, or as the "
                "version 'next'"
            )
