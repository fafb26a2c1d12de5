"""Whether a local server is ready, and what it says about itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ServerMetadata", "fetch_metadata", "is_ready"]

_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetadata:
    """Name, version and protocol extensions of a server, and its models by state."""

    name: str
    version: str
    extensions: tuple[str, ...]
    models: tuple[ModelState, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A model in the repository; `state` is ``READY``, or why it is not."""

    name: str
    version: str
    state: str
    reason: str


def is_ready(url: str, headers: Mapping[str, str]) -> bool:
    """Whether the server at `url` says that it and its models are ready."""
    import tritonclient.grpc  # noqa: PLC0415

    client = _client(url)
    try:
        return bool(client.is_server_ready(headers=dict(headers), client_timeout=_TIMEOUT_S))
    except tritonclient.grpc.InferenceServerException:
        return False
    finally:
        client.close()


def fetch_metadata(url: str, headers: Mapping[str, str]) -> ServerMetadata:
    """Ask the server at `url` about itself."""
    import tritonclient.grpc  # noqa: PLC0415

    client = _client(url)
    try:
        about = client.get_server_metadata(headers=dict(headers), client_timeout=_TIMEOUT_S)
        index = client.get_model_repository_index(headers=dict(headers), client_timeout=_TIMEOUT_S)
    except tritonclient.grpc.InferenceServerException as error:
        raise ServerError(f"cannot ask for its metadata: {error}", server=url) from None
    finally:
        client.close()
    models = tuple(
        ModelState(name=m.name, version=m.version, state=m.state, reason=m.reason)
        for m in index.models
    )
    return ServerMetadata(
        name=about.name,
        version=about.version,
        extensions=tuple(about.extensions),
        models=models,
    )


def _client(url: str) -> Any:
    import tritonclient.grpc  # noqa: PLC0415

    return tritonclient.grpc.InferenceServerClient(
        url.removeprefix("grpc://"),
        # A site's web proxy is not for loopback; and a second server on a port that was used
        # before must not meet the first one's connection and its back-off.
        channel_args=[("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)],
    )
