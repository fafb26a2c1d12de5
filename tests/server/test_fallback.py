"""The lock by which one local server is started for all processes of a machine."""

from __future__ import annotations

import subprocess
import sys
import threading

import dask.config
import pytest

from sonic_coffea.server import InProcessServer
from sonic_coffea.server._folders import alone_on_machine
from sonic_coffea.server.launch import _fallback as fallback


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


HOLDER = """
import sys
from sonic_coffea.server._folders import alone_on_machine
with alone_on_machine("models"):
    print("holds it", flush=True)
    sys.stdin.read()
    open(sys.argv[1], "w").close()
"""


def test_processes_of_one_machine_wait_for_each_other(tmp_path):
    released, seen = tmp_path / "released", []

    def wait():
        with alone_on_machine("models"):
            seen.append(released.exists())

    command = [sys.executable, "-c", HOLDER, str(released)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"holds it\n"
        waiting = threading.Thread(target=wait)
        waiting.start()
        with alone_on_machine("others"):
            assert not released.exists()
        holder.stdin.close()
        waiting.join(60)
    assert seen == [True]


def test_the_configuration_chooses_a_server_in_this_process(repository):
    with dask.config.set({"sonic.local.runtime": "in-process"}):
        assert isinstance(fallback._new(str(repository)), InProcessServer)
