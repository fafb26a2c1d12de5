"""ONNX files of small networks, written as text."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import parser


def save_onnx(
    path: Path, graph: str, constants: tuple[onnx.TensorProto, ...] = (), *, ir_version: int = 8
) -> Path:
    """Save ``(inputs) => (outputs) <constants> {nodes}``; large constants may come as tensors."""
    opsets = '"" : 17, "ai.onnx.ml" : 3' if "ai.onnx.ml" in graph else '"" : 17'
    model = parser.parse_model(
        f"<ir_version: {ir_version}, opset_import: [{opsets}]> graph {graph}"
    )
    model.graph.initializer.extend(constants)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
