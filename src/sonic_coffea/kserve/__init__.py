"""A small KServe-v2 server for what is not a Triton: functions, emulations, local networks."""

from __future__ import annotations

from sonic_coffea.kserve._model import Function, KServeModel, Tensors
from sonic_coffea.kserve._server import KServeServer
from sonic_coffea.kserve._servicer import EXTENSIONS, Received

__all__ = ["EXTENSIONS", "Function", "KServeModel", "KServeServer", "Received", "Tensors"]
