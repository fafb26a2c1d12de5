from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.commands import run

import sonic_coffea
from sonic_coffea.cli import main
from sonic_coffea.cli._main import COMMANDS, GROUPS
from sonic_coffea.cli._output import show
from sonic_coffea.reporting import tables

if TYPE_CHECKING:
    from pathlib import Path


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sonic_coffea", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version() -> None:
    done = in_a_process("--version")
    assert done.stdout == f"sonic-coffea {sonic_coffea.__version__}\n"


def test_an_error_is_a_line_and_an_exit_code(tmp_path: Path) -> None:
    done = in_a_process("serve", f"{tmp_path}/nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("error: expected a model repository, got ")
    assert "nowhere" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_while_modules_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading:
        """Stands for a module whose load Ctrl-C interrupts."""

        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "sonic_coffea.cli._main", Loading())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_help_lists_the_commands() -> None:
    shown = run("--help").stdout
    for name in (*(command.__name__ for command in COMMANDS), *GROUPS):
        assert f" {name} " in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--workers", "0"),
        ("demon",),
        ("serve",),
        ("models", "grpc://x:y:z"),
        ("models", "http://server"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2


def test_a_terminal_has_no_lines_of_the_library_below() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        done = in_a_process("models", f"grpcs://127.0.0.1:{listening.getsockname()[1]}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: no connection to the server could be made: nothing listens at this port of the "
        "host; is the server running"
    )


def test_tables_are_whole_in_files_and_on_narrow_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "a" * 100
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    table = tables.Table("models", [["tagger", [long, "b"]]], ["model", "inputs"])
    show({}, table, as_json=False)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "tagger" in line)
    assert long in row
    monkeypatch.setenv("COLUMNS", "80")
    show({}, table, as_json=False)
    shown = capsys.readouterr().out
    assert shown.splitlines()[:2] == ["models", "tagger"]
    assert f"inputs{long}b" in "".join(shown.split())
