"""How much of a long link one client uses, from cold, with one connection and with several.

Two network namespaces are joined by a link whose delay, bandwidth and losses are set; real TCP goes
over it, to a real Triton whose model answers at once. The client sends rows of 2.5 kB.

Notes
-----
TCP sends no more than the buffers of both ends hold in a round trip. With 4 MB, which is Linux's
default, and 80 ms, one connection carries 400 Mbit/s at most; four connections carry four times as
much. After a lost packet, a connection slows down, and the others do not. By default, the pool
opens up to four connections if a round trip takes 10 ms or more.

The link is a program that reads the packets of one network device and writes them to the other. It
takes a good part of a core, so links of 1 Gbit/s have packets of 9,000 bytes. What the link carries
is its bandwidth without the headers of IP and TCP and without the lost packets. Where packets are
lost at 1 Gbit/s, TCP is the limit: more connections carry more.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import accelerator
import link
import numpy as np
from accelerator import FIELDS, LENGTH, MODEL, collection
from harness import Results, finish, parser
from link import Link

from sonic_coffea.pool import Pool, Settings

ROWS = 1024
ROW_BYTES = 4 * len(FIELDS) * LENGTH
PORT = 8001
URL = f"grpc://{link.FAR}:{PORT}"
# A packet's headers, of IP and of TCP with time stamps.
HEADER_BYTES = 52
LINKS = (
    Link(0.02, 200e6),
    Link(0.08, 200e6),
    Link(0.08, 200e6, 0.01),
    Link(0.02, 1e9, packet_bytes=9000),
    Link(0.08, 1e9, packet_bytes=9000),
    Link(0.08, 1e9, 0.01, packet_bytes=9000),
)
CHANNELS = (1, 4)
WARM_S = 5.0


def serve(folder: Path) -> None:
    """Run a Triton at the far end until this process is ended."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.network.tritons import Triton

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    repository = accelerator.write(folder / "repository", launch_s=1e-4, row_s=0.0)
    with Triton(repository, folder, PORT, address=link.FAR):
        (folder / "ready").touch()
        signal.pause()


def answered_at(channels: int, seconds: float) -> np.ndarray:
    """Return when requests were answered, since a pool without any connection began to send."""
    jets = collection(ROWS, mean=LENGTH)
    times: list[float] = []
    with Pool(Settings.make(URL, channels=channels)) as pool:
        begun, waiting = time.perf_counter(), deque[Any]()
        while not times or times[-1] < seconds:
            while len(waiting) < 40:
                waiting.append(MODEL.submit(jets, pool=pool))
            waiting.popleft().result()
            times.append(time.perf_counter() - begun)
        for pending in waiting:
            pending.cancel()
    return np.asarray(times)


def carried(times: np.ndarray, since: float, until: float) -> float:
    """Return the bits of tensors that were carried in a second."""
    number = np.count_nonzero((times > since) & (times <= until))
    return 8 * ROWS * ROW_BYTES * number / (until - since)


def measure(results: Results, chosen: Link, seconds: float) -> None:
    """Use one link."""
    limit = chosen.bits_per_s * (1 - HEADER_BYTES / chosen.packet_bytes) * (1 - chosen.loss)
    parts = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, __file__, "--serve", folder]
        process = stack.enter_context(link.far_away(chosen, command))
        while not (folder / "ready").exists():
            if process.poll() is not None:
                sys.exit("the server at the far end has ended")
            time.sleep(0.1)
        for channels in CHANNELS:
            times = answered_at(channels, seconds)
            edges = np.arange(0.0, seconds, 1.0)
            each = [carried(times, edge, edge + 1.0) / limit for edge in edges]
            name = f"{chosen}; {channels} connection{'s' * (channels > 1)}"
            parts[name] = each
            warm = min(WARM_S, seconds / 2)
            steady = carried(times, warm, seconds) / limit
            aimed: dict[str, Any] = {"at_least": 0.9} if channels > 1 else {}
            results.note(f"{name}: part of what the link carries", steady, **aimed)
            reached = next(
                (e + 1 for e, p in zip(edges, each, strict=True) if p >= 0.9 * steady), 99
            )
            aimed = {"at_most": WARM_S} if channels > 1 else {}
            results.note(f"{name}: s until 0.9 of that", reached, **aimed)
    results.numbers.setdefault("part of the link, by the second", {}).update(parts)


def main() -> None:
    """Run it."""
    options = parser(__doc__ or "")
    options.add_argument("--serve", type=Path, help="only serve, with files in this folder")
    chosen = options.parse_args()
    if chosen.serve is not None:
        serve(chosen.serve)
        return
    link.in_namespace()
    results = Results("Distance: one client over a long link")
    for long_link in LINKS[:1] if chosen.quick else LINKS:
        measure(results, long_link, 2.0 if chosen.quick else 15.0)
    results.numbers["congestion control"] = (
        Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    )
    finish(results, chosen)


if __name__ == "__main__":
    main()
