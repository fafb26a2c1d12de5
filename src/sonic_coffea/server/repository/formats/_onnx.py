"""ONNX networks: reads the tensors of a file, and runs it by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonic_coffea.server.repository.formats import Contents, Runner, Served

# Names of types in onnx that differ from numpy's.
_DTYPES = {"float": "float32", "double": "float64", "string": "bytes"}


def read(served: Served) -> Contents:
    """Read the tensors of an ONNX file, not its weights."""
    path = Path(str(served.source))
    model = _load(path)
    graph = model.graph
    initializers = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initializers]
    return {
        "files": {"model.onnx": path, **_external(model, path)},
        "inputs": {value.name: _tensor(value, "input", path) for value in inputs},
        "outputs": {value.name: _tensor(value, "output", path) for value in graph.output},
    }


def load(path: Path, manifest: dict[str, Any], threads: int) -> Runner:
    import onnxruntime

    del manifest
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(path), sess_options=options, providers=["CPUExecutionProvider"]
    )
    return lambda feed, requested: dict(zip(requested, session.run(requested, feed), strict=True))


def _load(path: Path) -> Any:
    import onnx

    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
    except Exception:  # noqa: BLE001  the protobuf runtime in use decides which class this is
        model = onnx.ModelProto()
    if not model.graph.node or not model.graph.output:
        raise ValueError(f"expected an ONNX file, got {path}, which holds no ONNX graph")
    return model


def _tensor(value: Any, kind: str, path: Path) -> tuple[str, list[int | str]]:
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
