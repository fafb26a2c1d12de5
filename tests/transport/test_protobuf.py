"""Of an environment whose protobuf is too old, the user hears where servers are named."""

from __future__ import annotations

import subprocess
import sys

import pytest

OLD = """
import importlib.metadata as metadata

installed = metadata.version
metadata.version = lambda name: {version!r} if name == "protobuf" else installed(name)

import sonic_coffea as sonic

try:
    sonic.connect("grpc://127.0.0.1:1").close()
    print("connected")
except sonic.errors.ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("version", "said"),
    [("4.25.3", "protobuf 4.25.3 cannot load tritonclient"), ("99.0", "connected")],
)
def test_protobuf_that_is_too_old_is_named(version: str, said: str) -> None:
    code = OLD.format(version=version)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith(said), done.stderr
    assert said == "connected" or "pip install 'protobuf>=" in done.stdout
