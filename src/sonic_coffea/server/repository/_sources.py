"""What is served: model files and Python functions, and what they say of their tensors.

The kinds of models are those that `_runner` loads.
"""

from __future__ import annotations

import inspect
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from sonic_coffea._extras import needed
from sonic_coffea.errors import ConfigError, expect, require
from sonic_coffea.transport import DATATYPES

# What a model is, as its versions' manifests begin: kind, file, inputs, outputs, platform, which is
# the backend, whether it is batched, and what the kind adds.
Manifest = dict[str, Any]
# The files of a version's folder, by their names there; the backend opens the first.
Files = dict[str, Path]
# Name, numpy's name of the dtype, and shape, as in the manifest; -1 is an axis of any length.
Tensor = dict[str, Any]
# Tensor name to numpy's name of the type and the shape; an axis of any length is -1 or a name.
Declaration = Mapping[str, tuple[str, Sequence[int | str]]]
# What a file says of its model: inputs and outputs, and more entries of the manifest.
Description = dict[str, Any]

TRITON_TYPES = {numpy: f"TYPE_{kserve}" for kserve, numpy in DATATYPES.items()}
TRITON_TYPES |= dict.fromkeys(("bytes", DATATYPES["BYTES"]), "TYPE_STRING")
# The backends that NVIDIA's container has. That of TorchScript wants names of outputs that end in
# their number.
NATIVE = {"onnx": "onnxruntime", "torchscript": "pytorch"}
# Names of types in onnx that differ from numpy's.
_DTYPES = {"float": "float32", "double": "float64", "string": "bytes"}


@dataclass(frozen=True)
class Served:
    """A model to serve: its file or function, and what the file does not say.

    Parameters
    ----------
    source : path-like or callable
        An ONNX (``.onnx``), TorchScript (``.pt``), XGBoost (``.json``, ``.ubj``) or LightGBM
        (``.txt``) file, or a Python function: the function itself, or ``"file.py:function"``. The
        file that defines the function is copied; nothing is pickled.
    inputs, outputs : mapping, optional
        Tensor names with types and shapes, such as ``{"hits": ("float32", [-1, 4])}``. Functions
        and TorchScript need them. TorchScript's inputs are found by the names of its arguments, or
        by numbers after ``__``, or else by their order; its outputs by numbers, or by their order.
        An axis of any length is -1 or a name. Triton batches requests only if the first axes of all
        inputs have one name, or if there is one input.
    files : sequence of path-like
        Files that the function reads or imports; they are copied beside its source.
    max_batch_size : int, optional
        The argument of `build_repository`, for this model.
    platform : {"python", "onnxruntime", "pytorch"}, optional
        The argument of `build_repository`, for this model.
    warmup : mapping, optional
        Input names with the shapes of the warm-up request, for a model with axes of any length:
        the shape of one row if the model is served in batches, otherwise of the whole tensor.
        Other inputs have the shapes that they are declared with.
    """

    source: str | os.PathLike[str] | Callable[..., Mapping[str, Any]]
    _: KW_ONLY
    inputs: Declaration | None = None
    outputs: Declaration | None = None
    files: Sequence[str | os.PathLike[str]] = ()
    max_batch_size: int | None = None
    platform: str | None = None
    warmup: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for option in ("inputs", "outputs", "warmup"):
            value = getattr(self, option)
            is_dict = value is None or isinstance(value, Mapping)
            expect(is_dict, f"{option} as a dict by tensor", value)
        expect(is_list(self.files), "files as a list of paths", self.files)


def is_list(value: Any) -> bool:
    """Whether an option is a sequence, such as a list, and not one name."""
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)


def read_source(name: str, served: Served, platform: str | None = None) -> tuple[Manifest, Files]:
    """Read what a model is, without running it, and which files it is made of."""
    suffix = Path(str(served.source)).suffix.lower().partition(":")[0]
    if callable(served.source):  # it is also given as file.py:function
        suffix = ".py"
    suffixes = f"a file of a kind that can be served ({', '.join(_KINDS)})"
    expect(suffix in _KINDS, f"{suffixes} for model {name!r}", str(served.source))
    kind, read = _KINDS[suffix]
    if served.files and kind != "function":
        raise ConfigError(f"files go with a function, and model {name!r} is of kind {kind}")
    platform = served.platform or platform or ("onnxruntime" if kind == "onnx" else "python")
    if platform not in ("python", NATIVE.get(kind)):
        raise ConfigError(
            f"platform {platform!r} cannot run model {name!r}, which is of kind {kind}; "
            "Served(source, platform='python') chooses another for one model"
        )
    try:
        with needed("onnx", f"reading {served.source}"):
            files, described = read(served)
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}"
        raise ConfigError(f"{problem} (model {name!r})") from None
    except ValueError as error:
        raise ConfigError(f"{error} (model {name!r})") from None
    declared = {"inputs": served.inputs, "outputs": served.outputs}
    if any(tensors is not None for tensors in declared.values()):
        described |= declared
    inputs, outputs = (described.pop(side, None) for side in declared)
    if not inputs or not outputs:
        raise ConfigError(
            "expected the inputs and outputs, which cannot be read from its file: "
            'Served(source, inputs={"x": ("float32", [-1, 8])}, '
            f'outputs={{"scores": ("float32", [-1, 2])}}) (model {name!r})'
        )
    # Digests depend on the order of the entries.
    manifest = {
        "kind": kind,
        "file": next(iter(files)),
        "platform": platform,
        "inputs": [_tensor(name, *item) for item in inputs.items()],
        "outputs": [_tensor(name, *item) for item in outputs.items()],
        "batched": _batched(inputs, outputs),
        **described,
    }
    return manifest, files


def _tensor(model: str, name: str, declaration: Any) -> Tensor:
    where = f"tensor {name!r} of model {model!r}"
    try:
        dtype, axes = declaration
        shape = [-1 if isinstance(axis, str) else index(axis) for axis in axes]
    except (TypeError, ValueError):
        raise ConfigError(
            f'expected {where} as a type and a shape such as ("float32", [-1, 8]), '
            f"got {declaration!r}"
        ) from None
    are_lengths = shape and all(length >= 1 or length == -1 for length in shape)
    expect(are_lengths, f"axes of {where}, each of at least 1, or -1 for any", shape)
    require([dtype], TRITON_TYPES, f"{where} has an unknown type")
    return {"name": name, "dtype": dtype, "shape": shape}


def _batched(inputs: Declaration, outputs: Declaration) -> bool:
    """Whether requests can be stacked: the first axis of every tensor counts the rows.

    The axis has any length, and the same name in all inputs. A graph with nodes and row splits has
    axes of different names, and stacked requests would be another graph. First axes that are -1 may
    count different rows.
    """
    first = [shape[0] for _, shape in (*inputs.values(), *outputs.values())]
    rows = {axis if axis != -1 else i for i, axis in enumerate(first[: len(inputs)])}
    return len(rows) == 1 and all(axis == -1 or isinstance(axis, str) for axis in first)


def _read_onnx(served: Served) -> tuple[Files, Description]:
    """Read the tensors of an ONNX file, not its weights."""
    import onnx

    path = Path(str(served.source))
    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
    except Exception:  # noqa: BLE001  the protobuf runtime in use decides which class this is
        model = onnx.ModelProto()
    graph = model.graph
    if not graph.node or not graph.output:
        raise ValueError(f"expected an ONNX file, got {path}, which holds no ONNX graph")
    initializers = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initializers]
    return {"model.onnx": path, **_external(model, path)}, {
        "inputs": {value.name: _onnx_tensor(value, "input", path) for value in inputs},
        "outputs": {value.name: _onnx_tensor(value, "output", path) for value in graph.output},
    }


def _onnx_tensor(value: Any, kind: str, path: Path) -> tuple[str, list[int | str]]:
    import onnx

    where = f"{kind} {value.name!r} of {path}"
    got = value.type.WhichOneof("value")
    if got != "tensor_type":
        advice = " (convert scikit-learn models with zipmap=False)" if got else ""
        raise ValueError(f"expected {where} to be a tensor, got {got}{advice}")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        raise ValueError(
            f"expected {where} to declare a shape, got none; "
            "onnx.shape_inference.infer_shapes can add it"
        )
    name = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    # A first axis that several inputs call alike, or not at all, counts the rows.
    shape = [
        axis.dim_value if axis.dim_value > 0 else -1 if i else axis.dim_param
        for i, axis in enumerate(tensor.shape.dim)
    ]
    return _DTYPES.get(name, name), shape


def _external(model: Any, path: Path) -> dict[str, Path]:
    """Return the files beside it that hold its weights, by their names.

    A copy of `name` must be where it is copied to, also if a link is on the way.
    """
    from onnx.external_data_helper import ExternalDataInfo, _get_all_tensors, uses_external_data

    tensors = filter(uses_external_data, _get_all_tensors(model))
    files = {name: path.parent / name for name in {ExternalDataInfo(t).location for t in tensors}}
    for name, file in files.items():
        is_inside = file.resolve().is_relative_to(path.parent.resolve())
        if ".." in Path(name).parts or not is_inside or not file.is_file():
            raise ValueError(f"expected the weights file {name!r} beside {path}, got none there")
    return files


def _read_torchscript(served: Served) -> tuple[Files, Description]:
    """Check that a file holds code; one that torch.save has written does not."""
    path = Path(str(served.source))
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        names = []
    if not any(name.partition("/")[2].startswith("code/") for name in names):
        raise ValueError(
            f"expected a TorchScript file, got {path}, which holds no TorchScript code "
            "(torch.jit.save writes one, torch.save does not)"
        )
    return {"model.pt": path}, {}


def _read_xgboost(served: Served) -> tuple[Files, Description]:
    path = Path(str(served.source))
    suffix = path.suffix.lower()
    files = {f"model{suffix}": path}
    try:
        content: bytes | bytearray = path.read_bytes()
        if suffix != ".json":
            import xgboost

            # Only XGBoost itself reads its binary form.
            content = xgboost.Booster(model_file=str(path)).save_raw("json")
        learner = json.loads(content)["learner"]
        booster, sizes = learner.get("gradient_booster", {}), learner["learner_model_param"]
        # The class alone, rather than one number for each.
        chosen = learner["objective"]["name"] == "multi:softmax"
        features, classes = int(sizes["num_feature"]), int(sizes.get("num_class", 0))
        width = max(1 if chosen else classes, int(sizes.get("num_target", 1)), 1)
        names = list(learner.get("feature_names", ()))
    except ImportError:
        if served.inputs is None:
            raise ValueError(
                f"reading {path} needs the xgboost package here; save the trees as .json, or "
                "declare inputs= and outputs= with Served"
            ) from None
        return files, {}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected XGBoost trees in {path}: {error!r}") from None
    if booster.get("name") == "gblinear":
        raise ValueError(f"expected XGBoost trees in {path}, got a linear model (gblinear)")
    trees = booster.get("gbtree", booster).get("model", {})  # those of dart are in another place
    categories = trees.get("cats", {"enc": []})["enc"]
    # The values of others are the letters of their names.
    _check_categories(served, [c["values"] for c in categories if "offsets" not in c])
    return files, _trees(names, features, ("float32", [-1, width]))


def _read_lightgbm(served: Served) -> tuple[Files, Description]:
    path = Path(str(served.source))
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.partition("\nTree=")[0].splitlines()
    head = dict(line.split("=", 1) for line in lines if "=" in line)
    try:
        features, classes = int(head["max_feature_idx"]) + 1, int(head["num_class"])
    except (KeyError, ValueError):
        raise ValueError(
            f"expected LightGBM trees in {path}, which has no max_feature_idx or num_class"
        ) from None
    categories = text.partition("\npandas_categorical:")[2].partition("\n")[0]
    _check_categories(served, json.loads(categories or "null") or [])
    names = head.get("feature_names", "").split()
    return {"model.txt": path}, _trees(names, features, ("float64", [-1, classes]))


def _check_categories(served: Served, categories: list[list[Any]]) -> None:
    """Refuse trees that were trained on pandas categories which are other numbers than their codes.

    The trees take the codes, and would take the numbers for codes of others.
    """
    for numbers in categories:
        codes = {number: code for code, number in enumerate(numbers)}
        is_numeric = all(isinstance(number, int | float) for number in numbers)
        if served.inputs is None and is_numeric and any(n != code for n, code in codes.items()):
            raise ValueError(
                f"{served.source} was trained on a pandas category, whose codes its trees take in "
                f"place of the numbers; train on the codes, or declare inputs= and outputs= with "
                f"Served, and send the codes: Feature(name, categories={codes})"
            )


def _trees(names: list[str], features: int, scores: tuple[str, list[int]]) -> Description:
    inputs = {"features": ("float32", [-1, features])}
    return {"inputs": inputs, "outputs": {"scores": scores}, "features": names}


def _read_function(served: Served) -> tuple[Files, Description]:
    """Locate a function and the files that go with it; whether it runs, the server says."""
    source = served.source
    path, name = _locate(source) if callable(source) else _split(str(source))
    files: Files = {}
    for file in (path, *map(Path, served.files)):
        if not file.is_file():
            raise ValueError(f"expected a file, got {file}, which is not a file")
        # In a folder of their own, where no name is taken.
        if files.setdefault(f"source/{file.name}", file) != file:
            raise ValueError(f"expected files of different names, got two called {file.name!r}")
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"expected Python source in {path}: {error}") from None
    if name not in code.co_names:
        raise ValueError(f"no function {name!r} at the top of {path}")
    return files, {"function": name}


def _split(source: str) -> tuple[Path, str]:
    file, _, name = source.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"expected a function, got {source}; it is given as '{source}:function'")
    return Path(file), name


def _locate(function: Callable[..., Any]) -> tuple[Path, str]:
    name = getattr(function, "__qualname__", repr(function))
    inner = inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(inner)
    except TypeError:
        file = None
    # Else the file has another function by this name, such as the one that this one wraps.
    if getattr(inner, "__globals__", {}).get(name, function) is not function:
        raise ValueError(f"expected the function that is called {name!r} in {file}, got another")
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise ValueError(
            "expected a function that is defined at the top of a file, whose source can be copied, "
            f"got {name}; write it to a file and pass 'file.py:function'"
        )
    return Path(file), name


# By the suffix of a model's file: its kind, and the function that reads it, whose ValueError says
# what is wrong with the file.
_KINDS: Mapping[str, tuple[str, Callable[[Served], tuple[Files, Description]]]] = {
    ".onnx": ("onnx", _read_onnx),
    ".pt": ("torchscript", _read_torchscript),
    ".json": ("xgboost", _read_xgboost),
    ".ubj": ("xgboost", _read_xgboost),
    ".txt": ("lightgbm", _read_lightgbm),
    ".py": ("function", _read_function),
}
