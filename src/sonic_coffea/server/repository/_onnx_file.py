"""What an ONNX file says about its inputs and outputs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.server.repository._tensors import Interface, TensorInfo

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OnnxFile", "read"]

# onnx.TensorProto.DataType by number, which the format guarantees.
_TRITON_TYPES = {
    1: "TYPE_FP32",
    2: "TYPE_UINT8",
    3: "TYPE_INT8",
    4: "TYPE_UINT16",
    5: "TYPE_INT16",
    6: "TYPE_INT32",
    7: "TYPE_INT64",
    8: "TYPE_STRING",
    9: "TYPE_BOOL",
    10: "TYPE_FP16",
    11: "TYPE_FP64",
    12: "TYPE_UINT32",
    13: "TYPE_UINT64",
    16: "TYPE_BF16",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """What a model takes and gives, and the files that hold its weights beside it."""

    interface: Interface
    external: tuple[str, ...]


def read(path: Path) -> OnnxFile:
    """Read the contract of an ONNX file, not its weights.

    Raises
    ------
    ImportError
        If the onnx package is not there.
    sonic_coffea.errors.ConfigError
        If this is no ONNX file, or one whose inputs or outputs are not plain tensors.
    """
    try:
        import onnx
    except ImportError:
        raise ImportError(
            "building a model repository from an ONNX file needs the onnx package: "
            'pip install "sonic-coffea[onnx]"'
        ) from None
    if not path.is_file():
        raise ConfigError(f"expected an ONNX file, got {path}, which is not a file")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception:  # noqa: BLE001  the protobuf runtime in use decides which class this is
        model = None
    if model is None or not model.graph.node or not model.graph.output:
        raise ConfigError(f"expected an ONNX file, got {path}, which holds no ONNX graph")
    graph = model.graph
    initializers = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initializers]
    return OnnxFile(
        interface=Interface(
            inputs=tuple(_tensor(value, "input", path) for value in inputs),
            outputs=tuple(_tensor(value, "output", path) for value in graph.output),
        ),
        external=_external(graph, onnx.TensorProto.EXTERNAL, path),
    )


def _tensor(value: Any, kind: str, path: Path) -> TensorInfo:
    got = value.type.WhichOneof("value")
    if got != "tensor_type":
        advice = " (convert scikit-learn models with zipmap=False)" if got else ""
        raise ConfigError(
            f"expected {kind} {value.name!r} of {path} to be a tensor, got {got}{advice}"
        )
    tensor = value.type.tensor_type
    if tensor.elem_type not in _TRITON_TYPES:
        raise ConfigError(
            f"expected {kind} {value.name!r} of {path} to have a type that Triton knows, "
            f"got ONNX type number {tensor.elem_type}"
        )
    if not tensor.HasField("shape"):
        raise ConfigError(
            f"expected {kind} {value.name!r} of {path} to declare a shape, got none; "
            "onnx.shape_inference.infer_shapes can add it"
        )
    shape = tuple(
        axis.dim_value if axis.HasField("dim_value") and axis.dim_value > 0 else -1
        for axis in tensor.shape.dim
    )
    return TensorInfo(
        name=value.name,
        dtype=_TRITON_TYPES[tensor.elem_type],
        shape=shape,
        rows=tensor.shape.dim[0].dim_param if shape else "",
    )


def _external(graph: Any, external: int, path: Path) -> tuple[str, ...]:
    names = set()
    for tensor in graph.initializer:
        if tensor.data_location != external:
            continue
        name = next(entry.value for entry in tensor.external_data if entry.key == "location")
        inside = (path.parent / name).resolve().is_relative_to(path.parent.resolve())
        if not inside or not (path.parent / name).is_file():
            raise ConfigError(f"expected the weights file {name!r} beside {path}, found none there")
        names.add(name)
    return tuple(sorted(names))
