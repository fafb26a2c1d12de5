"""Compiled code is kept: a worker does not compile what another process has compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import awkward as ak

import sonic_coffea as sonic
from sonic_coffea.layouts import Row, _kernels, bind_inputs
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from pathlib import Path

MODEL = sonic.Model("m", {"x": Row("pt")}, {"y": ["a"]})
SCRIPT = """
import json
import awkward as ak, numpy as np
import sonic_coffea as sonic
from sonic_coffea.layouts import _kernels

jets = ak.zip({"pt": ak.Array(np.ones((5, 3), np.float32))})
jets = ak.from_regular(jets)
sonic.Padded("pt", 4).pack(jets)
sonic.Padded(sonic.Feature("pt", scale=2.0), 4).pack(jets)
sonic.Row("pt").pack(jets)
kernels = (_kernels.padded, _kernels.padded_affine, _kernels.rows)
print(json.dumps([[len(k.stats.cache_hits), len(k.stats.cache_misses)] for k in kernels]))
"""


def counts(cache: Path) -> list[list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found: list[list[int]] = json.loads(done.stdout)
    return found


def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    assert counts(tmp_path) == [[0, 1]] * 3
    assert counts(tmp_path) == [[1, 0]] * 3


def test_numba_is_ready_before_rows_are_queued() -> None:
    """What it takes to get ready is no part of the time of packing."""
    jets = ak.Array([[{"pt": 1.0}]])
    _kernels.load.cache_clear()
    bind_inputs({"x": Row("pt")}, jets).load()
    assert _kernels.load.cache_info().currsize == 1
    with FakeServer({"m": FakeModel.of(MODEL)}) as server, Pool(Settings.make(server.url)) as pool:
        _kernels.load.cache_clear()
        MODEL.submit(jets, pool=pool)
        assert _kernels.load.cache_info().currsize == 1
