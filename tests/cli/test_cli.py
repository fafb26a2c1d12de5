from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.commands import run

import sonic_coffea
from sonic_coffea.cli._main import COMMANDS, GROUPS

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
    assert done.stderr.startswith("error: ConfigError: ")
    assert "nowhere" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_lists_the_commands() -> None:
    shown = run("--help").stdout
    for name in (*(command.__name__ for command in COMMANDS), *GROUPS):
        assert f" {name} " in shown


@pytest.mark.parametrize("arguments", [("demo", "--workers", "0"), ("demon",), ("serve",)])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2
