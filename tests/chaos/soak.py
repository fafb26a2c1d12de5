"""Many calls, and many connections, after which a process holds no more than before.

``python -m tests.chaos.soak --calls 100000`` makes as many small calls, a fiftieth as many large
ones, and connects and closes a fiftieth as often.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.chaos.leaks import BYTES, NATIVES, held, settled
from tests.chaos.load import EVENTS, SUMS, difference, jets
from tests.chaos.world import build
from tests.waiting import PATIENT

import sonic_coffea as sonic
from sonic_coffea.pool import Pool, Settings

# So much allocators may keep after many calls, and so many threads gRPC, which has more under load.
KEPT = {BYTES: 30_000_000, NATIVES: 8}


def soak(calls: int) -> list[str]:
    """Return what is wrong after so many small calls, and the large ones and connections."""
    events, problems = jets(), list[str]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(sonic.LocalServer(build(folder)))

        def call(number: int, size: int, pool: Any) -> None:
            start = number * 10 % (EVENTS - size + 1)
            scores = SUMS(events[start : start + size], pool=pool)
            problems.extend(difference(scores, start, start + size))

        def connected(number: int) -> None:
            with Pool(Settings.make(server)) as pool:
                call(number, 10, pool)

        with Pool(Settings.make(server)) as pool:
            kinds: dict[str, tuple[int, Callable[[int], None]]] = {
                "small calls": (calls, lambda number: call(number, 10, pool)),
                "large calls": (calls // 50, lambda number: call(number, EVENTS, pool)),
                "connections": (calls // 50, connected),
            }
            for name, (times, make) in kinds.items():
                # Caches fill, and allocators take what they keep, in the first fifth.
                for number in range(times // 5):
                    make(number)
                before, begun = held(), time.monotonic()
                for number in range(times // 5, times):
                    make(number)
                leaks = settled(before, KEPT, within_s=60.0)
                problems += [f"after {times:,} {name}: {n:,} {leak}" for leak, n in leaks.items()]
                grown = (held()[BYTES] - before[BYTES]) / 1e6
                took_s = time.monotonic() - begun
                print(f"{times:,} {name}: {took_s:.0f} s, {grown:+.1f} MB", flush=True)
    return problems


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--calls", type=int, default=100_000, help="small calls")
    os.environ.update(PATIENT)
    problems = soak(parser.parse_args().calls)
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
