"""A small KServe-v2 server in this process, for functions and local networks."""

from __future__ import annotations

from sonic_coffea.server.in_process._grpc_server import (
    EXTENSIONS,
    Fault,
    Function,
    KServeModel,
    KServeServer,
    Received,
    Tensors,
)
from sonic_coffea.server.in_process._onnx_server import InProcessServer

__all__ = [
    "EXTENSIONS",
    "Fault",
    "Function",
    "InProcessServer",
    "KServeModel",
    "KServeServer",
    "Received",
    "Tensors",
]
