"""Of an environment whose protobuf is too old, the user hears by an error of ours."""

from __future__ import annotations

import pytest
from tests.scripts import python

OLD = """
from google.protobuf import runtime_version


def validate(*_, **__):
    raise runtime_version.VersionError("Runtime version cannot be older than 6.33.5")


runtime_version.ValidateProtobufRuntimeVersion = validate

import sonic_coffea as sonic

model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["top"]})
with sonic.connect("grpc://127.0.0.1:1") as pool:
    try:
        model.check(pool)
    except sonic.errors.ConfigError as error:
        print(error)
"""


def test_protobuf_that_is_too_old_is_named() -> None:
    pytest.importorskip("google.protobuf.runtime_version", reason="this one compares no versions")
    done = python("-c", OLD)
    expected = "tritonclient cannot be loaded (Runtime version cannot be older than 6.33.5)"
    assert done.stdout.startswith(expected), done.stderr
    assert "pip install --upgrade" in done.stdout
