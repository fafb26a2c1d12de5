"""The command line in the process of a test, which saves the second that a new one takes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from sonic_coffea.cli._main import app


def run(
    *arguments: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Return what a process would; what the command changes in this one is undone."""
    logger, here = logging.getLogger("sonic_coffea"), Path.cwd()
    before = logger.level, logger.handlers, sys.path.copy(), set(sys.modules)
    os.chdir(cwd or here)
    try:
        done = CliRunner(env=variables).invoke(app, [*map(str, arguments)], catch_exceptions=False)
    finally:
        os.chdir(here)
        logger.setLevel(before[0])  # which forgets what loggers below remember of levels
        logger.handlers, sys.path[:] = before[1:3]
        # A user's module has the same name in another test.
        for name in set(sys.modules) - before[3]:
            if name == "analysis":
                del sys.modules[name]
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def json_of(*arguments: object, cwd: Path | None = None) -> Any:
    """Return what a command that succeeds says as JSON."""
    done = run(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
