from __future__ import annotations

import subprocess
import sys

import pytest

import sonic_coffea


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sonic_coffea", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version() -> None:
    done = run("--version")
    assert done.stdout.strip() == f"sonic-coffea {sonic_coffea.__version__}"


def test_help_lists_the_commands() -> None:
    done = run("--help")
    for command in ("demo", "serve", "server"):
        assert command in done.stdout


@pytest.mark.parametrize("arguments", [("demo", "--workers", "0"), ("demon",), ("serve",)])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_serving_nothing_says_what_is_missing(tmp_path: object) -> None:
    done = run("serve", f"{tmp_path}/nowhere")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
