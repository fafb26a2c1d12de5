"""Files as users have them, made from the sample: without constituents, data, PFNano."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
import uproot
from rich.console import Console
from tests.commands import json_of, run

from sonic_coffea.dask import cluster
from sonic_coffea.demo import workflow
from sonic_coffea.demo.samples import DATA


def demo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run("demo", *arguments)


def demo_json(*arguments: str | Path) -> dict[str, Any]:
    return dict(json_of("demo", *arguments))


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


@pytest.fixture(scope="module")
def standing() -> Iterator[tuple[Any, Any]]:
    """A server and a cluster of the demo, which last for several runs."""
    console = Console(stderr=True)
    with workflow._server(console) as server, cluster(1) as client:
        yield server, client


@pytest.fixture(scope="module")
def _uses_standing(standing: tuple[Any, Any]) -> Iterator[None]:
    """Have runs in this process use what stands, in place of starting their own."""
    server, client = standing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow, "_server", lambda _: contextlib.nullcontext(server))
        patch.setattr("sonic_coffea.dask.cluster", lambda _: contextlib.nullcontext(client))
        yield


@pytest.fixture(scope="module")
def sample_run(_uses_standing: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo of the whole sample; a page of the documentation runs it in a process of its own."""
    return demo_json("--output", tmp_path_factory.mktemp("demo"))
