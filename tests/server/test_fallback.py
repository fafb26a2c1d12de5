"""The lock by which one local server is started for all processes of a machine."""

from __future__ import annotations

import dask.config
import pytest

from sonic_coffea.server import InProcessServer
from sonic_coffea.server.launch import _fallback as fallback
from sonic_coffea.transport import local_state


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_machines_with_the_same_home_do_not_wait_for_each_other(monkeypatch, caplog):
    def waits(machine):
        monkeypatch.setattr(local_state, "machine", lambda: machine)
        with fallback._alone_on_machine("/models"):
            # No time to wait is an error, which is told as any.
            return "cannot lock" in caplog.text

    monkeypatch.setattr(local_state, "machine", lambda: "this")
    with fallback._alone_on_machine("/models"):
        monkeypatch.setattr(fallback.filelock.FileLock, "__enter__", lambda lock: lock.acquire(0))
        assert not waits("other")
        assert waits("this")


def test_where_files_cannot_be_locked(monkeypatch, caplog):
    def unsupported(*_, **__):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fallback.filelock.FileLock, "acquire", unsupported)
    done = []
    with fallback._alone_on_machine("/models"):
        done.append("work")
    assert done == ["work"]
    assert "cannot lock" in caplog.text
    with pytest.raises(OSError, match="of the work"), fallback._alone_on_machine("/models"):
        raise OSError("of the work")


def test_the_configuration_chooses_a_server_in_this_process(repository):
    with dask.config.set({"sonic.local.runtime": "in-process"}):
        assert isinstance(fallback._new(str(repository)), InProcessServer)
