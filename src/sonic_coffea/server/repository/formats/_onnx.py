"""ONNX networks: reads the tensors of a file, and runs it by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonic_coffea.server.repository._served import Served
    from sonic_coffea.server.repository.formats import Contents, Runner

# Types that onnx calls otherwise than numpy, and onnxruntime otherwise than Triton. A server's
# environment has only onnxruntime, which reads there what a configuration leaves out.
_DTYPES = {"float": "float32", "double": "float64", "string": "bytes"}
_TRITON = {"float16": "TYPE_FP16", "float": "TYPE_FP32", "double": "TYPE_FP64"}


def read(served: Served) -> Contents:
    """Read the tensors of an ONNX file, not its weights."""
    path = Path(str(served.source))
    graph = _graph(path)
    initializers = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initializers]
    return {
        "files": {
            "model.onnx": path,
            **{name: path.parent / name for name in _external(graph, path)},
        },
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
    return lambda feed, wanted: dict(zip(wanted, session.run(wanted, feed), strict=True))


def tensors(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return inputs and outputs of a file as a model's configuration writes them."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs, outputs = (
        [
            {
                "name": node.name,
                "data_type": _TRITON.get(kind := node.type[len("tensor(") : -1])
                or f"TYPE_{kind.upper()}",
                "dims": [n if isinstance(n, int) and n > 0 else -1 for n in node.shape],
            }
            for node in nodes
        ]
        for nodes in (session.get_inputs(), session.get_outputs())
    )
    return inputs, outputs


def _graph(path: Path) -> Any:
    try:
        import onnx
    except ImportError:
        raise ImportError(
            "building a model repository from an ONNX file needs the onnx package: "
            'pip install "sonic-coffea[onnx]"'
        ) from None
    try:
        # If the file may not be read, the system's error says so: onnx has other words for that.
        graph = onnx.load_model_from_string(path.read_bytes()).graph
    except OSError:
        raise
    except Exception:  # noqa: BLE001  the protobuf runtime in use decides which class this is
        graph = None
    if graph is None or not graph.node or not graph.output:
        raise ValueError(f"expected an ONNX file, got {path}, which holds no ONNX graph")
    return graph


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


def _external(graph: Any, path: Path) -> list[str]:
    """Return the names of the files beside it that hold its weights."""
    import onnx

    names = set()
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        name = next(entry.value for entry in tensor.external_data if entry.key == "location")
        inside = (path.parent / name).resolve().is_relative_to(path.parent.resolve())
        if not inside or not (path.parent / name).is_file():
            raise ValueError(f"expected the weights file {name!r} beside {path}, got none there")
        names.add(name)
    return sorted(names)
