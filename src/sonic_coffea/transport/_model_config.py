"""Triton's model configuration: text to mapping and back, and the contract in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    from sonic_coffea.transport._contract import Contract


def read_model_config(text: str) -> dict[str, Any]:
    """Return what a ``config.pbtxt`` says; 64-bit numbers come as strings, as in protobuf's JSON.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If it is no such configuration.
    """
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    try:
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"expected the text of a model configuration: {error}") from None
    content: dict[str, Any] = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return content


def write_model_config(config: Mapping[str, Any]) -> str:
    """Return the text of a ``config.pbtxt``.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If Triton knows no such field, or not such a value.
    """
    from google.protobuf import text_format

    text: str = text_format.MessageToString(_message(config), use_short_repeated_primitives=True)
    return text


def configured_contract(model: str, version: str, config: Mapping[str, Any]) -> Contract:
    """Return the contract of a version that is served with a configuration."""
    from tritonclient.grpc import service_pb2

    from sonic_coffea.transport._descriptions import contract_of

    return contract_of(model, version, service_pb2.ModelMetadataResponse(), _message(config))


def _message(config: Mapping[str, Any]) -> Any:
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    try:
        return json_format.ParseDict(dict(config), model_config_pb2.ModelConfig())
    except json_format.ParseError as error:
        raise ConfigError(f"the model configuration cannot be written: {error}") from None
