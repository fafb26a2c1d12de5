"""Compiled code is kept: a worker does not compile what another process has compiled."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import awkward as ak
import numba
import pytest
from numba.core.caching import CacheImpl

import sonic_coffea as sonic
from sonic_coffea.layouts import Row, _disk, _kernels, bind_inputs
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
sonic.Row("pt").pack(jets)
kernels = (_kernels.padded, _kernels.rows)
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
    assert counts(tmp_path) == [[0, 1]] * 2
    assert counts(tmp_path) == [[1, 0]] * 2


def test_what_many_save_at_a_time_is_found_as_it_was_saved(tmp_path: Path) -> None:
    """Workers of a cluster compile at the same moment, for other types and processors."""
    keys = range(4)

    def save(key: int, files: _disk.KernelFiles, barrier: threading.Barrier) -> None:
        barrier.wait(20)
        files.save(key, f"code {key}")

    for i in range(50):
        barrier = threading.Barrier(len(keys))
        files = [_disk.KernelFiles(str(tmp_path), f"kernel{i}", "source") for _ in keys]
        threads = [threading.Thread(target=save, args=(k, files[k], barrier)) for k in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [files[0].load(k) for k in keys] == [f"code {k}" for k in keys]


def test_what_is_out_of_date_or_cut_short_is_not_loaded(tmp_path: Path) -> None:
    old, new = (_disk.KernelFiles(str(tmp_path), "kernel", stamp) for stamp in ("old", "new"))
    old.save("key", "old code")
    assert new.load("key") is None
    new.save("key", "new code")
    assert new.load("key") == "new code"
    assert old.load("key") is None
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert new.load("key") is None
    new.save("key", "new code")
    assert new.load("key") == "new code"


def test_code_for_other_types_is_not_loaded_whatever_the_file_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_disk.KernelFiles, "_name", lambda *_: "the same")
    files = _disk.KernelFiles(str(tmp_path), "kernel", "source")
    files.save("one", "its code")
    assert files.load("one") == "its code"
    assert files.load("another") is None


def plus_one(x: int) -> int:
    return x + 1


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "sonic_coffea")
    _disk._warn.cache_clear()
    return caplog


def test_a_full_disk_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    def full(_: Any, name: str, __: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_disk.KernelFiles, "_save_data", full)
    kernel = _kernels._compiled(plus_one)
    assert (kernel(1), kernel(1.5)) == (2, 2.5)
    (message,) = warned.messages
    assert "each process compiles its own: No space left on device" in message


def test_without_a_folder_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    kernels = _kernels._compiled(plus_one), _kernels._compiled(plus_one)
    assert [kernel(1) for kernel in kernels] == [2, 2]
    (message,) = warned.messages
    assert "NUMBA_CACHE_DIR names one" in message


def test_a_wrong_setting_of_numba_s_is_not_taken_for_a_full_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("Unknown cache locator class: 'x'")

    monkeypatch.setattr(CacheImpl, "__init__", wrong)
    with pytest.raises(RuntimeError, match="Unknown cache locator class"):
        _kernels._compiled(plus_one)


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
