"""Triton's model configuration: text to mapping and back, and the contract in it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.transport._contract import Contract, TensorSpec


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

    return contract_of(model, version, service_pb2.ModelMetadataResponse(), _message(config))


def _message(config: Mapping[str, Any]) -> Any:
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    try:
        return json_format.ParseDict(dict(config), model_config_pb2.ModelConfig())
    except json_format.ParseError as error:
        raise ConfigError(f"the model configuration cannot be written: {error}") from None


def contract_of(model: str, version: str, metadata: Any, config: Any) -> Contract:
    """Return the contract in a ModelConfig; in a ModelMetadataResponse where that is empty.

    The two may disagree: a balancer may have sent the two questions to two servers, one of them
    updated already.
    """
    batches = config.max_batch_size > 0
    inputs = _specs(metadata.inputs, config.input, batches=batches)
    unlimited = None if all(spec.rows < 0 for spec in inputs) else 1
    return Contract(
        model=model,
        version=version,
        inputs=inputs,
        outputs=_specs(metadata.outputs, config.output, batches=batches),
        max_rows=config.max_batch_size if batches else unlimited,
        preferred_rows=tuple(config.dynamic_batching.preferred_batch_size),
        digest=digest_of(config, version),
        features=_features(config.parameters[f"features.{version}"].string_value),
        stacks=batches,
    )


def digest_of(config: Any, version: str) -> str:
    """Return the digest in a configuration; empty if there is none."""
    return str(config.parameters[f"sha256.{version}"].string_value)


def _features(listed: str) -> tuple[str, ...]:
    """Return the names in a parameter of a configuration, which anybody may have written."""
    with contextlib.suppress(ValueError, TypeError):
        return tuple(map(str, json.loads(listed or "[]")))
    return ()


def _specs(listed: Any, configured: Any, *, batches: bool) -> tuple[TensorSpec, ...]:
    from tritonclient.grpc import model_config_pb2

    rows = [-1] if batches else []
    tensors = [(t.name, t.datatype, list(t.shape)) for t in listed]
    if configured:
        name_of = model_config_pb2.DataType.Name
        tensors = [(t.name, name_of(t.data_type), rows + list(t.dims)) for t in configured]
    return tuple(
        TensorSpec(
            name=name,
            datatype={"TYPE_STRING": "BYTES"}.get(datatype, datatype.removeprefix("TYPE_")),
            shape=tuple(shape[1:]),
            rows=shape[0] if shape else -1,
        )
        for name, datatype, shape in tensors
    )
