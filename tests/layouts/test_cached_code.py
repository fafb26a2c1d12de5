"""Compiled code is kept by numba, where only its owner can write it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scripts import python

CODE = """
import awkward as ak
import sonic_coffea as sonic
print(sonic.Padded("pt", 2).pack(ak.Array([{"pt": [1.0]}])).tolist())
"""


@pytest.mark.parametrize(("mode", "keeps"), [(0o700, True), (0o770, False)])
def test_folders_that_others_can_write_are_not_used(tmp_path: Path, mode: int, keeps: bool) -> None:
    folder = tmp_path / "numba"
    folder.mkdir()
    folder.chmod(mode)
    done = python("-c", CODE, NUMBA_CACHE_DIR=str(folder))
    assert done.stdout.strip() == "[[[1.0, 0.0]]]"
    # numba itself, and coffea, have functions of their own there.
    assert any("_pad" in path.name for path in folder.rglob("*.nb?")) is keeps
