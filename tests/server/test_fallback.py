"""The lock by which one local server is started for all processes of a machine."""

from __future__ import annotations

import subprocess
import sys
import threading

import dask.config
import pytest

from sonic_coffea.server import InProcessServer
from sonic_coffea.server.launch import _fallback as fallback


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


HOLDER = """
import sys
from sonic_coffea.server.launch._fallback import _alone_on_machine
with _alone_on_machine("/models", "this"):
    print("holds it", flush=True)
    sys.stdin.read()
    open(sys.argv[1], "w").close()
"""


def test_processes_of_one_machine_wait_for_each_other(tmp_path):
    """Machines with the same home do not."""
    released, seen = tmp_path / "released", []

    def wait():
        with fallback._alone_on_machine("/models", "this"):
            seen.append(released.exists())

    command = [sys.executable, "-c", HOLDER, str(released)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"holds it\n"
        waiting = threading.Thread(target=wait)
        waiting.start()
        with fallback._alone_on_machine("/models", "other"):
            assert not released.exists()
        with fallback._alone_on_machine("/others", "this"):
            assert not released.exists()
        holder.stdin.close()
        waiting.join(60)
    assert seen == [True]


def test_where_files_cannot_be_locked(state, caplog):
    with fallback._alone_on_machine("/models", "this"):
        (lock,) = state.glob("fallback-*.lock")
    # Nor can a folder be.
    lock.unlink(missing_ok=True)
    lock.mkdir()
    done = []
    with fallback._alone_on_machine("/models", "this"):
        done.append("work")
    assert done == ["work"]
    assert "cannot lock" in caplog.text
    with (
        pytest.raises(OSError, match="of the work"),
        fallback._alone_on_machine("/models", "this"),
    ):
        raise OSError("of the work")


def test_the_configuration_chooses_a_server_in_this_process(repository):
    with dask.config.set({"sonic.local.runtime": "in-process"}):
        assert isinstance(fallback._new(str(repository)), InProcessServer)
