"""Scores join events of coffea 0.7, in an environment that this package is not in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .support import ROOT, blocks_of, run_pages

PAGE = ROOT / "docs" / "how-to" / "use-coffea-0.7.md"
UV = shutil.which(
    "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)


def python_3_10() -> str | None:
    """Return a Python of this machine that coffea 0.7 runs on."""
    if UV is None:
        return None
    environment = dict(os.environ)
    if shutil.which("pyenv"):  # its commands fail for every Python but the chosen ones
        listed = subprocess.run(
            ["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False
        )
        environment["PYENV_VERSION"] = ":".join(listed.stdout.split())
    find = [UV, "python", "find", "--no-project", "--no-python-downloads", "3.10"]
    found = subprocess.run(find, env=environment, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scores_join_in_an_environment_of_coffea_0_7(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    python = python_3_10()
    if UV is None or python is None:
        pytest.skip("needs uv and Python 3.10")
    run_pages([PAGE], tmp_path, environment, language="bash")
    packages = ["coffea==0.7.31", "pyarrow", "setuptools<80"]
    for command in (["venv", "-qp", python, "old"], ["pip", "install", "-qp", "old", *packages]):
        subprocess.run([UV, *command], cwd=tmp_path, check=True)
    (block,) = (block for block in blocks_of(PAGE) if block.language == "python")
    done = subprocess.run(
        [tmp_path / "old" / "bin" / "python", "-W", "ignore", "-c", block.text],
        cwd=tmp_path / PAGE.stem,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
