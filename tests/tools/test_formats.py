"""What `bench --formats` says is best for a link."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.commands import run
from tests.network.toxics import ToxicProxy

from sonic_coffea.pool import Settings
from sonic_coffea.server.in_process import KServeModel, KServeServer
from sonic_coffea.tools import Format, Formats, compare_formats, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = 64
LAUNCH_S = 0.01


def accelerator(inputs: Any) -> dict[str, Any]:
    time.sleep(LAUNCH_S)
    return {"y": inputs["x"][:, 0, :1]}


@pytest.fixture(scope="module")
def server() -> Iterator[KServeServer]:
    model = KServeModel(
        inputs={"x": ("float32", (10, 100))},
        outputs={"y": ("float32", (1,))},
        function=accelerator,
        max_rows=ROWS,
    )
    with KServeServer({"m": model}, threads=4) as running:
        yield running


def test_a_narrow_link(server: KServeServer) -> None:
    """A request of 256 kB takes a quarter of a second, far longer than anything else."""
    with ToxicProxy(server.url) as proxy:
        proxy.bytes_per_s = 1_000_000
        settings = Settings.make(proxy.url, max_in_flight=2)
        curve = measure(settings, "m", seconds=0.01)
        formats = compare_formats(settings, curve, filled=0.1, seconds=0.01)
    plain, several, gzip, half, dense = formats.ways
    assert formats.link_limits
    assert [way.row_bytes for way in formats.ways] == [4000, 4000, 4000, 2000, 400]
    # What the proxy lets through is that of each connection.
    assert several.rows_per_s > 2 * plain.rows_per_s
    assert gzip.rows_per_s > several.rows_per_s
    # By their bytes, up to the server's rate.
    for way, times in ((half, 2), (dense, 10)):
        rate = min(formats.server_rows_per_s, times * several.rows_per_s)
        assert way.rows_per_s == pytest.approx(rate)
    assert formats.best.rows_per_s == max(way.rows_per_s for way in formats.ways)
    assert all("channels=4" in way.option for way in formats.ways[1:])


def test_a_slow_server() -> None:
    ways = [("as declared", 1000.0), ("several connections", 1100.0), ("compression", 300.0)]
    formats = Formats(tuple(Format(name, "", 4000, rate, True) for name, rate in ways), 1100.0)
    assert not formats.link_limits
    assert formats.best is formats.ways[0]


def test_the_command(server: KServeServer) -> None:
    done = run("bench", server.url, "m", "--seconds", "0.01", "--formats", "--filled", "0.25")
    assert done.returncode == 0, done.stderr
    assert "formats on this link" in done.stdout
    assert "1,000" in done.stdout  # bytes of a row without padding
    wrong = run("bench", server.url, "m", "--filled", "0.25")
    assert wrong.returncode == 2
    assert "--formats" in wrong.stderr
