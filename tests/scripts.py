"""Scripts in a Python of their own, for what an imported package or this process would hide."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def python(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    check: bool = True,
    timeout_s: float = 120,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run this Python, with more variables; what it said is shown if it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**env, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert not (check and done.returncode), f"{done.stdout}\n{done.stderr}"
    return done
