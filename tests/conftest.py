"""A real Triton with small models whose answers are easy to know.

Property tests try 40 examples; with ``HYPOTHESIS_PROFILE=long`` in the environment, 2,000.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import onnxruntime
import pytest
from hypothesis import HealthCheck, settings
from tests.onnx_files import save_onnx
from tests.scored import Scored, random_jets
from tests.waiting import PATIENT

import sonic_coffea as sonic
from sonic_coffea.server import ServerInstall, ensure

# These have an environment of their own: dask-awkward needs an older dask.
collect_ignore = [] if find_spec("dask_awkward") else ["lazy"]

# Real proxies are started, overloaded and killed there, real batch systems wait for jobs, and whole
# samples are scored.
SLOW = {"demo", "examples", "facilities", "network"}

# Where the tests run that a choice by markers leaves out.
ELSEWHERE = {"server": "make test", "slow": "make test-slow", "benchmark": "make bench-quick"}

for profile, max_examples in {"quick": 40, "long": 2000}.items():
    settings.register_profile(
        profile,
        max_examples=max_examples,
        # How long an example takes is the machine's affair.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_configure() -> None:
    """Hear Ctrl-C, and let every child hear it, also where a shell's `&` made us deaf to it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need an installed Triton, and those of folders that take minutes.

    Pages and benchmarks stand between the others, so that no process waits for them in the end.
    """
    for item in items:
        if item.path.parent.name in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.path.parent.name == "lazy" or "use-dask-awkward" in item.name:
            item.add_marker(pytest.mark.lazy)
        if "installation" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.server)
    long = [item for item in items if getattr(item, "originalname", "") == "test_page_runs"]
    long += [item for item in items if item.get_closest_marker("benchmark")]
    items[:] = [item for item in items if item not in long]
    for number, item in enumerate(long):
        items.insert(number * len(items) // len(long), item)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which tests were not even collected or chosen; `-ra` names those that were skipped."""
    for mark, command in ELSEWHERE.items():
        if f"not {mark}" in config.option.markexpr:
            terminalreporter.write_line(f"left out: marked `{mark}`; `{command}` runs them")
    for folder in collect_ignore:
        reason = "dask-awkward is not installed here; `make image` runs them"
        terminalreporter.write_line(f"left out: tests/{folder}: {reason}")


@pytest.fixture(autouse=True)
def servers_are_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts a Triton without the marker, by which `make quick` leaves it out."""
    if request.node.get_closest_marker("server") is None:

        def refuse(_: sonic.LocalServer) -> None:
            pytest.fail("a test that starts a Triton has the marker `server`")

        monkeypatch.setattr(sonic.LocalServer, "start", refuse)


@pytest.fixture(scope="session", autouse=True)
def environment_of_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' records of servers away from those of the user; let servers be patient."""
    folder = str(tmp_path_factory.mktemp("state"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SONIC_COFFEA_STATE_DIR": folder, **PATIENT}.items():
            patch.setenv(name, value)
        yield


def save_tagger(path: Path) -> Path:
    """features [N, 2, L] and mask [N, 1, L] to scores [N, 2], and a weight for each [N, L, 2]."""
    return save_onnx(
        path,
        """(float[N, 2, L] features, float[N, 1, L] mask)
        => (float[N, 2] scores, float[N, L, 2] weights) <int64[1] axis = {2}> {
            used = Mul(features, mask)
            sums = ReduceSum<keepdims = 0>(used, axis)
            scores = Softmax<axis = 1>(sums)
            weights = Transpose<perm = [0, 2, 1]>(used)
        }""",
    )


@pytest.fixture(scope="session")
def tagger_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tagger(tmp_path_factory.mktemp("onnx") / "tagger.onnx")


@pytest.fixture(scope="session")
def repository(tagger_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "repository"
    sonic.build_repository(path, {"tagger": tagger_path}, max_batch_size=64)
    return path


@pytest.fixture(scope="session")
def installation() -> ServerInstall:
    """Return the Triton from PyPI; whatever starts one asks for this, which marks its tests."""
    return ensure()


@pytest.fixture(scope="session")
def server(repository: Path, installation: ServerInstall) -> Iterator[sonic.LocalServer]:
    # It may end at once: no test waits for what is in flight as it stops.
    with sonic.LocalServer(repository, stop_timeout_s=0.0) as running:
        yield running


@pytest.fixture
def connected(server: sonic.LocalServer) -> Iterator[sonic.Pool]:
    with sonic.connect(server) as pool:
        yield pool


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    from sonic_coffea.pool import forget

    yield
    forget()


@pytest.fixture(scope="session")
def tagger() -> sonic.Model:
    return sonic.Model(
        "tagger",
        inputs={"features": sonic.Padded(["pt", "eta"], 8), "mask": sonic.Mask(8)},
        outputs={"scores": ["qcd", "top"]},
    )


@pytest.fixture(scope="session")
def jets() -> ak.Array:
    """2000 events with some thousand jets, of which some are None or empty."""
    nested = random_jets(5, events=2000, constituents=4)
    n_jets = ak.num(nested)
    present = np.random.default_rng(5).random(ak.sum(n_jets)) > 0.1
    return ak.mask(nested, ak.unflatten(present, n_jets))


@pytest.fixture(scope="session")
def direct(tagger_path: Path, jets: ak.Array) -> list[Any]:
    """The top scores by onnxruntime, in the structure of the jets."""
    session = onnxruntime.InferenceSession(tagger_path)
    flat = ak.drop_none(ak.flatten(jets), axis=0)
    features = np.zeros((len(flat), 2, 8), np.float32)
    mask = np.zeros((len(flat), 1, 8), np.float32)
    for i, jet in enumerate(flat):
        n = min(len(jet), 8)
        features[i, 0, :n], features[i, 1, :n] = jet.pt[:n], jet.eta[:n]
        mask[i, 0, :n] = 1
    scores = iter(session.run(["scores"], {"features": features, "mask": mask})[0][:, 1].tolist())
    there = (~ak.is_none(jets, axis=1)).tolist()
    return [[next(scores) if jet else None for jet in event] for event in there]


@pytest.fixture(scope="session")
def scored(tagger: sonic.Model, jets: ak.Array, direct: list[Any]) -> Scored:
    return Scored(tagger, jets, direct)
