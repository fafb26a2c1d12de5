"""What a user's shell has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's environment: this Python first, no display, a place of its own for state."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DASK_SONIC", "PYTEST"))}
    return {
        **clean,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "MPLBACKEND": "Agg",
        "SONIC_COFFEA_STATE_DIR": str(tmp_path_factory.mktemp("state")),
    }
