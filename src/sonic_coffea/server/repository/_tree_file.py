"""Files of boosted trees, read by XGBoost and LightGBM themselves."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.server import _install as install
from sonic_coffea.server.repository._tensors import Interface, declared

__all__ = ["TreeFile", "read"]

_SCRIPT = Path(__file__).with_name("_tree_reader.py")
_TITLES = {"xgboost": "XGBoost", "lightgbm": "LightGBM"}
_READ_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreeFile:
    """What the trees take and give, and what the columns of the input are, where the file says."""

    interface: Interface
    features: tuple[str, ...]


def read(kind: str, path: Path, model: str) -> TreeFile:
    """Read a file of trees, by the package in this environment or in the local server's.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If it is no such file, or neither environment has the package.
    """
    if not path.is_file():
        raise ConfigError(f"expected {_TITLES[kind]} trees, got {path}, which is not a file")
    done = subprocess.run(
        [*_interpreter(kind, path), str(_SCRIPT), kind, str(path)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=_READ_TIMEOUT_S,
    )
    try:
        about: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        about = {"error": last}
    if "error" in about:
        raise ConfigError(
            f"expected {_TITLES[kind]} trees in {path}, which {kind} cannot read: {about['error']}"
        )
    interface = declared(
        model,
        {"features": ("float32", [-1, about["features"]])},
        {"scores": (about["dtype"], [-1, about["outputs"]])},
    )
    return TreeFile(interface=interface, features=tuple(about["names"] or ()))


def _interpreter(package: str, path: Path) -> list[str]:
    if importlib.util.find_spec(package) is not None:
        return [sys.executable]
    server = install.find()
    if server is not None and package in server.extras:
        return [str(server.python), "-I"]
    raise ConfigError(
        f"reading {path} needs the package {package}, which neither this environment nor the "
        f"local server's has: sonic-coffea server install --with {package}"
    )
