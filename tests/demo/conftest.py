"""Files as users have them, made from the sample: without constituents, data, PFNano."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import pytest
import uproot

from sonic_coffea.demo.samples import DATA

if TYPE_CHECKING:
    from pathlib import Path


def demo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sonic_coffea", "demo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def demo_json(*arguments: str | Path) -> dict[str, Any]:
    done = demo(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def rewrite(
    target: Path,
    keep: Any,
    rename: Any = lambda name: name,
    *,
    events: int = 300,
    jets: int | None = None,
) -> Path:
    """Write the first events of a sample file with some of its branches, under other names.

    Of each event, so many of the first large-radius jets are kept.
    """
    with uproot.open(DATA / "TTbar_1.root") as source:
        names = [b for b in source["Events"].keys() if keep(b) and not b.startswith("n")]  # noqa: SIM118
        arrays = {b: source["Events"][b].array(entry_stop=events) for b in names}
    single = {b: a for b, a in arrays.items() if a.ndim == 1}
    jagged: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        if array.ndim > 1:
            collection, _, field = rename(name).partition("_")
            kept = array[:, :jets] if collection == "FatJet" else array
            jagged.setdefault(collection, {})[field] = kept
    branches = {**single, **{c: ak.zip(f) for c, f in jagged.items()}}
    types = {name: np.asarray(a).dtype if a.ndim == 1 else a.type for name, a in branches.items()}
    with uproot.recreate(target) as file:
        # Assigned as a dict, it would become an RNTuple.
        file.mktree("Events", {n: t if n in single else t.content for n, t in types.items()})
        file["Events"].extend(branches)
    return target


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return demo_json("--output", tmp_path_factory.mktemp("demo"))
