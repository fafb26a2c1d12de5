"""Processes that coffea's executors start: their pools, settings, secrets and statistics."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import loky
import pytest
from coffea import processor
from tests.doubling import Doubling, multiplier

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import current
from sonic_coffea.testing import FakeServer

CHUNKS = [ak.Array([[{"pt": float(number)}], []]) for number in range(12)]

pytestmark = [
    pytest.mark.server,  # several processes
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Scoring(Doubling, processor.ProcessorABC):
    """Returns the scores, and which pools of which processes gave them."""

    def produce(self, events: Any, scores: Any) -> dict[str, Any]:
        pool = current()
        return {
            "scores": set(ak.flatten(scores["m"].twice).tolist()),
            "pools": {(os.getpid(), id(pool), pool.settings.servers)},
        }


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """A process that outlives runs, as those of a batch system's executors do."""
    with loky.ProcessPoolExecutor(max_workers=1) as pool:
        yield pool


def run(processes: Any) -> dict[str, Any]:
    executor = processor.FuturesExecutor(pool=processes, status=False, retries=0)
    # As coffea's runner pickles it: anew for each chunk.
    out, failure = executor(CHUNKS, Scoring().process, None)
    assert failure == 0
    return dict(out)


def check(out: dict[str, Any], server: FakeServer) -> None:
    """All scores, one pool for each process, and statistics of all chunks."""
    assert out["scores"] == {2.0 * number for number in range(len(CHUNKS))}
    assert {servers for _, _, servers in out["pools"]} == {(server.url,)}
    statistics = sonic.report(out).statistics
    assert (statistics.chunks, statistics.scored) == (len(CHUNKS), len(CHUNKS))
    assert server.statistics["m", "rows"] == len(CHUNKS)
    assert len(out["pools"]) == len({process for process, *_ in out["pools"]})


def test_processes_keep_their_pool_and_outlive_it(processes: Any) -> None:
    """One pool for all chunks of a run; the next run has the pool of its own servers."""
    pids = []
    for _ in range(2):
        with multiplier() as server, sonic.connect(server.url):
            out = run(processes)
        check(out, server)
        pids.append({process for process, *_ in out["pools"]})
    assert pids[0] & pids[1]


def test_token_files_are_found(
    processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its whole path: workers run elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("hush")
    with (
        multiplier(headers={"authorization": "Bearer hush"}) as server,
        sonic.connect(server.url, token_file="token"),
    ):
        check(run(processes), server)


def test_tokens_that_stay_are_told_of(processes: Any, caplog: pytest.LogCaptureFixture) -> None:
    with multiplier(headers={"authorization": "Bearer hush"}) as server:
        with caplog.at_level(logging.WARNING), sonic.connect(server.url, token="hush"):
            assert "token= of connect stays in this process" in caplog.text
            assert "hush" not in caplog.text
            with pytest.raises(errors.ConfigError, match=r"was given token= in another process"):
                run(processes)
        assert not server.requests
