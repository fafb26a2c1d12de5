"""Commands end with one message and an exit code, fit files and terminals, and heed options."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.commands import json_of, run
from tests.ports import held_port
from tests.scripts import python

import sonic_coffea as sonic
from sonic_coffea.cli import main
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

in_a_process = partial(python, "-m", "sonic_coffea", check=False)


@pytest.mark.server
def test_errors_are_a_line_and_an_exit_code(tmp_path: Path) -> None:
    done = run("serve", tmp_path / "nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected a model repository, got ")
    assert "nowhere" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_a_command_whose_modules_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading:
        """Stands for a module whose load Ctrl-C interrupts."""

        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "sonic_coffea.cli._main", Loading())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_help_lists_the_commands_and_says_what_options_are() -> None:
    assert run("--version").stdout == f"sonic-coffea {sonic.__version__}\n"
    shown = run("--help").stdout
    commands = ("demo", "score", "export", "serve", "check", "models", "scaffold", "status")
    for name in (*commands, "bench", "plan", "server", "repository"):
        assert f" {name} " in shown
    shown = run("models", "--help", COLUMNS="200").stdout
    assert "Parameters" not in shown
    assert "URL" in shown
    assert "--header NAME=VALUE Header of each call; may be repeated." in (" ".join(shown.split()))


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--workers", "0"),
        ("demon",),
        ("serve",),
        ("models", "grpc://x:y:z"),
        ("models", "grpc://s:1", "--token-file", "nowhere"),
        ("repository", "show"),
        ("repository", "build", "r"),
        ("repository", "build", "r", "a=x.onnx", "a=y.onnx"),
        ("repository", "build", "r", "a=x.onnx", "--max-batch-size", "-1"),
        ("repository", "build", "r", "a=x.onnx", "--version", "²"),
        ("plan", "nowhere", "--cores", "1", "--cpu-ms", "1", "--rows-per-event", "1"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2


def test_pairs_that_hold_no_secret_are_shown() -> None:
    shown = run("repository", "build", "r", "model.onnx").stderr
    assert shown == "error: expected NAME=FILE, got 'model.onnx'\n"


def test_grpc_writes_nothing_to_the_terminal() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        done = in_a_process("models", f"grpcs://127.0.0.1:{listening.getsockname()[1]}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: no connection to the server could be made: nothing listens at this port of the "
        "host; `sonic-coffea check grpcs://127"
    )


def test_output_may_have_only_ascii_and_programs_no_docstrings() -> None:
    model = sonic.Model("tagger", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
    with FakeServer({"tagger": FakeModel.of(model)}) as server:
        done = in_a_process("check", server.url, PYTHONIOENCODING="ascii", PYTHONOPTIMIZE="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2713 readiness: ready" in done.stdout


def test_tables_are_whole_in_files_and_on_narrow_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    long = "a" * 100
    model = sonic.Model("tagger", {long: sonic.Row(["pt"])}, {"y": ["top"]})
    with FakeServer({"tagger": FakeModel.of(model)}) as server:
        shown = run("models", server.url).stdout
        (row,) = (line for line in shown.splitlines() if "tagger" in line)
        assert long in row
        shown = run("models", server.url, COLUMNS="80").stdout
    assert f"models of {server.url}" in shown
    assert shown.count("a") > len(long)


@pytest.mark.server
def test_serve_passes_its_options_to_the_runtime(tmp_path: Path) -> None:
    """A podman that has the image writes down how it is to serve, and fails."""
    podman, launched = tmp_path / "podman", tmp_path / "launched"
    podman.write_text(f'#!/bin/sh\n[ "$1" = run ] || exit 0\necho "$@" >{launched}\nexit 1\n')
    podman.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    sonic.build_repository(tmp_path / "models", {"top": DATA / "toptagger.onnx"})
    with held_port() as port:
        options = ["--port", port, "--threads", 2, "--runtime", "podman", "--image", "site/triton"]
        done = run("serve", tmp_path / "models", *options, PATH=path)
    assert done.returncode == 1
    arguments = launched.read_text().split()
    assert {f"--grpc-port={port}", "--cpus=2", "site/triton"} < set(arguments)
    assert f"--model-repository={tmp_path / 'models'}" in arguments


TAGGER = DATA / "toptagger.onnx"


def test_models_are_built_replaced_and_shown(tmp_path: Path) -> None:
    build = ("repository", "build", tmp_path / "r", f"top={TAGGER}")
    options = ["--max-batch-size", 32, "--labels", "top=QCD,Top"]
    (built,) = json_of(*build, *options, "--no-user")
    assert (built["model"], built["version"], built["changes"]) == ("top", 1, [])
    assert "user" not in built
    config = tmp_path / "r" / "top" / "config.pbtxt"
    assert "max_batch_size: 32" in config.read_text()
    assert 'backend: "onnxruntime"' in config.read_text()
    done = run(*build)
    assert (done.returncode, done.stdout) == (2, "")
    assert "already has top" in done.stderr
    more = [sys.executable, "-m", "sonic_coffea", "-v", *build, "--version", "next"]
    with Path("/dev/full").open("wb") as full:  # which takes no line of the log
        assert subprocess.run(more, stderr=full, check=False, timeout=60).returncode == 0
    shown = json_of("repository", "show", tmp_path / "r")
    assert [entry["version"] for entry in shown] == [1, 2]
    (anew,) = json_of(*build, "--overwrite")
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
