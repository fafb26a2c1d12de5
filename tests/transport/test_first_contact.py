"""Servers that were never there, or that this process has stopped: errors that come soon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import awkward as ak
import pytest
from tests.ports import held_port

import sonic_coffea as sonic
from sonic_coffea import errors

if TYPE_CHECKING:
    from pathlib import Path

MODEL = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
EVENTS = ak.Array([[{"pt": 0.0}], []])


def test_a_port_where_nothing_listens_is_not_waited_for() -> None:
    with (
        held_port() as port,
        sonic.connect(f"grpc://127.0.0.1:{port}", retry_timeout_s=1000.0) as pool,
        pytest.raises(errors.ServerLostError, match="nothing was ever reached"),
    ):
        MODEL(EVENTS, pool=pool)


def test_a_local_server_that_was_stopped_is_an_error_at_once(tmp_path: Path) -> None:
    """Its folder is gone, so that it cannot come back."""
    with (
        sonic.connect(f"unix:{tmp_path}/stopped/grpc:1", retry_timeout_s=1000.0) as pool,
        pytest.raises(errors.ServerLostError, match="it has ended"),
    ):
        MODEL(EVENTS, pool=pool)
