"""pytest's plugin, which every test session loads where this package is installed."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import python

import sonic_coffea as sonic

HEAVY = ("awkward", "coffea", "dask", "distributed", "grpc", "numba", "numpy", "tritonclient")
SESSION = f"""
import sys


def test_nothing_heavy_is_loaded(request):
    assert request.config.pluginmanager.has_plugin("sonic_coffea._pytest_plugin")
    assert set({HEAVY!r}) & set(sys.modules) == set()
    ours = {{name for name in sys.modules if name.startswith("sonic_coffea.")}}
    assert ours == {{"sonic_coffea._pytest_plugin", "sonic_coffea._version", "sonic_coffea.errors"}}
"""


def test_a_session_of_others_loads_nothing_heavy(tmp_path: Path) -> None:
    (plugin,) = entry_points(group="pytest11", name="sonic_coffea")
    (tmp_path / "test_session.py").write_text(SESSION, encoding="utf-8")
    session = ("-m", "pytest", "-p", plugin.value, "-p", "no:cacheprovider", ".")
    # Other plugins of this environment load what they like.
    done = python(*session, cwd=tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 passed" in done.stdout


def test_functions_of_models_that_are_not_served_are_refused(sonic_server: Any) -> None:
    tagger = sonic.Model("tagger", {"x": sonic.Row("pt")}, {"y": None})
    with pytest.raises(sonic.errors.ConfigError, match="'tager'; did you mean 'tagger'"):
        sonic_server(tagger, functions={"tager": lambda inputs: {"y": inputs["x"]}})
