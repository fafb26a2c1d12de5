"""`repository build` and `show` pass on what is asked for, and fail in one line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.commands import run

from sonic_coffea.demo.samples import DATA

if TYPE_CHECKING:
    from pathlib import Path

TAGGER = DATA / "toptagger.onnx"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_models_are_built_replaced_and_shown(tmp_path: Path) -> None:
    build = ("repository", "build", tmp_path / "r", f"top={TAGGER}")
    options = ["--max-batch-size", 32, "--labels", "top=QCD,Top"]
    done = run(*build, "--json", *options, "--no-user")
    (built,) = json.loads(done.stdout)
    assert done.returncode == 0
    assert (built["model"], built["version"], built["changes"]) == ("top", 1, [])
    assert "user" not in built
    config = tmp_path / "r" / "top" / "config.pbtxt"
    assert "max_batch_size: 32" in config.read_text()
    assert 'backend: "onnxruntime"' in config.read_text()
    done = run(*build)
    assert (done.returncode, done.stdout) == (2, "")
    assert "already has top" in done.stderr
    assert run(*build, "--version", "next").returncode == 0
    done = run("repository", "show", tmp_path / "r", "--json")
    assert done.returncode == 0
    assert [entry["version"] for entry in json.loads(done.stdout)] == [1, 2]
    (anew,) = json.loads(run(*build, "--json", "--overwrite").stdout)
    assert (anew["version"], anew["changes"]) == (1, [])


def test_changed_files_are_named(tmp_path: Path) -> None:
    run("repository", "build", tmp_path / "r", f"top={TAGGER}")
    assert "as built" in run("repository", "show", tmp_path / "r").stdout
    file = tmp_path / "r" / "top" / "1" / "model.onnx"
    file.write_bytes(file.read_bytes() + b"\0")
    done = run("repository", "show", tmp_path / "r")
    assert done.returncode == 1
    assert "1 changed" in done.stdout
    assert done.stderr == f"error: {file} was changed since it was built\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "error: cannot read"),
        (b"no model", "holds no ONNX graph"),
        (b"no package", 'pip install ".[onnx]"'),
    ],
)
def test_unreadable_models_are_one_line(
    tmp_path: Path, content: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.onnx"
    if content is not None:
        file.write_bytes(content)
    if content == b"no package":
        monkeypatch.setitem(sys.modules, "onnx", None)
    done = run("repository", "build", tmp_path / "r", f"m={file}")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "r").exists()
    assert "which has no models" in run("repository", "show", tmp_path / "r").stderr
