"""Files of compiled code: broken ones cost time, and those that others can write are not read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server

SCRIPT = """
import json, os, sys

folder, read = os.environ["NUMBA_CACHE_DIR"], []

def watch(event, arguments):
    if event == "pickle.find_class":
        read.append(f"pickle of {arguments}")
    if event == "open" and str(arguments[0]).startswith((folder, os.path.realpath(folder))):
        flags = arguments[2] or 0
        if not flags & (os.O_WRONLY | os.O_RDWR):
            read.append(str(arguments[0]))

import awkward as ak, numpy as np
import sonic_coffea as sonic

jets = ak.Array([{"pt": [3.0, 2.0, 1.0]}, {"pt": []}, {"pt": [5.0]}])
sys.addaudithook(watch)
packed = sonic.Mask(2, of="pt").pack(jets)
assert packed.tolist() == [[[1.0, 1.0]], [[0.0, 0.0]], [[1.0, 0.0]]]
print(json.dumps(read))
"""


class Hostile:
    """Makes a file if it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


def run(folder: Path) -> list[str]:
    """Pack in another process; return the files of the folder that it read."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read: list[str] = json.loads(done.stdout.splitlines()[-1])
    return read


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with compiled code, that nobody else can write."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    folder.mkdir(mode=0o700)
    run(folder)
    if not files_in(folder):
        pytest.skip("nothing is kept on disk")
    assert run(folder)
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "cache"
    shutil.copytree(filled, copied)
    copied.chmod(0o700)
    return copied


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole[: len(whole) // 2].ljust(len(whole), b"\0"),
        lambda whole: whole[:-100] + bytes(255 - byte for byte in whole[-100:]),
    ],
)
def test_a_broken_file_costs_time_and_nothing_else(folder: Path, broken: Any) -> None:
    for path in files_in(folder):
        path.write_bytes(broken(path.read_bytes()))
    run(folder)


def test_files_are_not_mistaken_for_each_other(folder: Path) -> None:
    """Such as by a file system that was restored by half."""
    paths = files_in(folder)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], *contents[:1]], strict=True):
        path.write_bytes(content)
    run(folder)


@pytest.mark.parametrize("mode", [0o700, 0o777, 0o1777, 0o770])
def test_nothing_is_unpickled_and_a_folder_that_others_can_write_is_not_read(
    folder: Path, tmp_path: Path, mode: int
) -> None:
    folder.chmod(mode)
    for path in files_in(folder):
        path.write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    read = run(folder)
    assert not [name for name in read if name.startswith("pickle of")]
    assert bool(read) == (mode == 0o700)
    assert not (tmp_path / "ran").exists()


def test_a_link_to_a_folder_that_others_can_write_is_not_read(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    folder.chmod(0o777)
    assert run(link) == []


def test_a_file_that_others_can_write_is_not_read(folder: Path) -> None:
    for path in files_in(folder):
        path.chmod(0o620)
    assert run(folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("whole", [True, False])
def test_what_another_user_owns_is_not_read(folder: Path, *, whole: bool) -> None:
    for path in [folder] if whole else files_in(folder):
        os.chown(path, 54321, 54321)
    assert run(folder) == []


def test_files_that_are_written_are_written_by_their_owner_alone(folder: Path) -> None:
    for path in files_in(folder):
        assert path.stat().st_uid == os.geteuid()
        assert not path.stat().st_mode & 0o022
