"""Old log files go, and those that may be in use stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sonic_coffea.server.launch._log_files import new_log


def written_before(paths, days):
    then = time.time() - days * 86400
    for path in paths:
        os.utime(path, (then, then))


def test_the_log_of_a_server_that_is_starting_is_kept(tmp_path):
    logs = {new_log(tmp_path) for _ in range(30)}
    assert logs == set(tmp_path.iterdir())


def test_old_logs_of_this_machine_are_removed(tmp_path):
    logs = [new_log(tmp_path) for _ in range(30)]
    other = tmp_path / "triton-0000000000000000-abc.log"
    older = tmp_path / "triton-1111111111111111-abc.log"
    other.touch()
    older.touch()
    written_before([*logs, other], days=2)
    written_before([older], days=40)
    written_before(logs[:5], days=3)
    newest = new_log(tmp_path)
    left = set(tmp_path.iterdir())
    assert {newest, other} < left
    assert len(left) == 22
    assert left.isdisjoint(logs[:5])


def test_logs_that_another_process_removes_at_the_same_time(tmp_path, monkeypatch):
    path = new_log(tmp_path)
    real = Path.stat

    def stat_of(self, **options):
        if self == path:
            raise FileNotFoundError
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat_of)
    assert new_log(tmp_path).exists()
