"""Old log files go, and those that may be in use stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sonic_coffea.server.launch._logs import new_log


def written_before(paths, days):
    then = time.time() - days * 86400
    for path in paths:
        os.utime(path, (then, then))


def test_old_logs_are_removed(tmp_path):
    recent, old = (new_log(tmp_path) for _ in range(2))
    written_before([recent], days=2)
    written_before([old], days=40)
    assert {recent, new_log(tmp_path)} == set(tmp_path.iterdir())


def test_logs_that_another_process_removes_at_the_same_time(tmp_path, monkeypatch):
    path = new_log(tmp_path)
    real = Path.stat

    def stat_of(self, **options):
        if self == path:
            raise FileNotFoundError
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat_of)
    assert new_log(tmp_path).exists()
