"""Readiness and metadata of a local server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sonic_coffea.transport import ConnectionOptions, ServerMetadata, connect_transport

if TYPE_CHECKING:
    from sonic_coffea.transport import Connection


def is_ready(url: str) -> bool:
    """Whether the server at `url` says that it and its models are ready."""
    with _connection(url) as connection:
        return connection.ready()


def fetch_metadata(url: str) -> ServerMetadata:
    """Ask the server at `url` about itself."""
    with _connection(url) as connection:
        return replace(connection.info(), models=tuple(connection.models()))


def _connection(url: str) -> Connection:
    return connect_transport(url, options=ConnectionOptions(metadata_timeout_s=5.0))
