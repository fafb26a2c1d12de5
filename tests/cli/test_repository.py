from __future__ import annotations

import json
import sys
from importlib.resources import files

import pytest
from tests.commands import run

TAGGER = str(files("sonic_coffea") / "demo" / "data" / "toptagger.onnx")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_build_add_show(tmp_path):
    done = run(
        "repository", "build", tmp_path / "r", f"top={TAGGER}", "--json", "--max-batch-size", 32,
        "--labels", "top=QCD,Top", "--metadata", "auc=0.95", "--no-user",
    )  # fmt: skip
    (built,) = json.loads(done.stdout)
    assert done.returncode == 0
    assert (built["model"], built["version"], built["changes"]) == ("top", 1, [])
    assert built["metadata"] == {"auc": "0.95"}
    assert "user" not in built
    config = (tmp_path / "r" / "top" / "config.pbtxt").read_text()
    assert "max_batch_size: 32" in config
    assert 'backend: "onnxruntime"' in config

    done = run("repository", "build", tmp_path / "r", f"top={TAGGER}")
    assert done.returncode == 1
    assert "already has top" in done.stderr
    assert done.stdout == ""
    assert run("repository", "build", tmp_path / "r", f"top={TAGGER}", "--version", "next").stdout
    done = run("repository", "show", tmp_path / "r", "--json")
    assert done.returncode == 0
    assert [entry["version"] for entry in json.loads(done.stdout)] == [1, 2]


def test_show_says_what_was_changed(tmp_path):
    run("repository", "build", tmp_path / "r", f"top={TAGGER}")
    assert "as built" in run("repository", "show", tmp_path / "r").stdout
    file = tmp_path / "r" / "top" / "1" / "model.onnx"
    file.write_bytes(file.read_bytes() + b"\0")
    done = run("repository", "show", tmp_path / "r")
    assert done.returncode == 1
    assert "1 changed" in done.stdout
    assert done.stderr == f"error: {file} was changed since it was built\n"


def test_a_function_with_its_declaration(tmp_path):
    (tmp_path / "f.py").write_text("def f(x): return {'y': x}\n")
    tensor = ["float32", [-1, 2]]
    declaration = tmp_path / "d.json"
    declaration.write_text(json.dumps({"m": {"inputs": {"x": tensor}, "outputs": {"y": tensor}}}))
    source = f"m={tmp_path / 'f.py'}:f"
    done = run("repository", "build", tmp_path / "r", source, "--declare", declaration)
    assert (done.returncode, done.stderr) == (0, "")
    assert "float32 [N, 2]" in done.stdout
    done = run("repository", "build", tmp_path / "s", source)
    assert done.returncode == 1
    assert "expected the inputs and outputs of model 'm'" in done.stderr
    declaration.write_text('{"n": {}}')
    done = run("repository", "build", tmp_path / "s", source, "--declare", declaration)
    assert done.returncode == 1
    assert "got 'n'" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("build",),
        ("build", "r"),
        ("build", "r", "model.onnx"),
        ("build", "r", "a=x.onnx", "a=y.onnx"),
        ("build", "r", "a=x.onnx", "--max-batch-size", "-1"),
        ("show",),
    ],
)
def test_bad_usage(arguments):
    done = run("repository", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "m.onnx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnx", None)
    done = run("repository", "build", tmp_path / "r", f"m={tmp_path / 'm.onnx'}")
    assert done.returncode == 1
    assert 'pip install "sonic-coffea[onnx]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "error: cannot read"), (b"no model", "holds no ONNX graph")],
)
def test_failures_are_one_line(tmp_path, content, message):
    file = tmp_path / "m.onnx"
    if content is not None:
        file.write_bytes(content)
    done = run("repository", "build", tmp_path / "r", f"m={file}")
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "r").exists()
    done = run("repository", "show", tmp_path / "r")
    assert done.returncode == 1
    assert "which has no models" in done.stderr
