"""Transport: one connection to one server, in its own terms; errors come out as ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonic_coffea.transport._address import Address
from sonic_coffea.transport._contract import Contract, TensorSpec
from sonic_coffea.transport._metadata import (
    ModelEntry,
    ModelStatistics,
    Response,
    ServerMetadata,
)
from sonic_coffea.transport._model_config import read_model_config, write_model_config
from sonic_coffea.transport._options import ConnectionOptions, Tls, Token, read_text
from sonic_coffea.transport._protobuf import check_protobuf
from sonic_coffea.transport._tensors import DATATYPES, STRINGS, from_wire, kserve_name, to_wire

if TYPE_CHECKING:
    # gRPC is loaded by the first connection.
    from sonic_coffea.transport._grpc import Connection as Connection
    from sonic_coffea.transport._grpc import RpcHandle as RpcHandle
    from sonic_coffea.transport._shared_memory import Lend as Lend

__all__ = [
    "DATATYPES",
    "STRINGS",
    "Address",
    "ConnectionOptions",
    "Contract",
    "ModelEntry",
    "ModelStatistics",
    "Response",
    "ServerMetadata",
    "TensorSpec",
    "Tls",
    "Token",
    "check_protobuf",
    "connect_transport",
    "from_wire",
    "kserve_name",
    "read_model_config",
    "read_text",
    "to_wire",
    "write_model_config",
]


def connect_transport(
    url: str | Address, *, options: ConnectionOptions | None = None
) -> Connection:
    """Return a connection to a server, without blocking: its first call opens the channel.

    Raises
    ------
    ConfigError
        If protobuf is too old for tritonclient.
    """
    check_protobuf()
    from sonic_coffea.transport._grpc import Connection

    address = Address.parse(url) if isinstance(url, str) else url
    return Connection(address, options or ConnectionOptions())
