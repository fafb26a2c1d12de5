"""Whether protobuf is new enough for the code that tritonclient generated with it."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from pathlib import Path

from sonic_coffea.errors import ConfigError

# tritonclient's own requirement is looser than its code, which says its version at the top.
_FILE, _HEAD_BYTES = "tritonclient/grpc/service_pb2.py", 1_000


@cache
def check_protobuf() -> None:
    """Raise unless protobuf can load tritonclient's code; nothing is imported.

    Raises
    ------
    ConfigError
        If protobuf is older; the message has the version that is needed.
    """
    try:
        client = metadata.distribution("tritonclient")
        with Path(str(client.locate_file(_FILE))).open(encoding="utf-8") as file:
            head = file.read(_HEAD_BYTES)
        installed = metadata.version("protobuf")
    except (metadata.PackageNotFoundError, OSError):
        return
    found = re.search(r"Protobuf Python Version: ([\d.]+)", head)
    if found is not None and _numbers(installed) < _numbers(found[1]):
        raise ConfigError(
            f"protobuf {installed} cannot load tritonclient {client.version}, which needs protobuf "
            f"{found[1]} or newer: pip install 'protobuf>={found[1]}', or an older tritonclient"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
