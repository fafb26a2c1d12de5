"""What a notebook shows of models, pools, servers and calls; long calls that are interrupted."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import awkward as ak
import grpc
import numpy as np
import pytest
from tests.waiting import ctrl_c_in, until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = sonic.Model(
    "tagger<1>",
    {"x": sonic.Padded(["pt", "eta"], 8), "mask": sonic.Mask(8), "row": sonic.Row("pt")},
    {"y": ["qcd", "top"], "w": sonic.Output(per="constituent")},
)
ROW = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["twice"]})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    double = FakeModel.of(ROW, lambda inputs: {"y": 2 * inputs["x"]}, max_rows=4)
    with FakeServer({"m": double}) as running:
        yield running


def objects(n: int) -> ak.Array:
    return ak.zip({"pt": np.arange(n, dtype=np.float32)})


def test_a_model_shows_its_contract() -> None:
    page = MODEL._repr_html_()
    for shown in ("tagger&lt;1&gt;", "float32 [N, 2, 8]", "float32 [N, 1, 8]", "Padded", "Mask"):
        assert shown in page, shown
    assert "qcd, top; per row" in page
    assert "numbers; per constituent" in page


def test_a_pool_shows_its_servers(server: FakeServer) -> None:
    with Pool(Settings.make(server.url, retry_timeout_s=0.1)) as pool:
        assert "not used yet" in pool._repr_html_()
        ROW(objects(8), pool=pool)
        assert "8 rows in 2 requests" in pool._repr_html_()
        assert "closed" in pool._repr_html_()
        server.fail(grpc.StatusCode.UNAVAILABLE, "<gone>", times=100)
        with pytest.raises(errors.ServerLostError):
            ROW(objects(8), pool=pool)
        assert "&lt;gone&gt;" in pool._repr_html_()


def test_a_pending_call_shows_how_far_it_is(server: FakeServer) -> None:
    with Pool(Settings.make(server.url)) as pool:
        ROW(objects(4), pool=pool)
        server.hold()
        pending = ROW.submit(objects(8), pool=pool)
        assert "on its way" in pending._repr_html_()
        assert "0, 0%" in pending._repr_html_()
        server.release()
        pending.result()
        assert "8, 100%" in pending._repr_html_()
        server.fail(grpc.StatusCode.INVALID_ARGUMENT, "no luck")
        failed = ROW.submit(objects(4), pool=pool)
        with pytest.raises(errors.RequestError):
            failed.result()
        page = failed._repr_html_()
        assert "failed: the server rejected the request: no luck" in page
        assert "on its way" not in page
        assert "waits for it" not in page
        varied = ROW.submit(sonic.Variations(a=objects(2), b=objects(2)), pool=pool)
        varied.result(progress=True)
        assert "4, 100%" in varied._repr_html_()


@pytest.mark.server
def test_a_local_server_shows_what_it_serves(repository: Path) -> None:
    server = sonic.LocalServer(repository)
    assert "stopped" in server._repr_html_()
    with server:
        page = server._repr_html_()
        assert server.url in page
        assert "tagger v1 READY" in page


def test_what_is_interrupted_is_not_lost(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the call; the same call again sends what was not answered."""
    monkeypatch.setattr("sonic_coffea.model._pending._KEPT_WITHIN_S", 60.0)
    options: dict[str, Any] = {"cache": tmp_path / "scores", "cache_trusts_versions": True}
    with Pool(Settings.make(server.url, max_in_flight=1, **options)) as pool:
        pending = ROW.submit(objects(2000), pool=pool)
        until(lambda: server.statistics["m", "rows"] >= 40)
        server.hold()
        (call,) = (part.call for part in pending.parts)
        with pytest.raises(KeyboardInterrupt) as interrupted, ctrl_c_in(call):
            pending.result(progress=True)
        if sys.version_info >= (3, 11):
            (note,) = interrupted.value.__notes__
            assert re.fullmatch(
                r"[\d,]+ of 2,000 rows of m were scored; what is in the cache is not sent again",
                note,
            )
        server.release()
        before = server.statistics["m", "rows"]
        again = ROW.submit(objects(2000), pool=pool)
        assert again.result().twice.tolist() == [2.0 * n for n in range(2000)]
        assert again.statistics.cache_hits >= 30
        assert server.statistics["m", "rows"] - before <= 2000 - 30
