"""Old log files go, and those that may be in use stay."""

from __future__ import annotations

import os
import time

import pytest

from sonic_coffea.errors import ServerStartError
from sonic_coffea.server.launch._logs import last_words, new_log


def written_before(paths, days):
    then = time.time() - days * 86400
    for path in paths:
        os.utime(path, (then, then))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path))
    return tmp_path / "logs"


def test_old_logs_are_removed(folder):
    recent, old = (new_log() for _ in range(2))
    written_before([recent], days=2)
    written_before([old], days=40)
    assert {recent, new_log()} == set(folder.iterdir())


def test_a_folder_that_others_can_enter_is_refused(tmp_path, folder):
    tmp_path.chmod(0o755)
    with pytest.raises(ServerStartError, match="not a directory of this user with mode 0700"):
        new_log()


def test_last_words():
    record = "I1123 22:01:10.1 29626 model_lifecycle.cc:839] \"successfully loaded 'a'\"\n"
    table = "+---+\n| a |\n+---+\n\n"
    assert last_words("") is last_words(record) is last_words(record + table) is None
    crash = "Signal (11) received.\n 0# 0x1 in tritonserver\n\n 1# 0x2 in libc.so\n\n"
    assert last_words(f"warning\n{record}{table}{crash}") == "Signal (11) received."
