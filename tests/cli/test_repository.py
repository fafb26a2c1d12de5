"""`repository build` and `show` pass on what is asked for, and fail in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.commands import run

from sonic_coffea.demo.samples import DATA

TAGGER = DATA / "toptagger.onnx"


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
    show = partial(run, "repository", "show", tmp_path / "r", COLUMNS="200")
    assert "as built" in show().stdout
    version = tmp_path / "r" / "top" / "1"
    (version / "model.onnx").write_bytes(TAGGER.read_bytes() + b"\0")
    (version / "new.py").touch()
    done = show()
    assert done.returncode == 1
    assert "2 changed" in done.stdout
    changes = f"{version}/model.onnx was changed; {version}/new.py is new"
    assert done.stderr == f"error: {changes} since it was built\n"
