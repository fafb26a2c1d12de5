"""What is served: model files and Python functions, and what they say of their tensors.

The kinds of models are those that `_runner` loads.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# Inputs and outputs, if they are declared.
Declared = Mapping[str, Declaration | None]
# What a file says of its model: inputs and outputs, more entries of the manifest, and `files`, if a
# version has several.
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


@contextlib.contextmanager
def naming(model: str) -> Iterator[None]:
    """Name the model in the errors of a block."""
    try:
        yield
    except ConfigError as error:
        raise error.at(model=model) from None


def read_source(served: Served, platform: str | None = None) -> tuple[Manifest, Files]:
    """Read what a model is, without running it, and which files it is made of."""
    source = _locate(served.source) if callable(served.source) else str(served.source)
    file, _, function = source.rpartition(":") if ".py:" in source else (source, "", "")
    path = Path(file).expanduser()
    suffix = path.suffix.lower()
    expect(suffix in _KINDS, f"a file of a kind that can be served ({', '.join(_KINDS)})", source)
    kind, read = _KINDS[suffix]
    expect(kind == "function" or not served.files, "files only beside a function", served.files)
    platform = served.platform or platform or ("onnxruntime" if kind == "onnx" else "python")
    if platform not in ("python", NATIVE.get(kind)):
        raise ConfigError(
            f"platform {platform!r} cannot run a model of kind {kind}; "
            "Served(source, platform='python') chooses another for one model"
        )
    declared: Declared = {"inputs": served.inputs, "outputs": served.outputs}
    if served.inputs is None and served.outputs is None:
        declared = {}
    try:
        with needed("onnx", f"reading {path}"):
            described = read(path, function, declared)
        files = described.pop("files", {f"model{suffix}": path})
        for more in map(Path, served.files):
            # In a folder of their own, where no name is taken.
            name = f"source/{more.name}"
            expect(files.setdefault(name, more) == more, "files of different names", more.name)
        for each in files.values():
            each.open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    described |= declared
    inputs, outputs = (described.pop(side, None) for side in ("inputs", "outputs"))
    if not inputs or not outputs:
        raise ConfigError(
            "expected the inputs and outputs, which cannot be read from its file: "
            'Served(source, inputs={"x": ("float32", [-1, 8])}, '
            'outputs={"scores": ("float32", [-1, 2])})'
        )
    # Digests depend on the order of the entries.
    manifest = {
        "kind": kind,
        "file": next(iter(files)),
        "platform": platform,
        "inputs": [_tensor(*item) for item in inputs.items()],
        "outputs": [_tensor(*item) for item in outputs.items()],
        "batched": _batched(inputs, outputs),
        **described,
    }
    return manifest, files


def _tensor(name: str, declaration: Any) -> Tensor:
    try:
        dtype, axes = declaration
        shape = [-1 if isinstance(axis, str) else index(axis) for axis in axes]
    except (TypeError, ValueError):
        raise ConfigError(
            f'expected tensor {name!r} as a type and a shape such as ("float32", [-1, 8]), '
            f"got {declaration!r}"
        ) from None
    are_lengths = shape and all(length >= 1 or length == -1 for length in shape)
    expect(are_lengths, f"axes of tensor {name!r}, each of at least 1, or -1 for any", shape)
    require([dtype], TRITON_TYPES, f"tensor {name!r} has an unknown type")
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


def _read_onnx(path: Path, _function: str, _declared: Declared) -> Description:
    """Read the tensors of an ONNX file, not its weights."""
    import onnx

    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
    except Exception:  # noqa: BLE001  the protobuf runtime in use decides which class this is
        model = onnx.ModelProto()
    graph = model.graph
    if not graph.node or not graph.output:
        raise ConfigError(f"expected an ONNX file, got {path}, which holds no ONNX graph")
    initializers = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initializers]
    return {
        "inputs": {value.name: _onnx_tensor(value) for value in inputs},
        "outputs": {value.name: _onnx_tensor(value) for value in graph.output},
        "files": {"model.onnx": path, **{name: _beside(path, name) for name in _weights(model)}},
    }


def _onnx_tensor(value: Any) -> tuple[str, list[int | str]]:
    import onnx

    got, tensor = value.type.WhichOneof("value"), value.type.tensor_type
    form = "to be a tensor (convert scikit-learn models with zipmap=False)"
    expect(got == "tensor_type", f"{value.name!r} {form}", got)
    form = "to have a shape (onnx.shape_inference.infer_shapes can add one)"
    expect(tensor.HasField("shape"), f"{value.name!r} {form}", None)
    name = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    # A first axis that several inputs call alike, or not at all, counts the rows.
    shape = [
        axis.dim_value if axis.dim_value > 0 else -1 if i else axis.dim_param
        for i, axis in enumerate(tensor.shape.dim)
    ]
    return _DTYPES.get(name, name), shape


def _weights(message: Any) -> set[str]:
    """Return the names of the files of weights, also those of weights in branches."""
    names = {each.value for each in getattr(message, "external_data", ()) if each.key == "location"}
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if isinstance(value, Sequence) else [value]:
                names |= _weights(part)
    return names


def _beside(path: Path, name: str) -> Path:
    """Return a file beside another one; a copy must be where it is copied to, despite links."""
    file = path.parent / name
    is_inside = file.resolve().is_relative_to(path.parent.resolve())
    if ".." in Path(name).parts or not is_inside or not file.is_file():
        raise ConfigError(
            f"expected the weights file {name!r} beside {path}, got none there, or a link that "
            "leads out of this folder; copy the file that it leads to"
        )
    return file


def _read_torchscript(path: Path, _function: str, _declared: Declared) -> Description:
    """Check that a file holds code; one that torch.save has written does not."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        names = []
    if not any(name.partition("/")[2].startswith("code/") for name in names):
        raise ConfigError(
            f"expected a TorchScript file, got {path}, which holds no TorchScript code "
            "(torch.jit.save writes one, torch.save does not)"
        )
    return {}


def _read_xgboost(path: Path, _function: str, declared: Declared) -> Description:
    try:
        content: bytes | bytearray = path.read_bytes()
        if path.suffix.lower() != ".json":
            import xgboost

            # Only XGBoost itself reads its binary form.
            content = xgboost.Booster(model_file=str(path)).save_raw("json")
        learner = json.loads(content)["learner"]
        booster, sizes = learner.get("gradient_booster", {}), learner["learner_model_param"]
        # The class alone, rather than one number for each.
        chosen = learner["objective"]["name"] == "multi:softmax"
        features, classes = int(sizes["num_feature"]), int(sizes.get("num_class", 0))
        width = max(1 if chosen else classes, int(sizes.get("num_target", 1)), 1)
    except ImportError:
        if declared:
            return {}
        raise ConfigError(
            f"reading {path} needs the xgboost package here; save the trees as .json, or "
            "declare inputs= and outputs= with Served"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"expected XGBoost trees in {path}: {error!r}") from None
    if booster.get("name") == "gblinear":
        raise ConfigError(f"expected XGBoost trees in {path}, got a linear model (gblinear)")
    trees = booster.get("gbtree", booster).get("model", {})  # those of dart are in another place
    listed = trees.get("cats", {"enc": []})["enc"]
    # The values of others are the letters of their names.
    categories = [category["values"] for category in listed if "offsets" not in category]
    names = list(learner.get("feature_names", ()))
    return _trees(names, features, ("float32", [-1, width]), [] if declared else categories)


def _read_lightgbm(path: Path, _function: str, declared: Declared) -> Description:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.partition("\nTree=")[0].splitlines()
    head = dict(line.split("=", 1) for line in lines if "=" in line)
    try:
        features, classes = int(head["max_feature_idx"]) + 1, int(head["num_class"])
    except (KeyError, ValueError):
        raise ConfigError(
            f"expected LightGBM trees in {path}, which has no max_feature_idx or num_class"
        ) from None
    listed = text.partition("\npandas_categorical:")[2].partition("\n")[0]
    categories = json.loads(listed or "null") or []
    names = head.get("feature_names", "").split()
    return _trees(names, features, ("float64", [-1, classes]), [] if declared else categories)


def _trees(
    names: list[str], features: int, scores: tuple[str, list[int]], categories: list[list[Any]]
) -> Description:
    """Describe trees; refuse those of pandas categories which are other numbers than their codes.

    The trees take the codes, and would take the numbers for codes of others.
    """
    for numbers in categories:
        are_numbers = all(isinstance(number, int | float) for number in numbers)
        if are_numbers and numbers != list(range(len(numbers))):
            codes = {number: code for code, number in enumerate(numbers)}
            raise ConfigError(
                "the trees were trained on a pandas category, whose codes they take in place of "
                "the numbers; train on the codes, or declare inputs= and outputs= with Served, "
                f"and send the codes: Feature(name, categories={codes})"
            )
    inputs = {"features": ("float32", [-1, features])}
    return {"inputs": inputs, "outputs": {"scores": scores}, "features": names}


def _read_function(path: Path, name: str, _declared: Declared) -> Description:
    """Check that a file defines a function; whether it runs, the server says."""
    expect(name, f"a function of the file, which is given as '{path}:function'", str(path))
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"expected Python source in {path}: {error}") from None
    require([name], code.co_names, f"no function at the top of {path} is called")
    return {"function": name, "files": {f"source/{path.name}": path}}


def _locate(function: Callable[..., Any]) -> str:
    """Return a function as a file and a name."""
    name = getattr(function, "__qualname__", repr(function))
    inner = inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(inner)
    except TypeError:
        file = None
    # Else the file has another function by this name, such as the one that this one wraps.
    if getattr(inner, "__globals__", {}).get(name, function) is not function:
        raise ConfigError(f"expected the function that is called {name!r} in {file}, got another")
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise ConfigError(
            "expected a function that is defined at the top of a file, whose source can be copied, "
            f"got {name}; write it to a file and pass 'file.py:function'"
        )
    return f"{file}:{name}"


# By the suffix of a model's file: its kind, and the function that reads it. The function takes the
# path, the name of a function, and what is declared.
_KINDS: Mapping[str, tuple[str, Callable[[Path, str, Declared], Description]]] = {
    ".onnx": ("onnx", _read_onnx),
    ".pt": ("torchscript", _read_torchscript),
    ".json": ("xgboost", _read_xgboost),
    ".ubj": ("xgboost", _read_xgboost),
    ".txt": ("lightgbm", _read_lightgbm),
    ".py": ("function", _read_function),
}
