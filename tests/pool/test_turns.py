"""The switch interval of a process: short while a pool is in use, else as the user has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, as other tests of this process may have pools in use.
CODE = """
import json, sys
from tests.pool.scripted import MODEL, ScriptedServer, objects, pool_of

ScriptedServer("grpc://s1:8001")
seen = {}

def note(when):
    seen[when] = sys.getswitchinterval()

with pool_of("grpc://s1:8001") as pool:
    note("before its first use")
    MODEL(objects(1), pool=pool)
    note("in use")
    with pool_of("grpc://s1:8001") as other:
        MODEL(objects(1), pool=other)
    note("one of two closed")
note("closed")

with pool_of("grpc://s1:8001") as pool:
    MODEL(objects(1), pool=pool)
    sys.setswitchinterval(0.003)
note("set meanwhile")

with pool_of("grpc://s1:8001") as pool:
    MODEL(objects(1), pool=pool)
    note("set before")
note("set before, and closed")
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def intervals() -> dict[str, float]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True, timeout=200
    )
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def test_it_is_short_while_a_pool_is_in_use(intervals: dict[str, float]) -> None:
    assert intervals["before its first use"] == intervals["closed"] == 0.005
    assert intervals["in use"] == intervals["one of two closed"] < 0.002


@pytest.mark.parametrize("when", ["set meanwhile", "set before", "set before, and closed"])
def test_an_interval_of_the_user_stays(intervals: dict[str, float], when: str) -> None:
    assert intervals[when] == 0.003
