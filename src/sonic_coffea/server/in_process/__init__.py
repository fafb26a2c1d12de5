"""In this process: a transport for the models of a repository, and a server for tests."""

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
from sonic_coffea.server.in_process._transport import InProcessTransport

__all__ = [
    "EXTENSIONS",
    "Fault",
    "Function",
    "InProcessTransport",
    "KServeModel",
    "KServeServer",
    "Received",
    "Tensors",
]
