"""transport: a connection to one server; other libraries' errors become errors of this package."""

from __future__ import annotations

from sonic_coffea.errors import ConfigError
from sonic_coffea.transport._address import Address
from sonic_coffea.transport._contract import (
    MAX_REQUEST_BYTES,
    Contract,
    ModelEntry,
    TensorSpec,
    newest_of,
    not_found,
)
from sonic_coffea.transport._model_config import (
    configured_contract,
    read_model_config,
    write_model_config,
)
from sonic_coffea.transport._options import ConnectionOptions, Token
from sonic_coffea.transport._tensors import DATATYPES, STRINGS, from_wire, kserve_name, to_wire
from sonic_coffea.transport._transport import (
    PROMPT_S,
    ModelStatistics,
    Response,
    ServerMetadata,
    Transport,
    time_requests,
)

# What transports of a user's own are made of.
__all__ = ["ConnectionOptions", "Contract", "Response", "Transport", "connect_transport"]


def connect_transport(url: str, *, options: ConnectionOptions | None = None) -> Transport:
    """Return a connection to a server, without blocking: its first call opens the channel.

    Raises
    ------
    ConfigError
        If tritonclient cannot be loaded, such as with a protobuf that is older than its code.
    """
    try:  # here, as gRPC is loaded by the first connection
        from sonic_coffea.transport._grpc import Connection
    except Exception as error:  # noqa: BLE001  protobuf has errors of its own
        raise ConfigError(
            f"tritonclient cannot be loaded ({error}); pip install --upgrade tritonclient protobuf"
        ) from None
    return Connection(Address.parse(url), options or ConnectionOptions())
