"""Readiness and metadata of a local server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from sonic_coffea.transport import ConnectionOptions, ServerMetadata, Timeouts, connect_transport

if TYPE_CHECKING:
    from sonic_coffea.transport import Connection

_TIMEOUTS = Timeouts(metadata_s=5.0)


def is_ready(url: str, headers: Mapping[str, str]) -> bool:
    """Whether the server at `url` says that it and its models are ready."""
    with _connection(url, headers) as connection:
        return connection.ready()


def fetch_metadata(url: str, headers: Mapping[str, str]) -> ServerMetadata:
    """Ask the server at `url` about itself."""
    with _connection(url, headers) as connection:
        return replace(connection.info(), models=tuple(connection.models()))


def _connection(url: str, headers: Mapping[str, str]) -> Connection:
    options = ConnectionOptions(headers=headers, timeouts=_TIMEOUTS)
    return connect_transport(url, options=options)
