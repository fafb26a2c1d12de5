"""Compiled code is kept: a worker does not compile what another has, nor wait for numba."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
from tests.limits import without_room

import sonic_coffea as sonic
from sonic_coffea.layouts import (
    Row,
    _ahead,
    _disk,
    _kernels,
    _machine_code,
    bind_inputs,
)
from sonic_coffea.layouts._machine_code import Kernel, portable
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from pathlib import Path

CODE = ("name", b"code")
MODEL = sonic.Model("m", {"x": Row("pt")}, {"y": ["a"]})
SCRIPT = """
import json, sys
import awkward as ak, numpy as np
import sonic_coffea as sonic
from sonic_coffea.layouts import _kernels

jets = ak.zip({"pt": ak.Array(np.ones((5, 3), np.float32))})
jets = ak.from_regular(jets)
assert sonic.Padded("pt", 4).pack(jets).tolist() == [[[1, 1, 1, 0]]] * 5
assert sonic.Row("pt").pack(jets).tolist() == [[1]] * 15
sonic.Mask(4, of="pt").pack(jets)
print(json.dumps([_kernels.padded.compiled, _kernels.mask.compiled, "numba" in sys.modules]))
"""


SHORT_SCRIPT = """
import json, sys
import numpy as np
from sonic_coffea.layouts import _kernels

out = np.empty(3, np.int64)
_kernels.positions(out, np.asarray([4, 9]), np.asarray([6, 10]))
assert out.tolist() == [4, 5, 9]
print(json.dumps([_kernels.positions.compiled, "numba" in sys.modules]))
"""


AHEAD_SCRIPT = """
import json
import numpy as np
from sonic_coffea.errors import ConfigError
from sonic_coffea.layouts import _kernels, compile_ahead

class Positions:
    def pack(self, starts):
        _kernels.positions(np.empty(3, np.int64), starts, starts + 1)

try:
    number, message = compile_ahead([(Positions(), np.arange(3))]), None
except ConfigError as error:
    number, message = None, error.message
print(json.dumps([number, message]))
"""


def compiled(cache: Path, script: str = SCRIPT, **environment: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    printed: list[Any] = json.loads(done.stdout)
    return printed


@pytest.mark.server
def test_kernels_are_compiled_once_and_loaded_without_numba(tmp_path: Path) -> None:
    assert compiled(tmp_path) == [1, 1, True]
    assert compiled(tmp_path) == [0, 0, False]


@pytest.mark.server
def test_code_for_a_family_of_processors_is_loaded_by_each_of_them(tmp_path: Path) -> None:
    family = portable()
    if family is None:
        pytest.skip("this processor is of no family")
    run = partial(compiled, tmp_path, script=SHORT_SCRIPT)
    assert run(NUMBA_CPU_NAME=family, NUMBA_CPU_FEATURES="") == [1, True]
    files = sorted(tmp_path.iterdir())
    assert run() == [0, False]
    assert sorted(tmp_path.iterdir()) == files


def test_what_is_compiled_ahead_can_be_bound() -> None:
    for layout, array in _ahead.common():
        assert len(bind_inputs({"x": layout}, array)) > 0


@pytest.mark.server
def test_kernels_that_are_compiled_ahead_have_to_be_saved(tmp_path: Path) -> None:
    if portable() is None:
        pytest.skip("this processor is of no family")
    assert compiled(tmp_path, AHEAD_SCRIPT) == [1, None]
    assert compiled(tmp_path, SHORT_SCRIPT) == [0, False]
    (tmp_path / "file").touch()
    number, message = compiled(tmp_path / "file" / "folder", AHEAD_SCRIPT)
    assert number is None
    assert "NUMBA_CACHE_DIR" in message


@pytest.mark.server
def test_a_process_that_compiles_for_its_processor_does_not_compile_ahead(tmp_path: Path) -> None:
    if portable() is None:
        pytest.skip("this processor is of no family")
    number, message = compiled(tmp_path, f"import numba{AHEAD_SCRIPT}")
    assert number is None
    assert "loaded already" in message


def test_what_many_save_at_a_time_is_found_as_it_was_saved(tmp_path: Path) -> None:
    """Workers of a cluster compile at the same moment, for other types and processors."""
    keys = range(4)

    def save(key: int, files: _disk.Files, barrier: threading.Barrier) -> None:
        barrier.wait(20)
        files.save(key, (f"name {key}", b"code %d" % key))

    for i in range(50):
        barrier = threading.Barrier(len(keys))
        files = [_disk.Files(f"processor {i}", [tmp_path]) for _ in keys]
        threads = [threading.Thread(target=save, args=(k, files[k], barrier)) for k in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [files[0].load(k) for k in keys] == [(f"name {k}", b"code %d" % k) for k in keys]


def test_what_is_out_of_date_or_cut_short_is_not_loaded(tmp_path: Path) -> None:
    old = _disk.Files("processor", [tmp_path], sources="old sources")
    new = _disk.Files("processor", [tmp_path])
    old.save("key", ("old", b"code"))
    assert new.load("key") is None
    (outdated,) = tmp_path.iterdir()
    new.save("key", ("new", b"co\n\nde"))
    assert (old.load("key"), new.load("key")) == (("old", b"code"), ("new", b"co\n\nde"))
    (path,) = set(tmp_path.iterdir()) - {outdated}
    whole = path.read_bytes()
    path.write_bytes(outdated.read_bytes())
    assert new.load("key") is None
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert new.load("key") is None
    new.save("key", ("new", b"co\n\nde"))
    assert new.load("key") == ("new", b"co\n\nde")


def test_code_for_other_types_or_processors_is_not_loaded_whatever_the_file_is_called(
    tmp_path: Path,
) -> None:
    files, others = (_disk.Files(processor, [tmp_path]) for processor in ("one", "another"))
    files.save("key", CODE)
    (saved,) = tmp_path.iterdir()
    for saver, key in ((files, "another key"), (others, "key")):
        saver.save(key, ("its", b"code"))
        (its,) = set(tmp_path.iterdir()) - {saved}
        assert saver.load(key) == ("its", b"code")
        its.write_bytes(saved.read_bytes())
        assert saver.load(key) is None
        its.unlink()
    assert files.load("key") == CODE


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "sonic_coffea")
    _disk._warn.cache_clear()
    return caplog


def test_a_full_disk_costs_time_only(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    files = _disk.Files("processor", [tmp_path])
    with without_room():
        files.save("key", CODE)
    assert files.load("key") is None
    assert not list(tmp_path.iterdir())
    (message,) = warned.messages
    assert "each process compiles its own: File too large" in message


def test_without_a_folder_kernels_are_compiled(
    tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    nowhere = _disk.Files("processor", [tmp_path / "file" / "folder"])
    out = np.empty(3, np.int64)
    for _ in range(2):
        kernel = Kernel("_placing", "positions", [nowhere])
        kernel(out, np.asarray([4, 9]), np.asarray([6, 10]))
        assert (out.tolist(), kernel.compiled) == ([4, 5, 9], 1)
    assert len(warned.messages) == 1
    assert "each process compiles its own" in warned.text


def test_the_first_folder_that_can_be_written_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "folder", tmp_path / "new"]
    _disk.Files("processor", folders).save("key", CODE)
    assert _disk.Files("processor", folders[1:]).load("key") == CODE


@pytest.mark.parametrize("step", [1, -2])
def test_arrays_that_are_not_contiguous_are_read_as_they_lie(step: int) -> None:
    starts = np.repeat(np.asarray([1, 5, 7]), abs(step))[::step]
    out = np.empty(6, np.int64)
    _kernels.positions(out, starts, starts + 2)
    assert out.tolist() == [n for start in starts.tolist() for n in (start, start + 1)]


def test_addresses_are_those_of_numpy() -> None:
    whole = np.arange(12, dtype=np.int32).reshape(3, 4)
    readonly = whole.copy()
    readonly.flags.writeable = False
    for values in (
        whole,
        whole[1:, 2],
        whole[::-1, ::-2],
        whole.T,
        np.broadcast_to(whole[0], (5, 4)),
        np.asarray(3.5),
        np.zeros((0, 7)),
        whole[3:],
        whole.astype(">i4"),
        readonly,
        np.frombuffer(b"abc", np.uint8),
        whole.view(np.recarray),
    ):
        assert _machine_code.address(values) == values.ctypes.data


def test_numba_is_ready_before_rows_are_queued() -> None:
    """What it takes to get ready is no part of the time of packing."""
    jets = ak.Array([[{"pt": 1.0}]])
    _machine_code.load.cache_clear()
    bind_inputs({"x": Row("pt")}, jets).load()
    assert _machine_code.load.cache_info().currsize == 1
    with FakeServer({"m": FakeModel.of(MODEL)}) as server, Pool(Settings.make(server.url)) as pool:
        _machine_code.load.cache_clear()
        MODEL.submit(jets, pool=pool)
        assert _machine_code.load.cache_info().currsize == 1
