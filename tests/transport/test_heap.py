"""What the C library keeps of freed memory once large messages are sent."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport._heap import keep_memory

GLIBC = platform.libc_ver()[0] == "glibc"
# How many new pages large blocks take, before and after, as in dask's workers.
SCRIPT = """
import resource
from sonic_coffea.transport._heap import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        b"".join([bytes(1), memoryview(large)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

large = bytearray(4_000_000)
first = faults()
print(keep_memory())
faults()
print(first, faults())
"""


def printed(**environment: str) -> list[str]:
    known = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env={**known, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(not GLIBC, reason="only glibc says what it keeps")
def test_large_messages_lie_in_memory_that_was_used_before() -> None:
    kept, before, after = printed(MALLOC_TRIM_THRESHOLD_="65536")
    assert kept == "True"
    assert int(after) < int(before) / 10


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_what_a_user_has_set_stays(name: str) -> None:
    assert printed(**{name: "131072"})[0] == "False"


def test_it_is_kept_from_the_first_large_message_on() -> None:
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": None})
    served = FakeModel.of(model, lambda inputs: {"y": inputs["x"]}, max_rows=50_000)
    keep_memory.cache_clear()
    with FakeServer({"m": served}) as fake, sonic.connect(fake.url, shared_memory=False):
        for rows, expected in ((10, 0), (50_000, 1)):
            model(ak.zip({"pt": np.zeros(rows, np.float32)}))
            assert keep_memory.cache_info().currsize == expected
