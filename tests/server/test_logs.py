"""Old log files go, and those that may be in use stay."""

from __future__ import annotations

import os
import time

from sonic_coffea.server.launch._logs import last_words, loaded_models, new_log


def written_before(paths, days):
    then = time.time() - days * 86400
    for path in paths:
        os.utime(path, (then, then))


def test_old_logs_are_removed(tmp_path):
    recent, old = (new_log(tmp_path) for _ in range(2))
    written_before([recent], days=2)
    written_before([old], days=40)
    assert {recent, new_log(tmp_path)} == set(tmp_path.iterdir())


def test_logs_that_another_process_removes_at_the_same_time(tmp_path):
    # A name that is there, and no file.
    (tmp_path / "triton-removed.log").symlink_to(tmp_path / "removed")
    assert new_log(tmp_path).exists()


def test_loaded_models():
    log = """
I1123 22:01:10.1 29626 model_lifecycle.cc:472] "loading: a:1"
I1123 22:01:10.2 29626 model_lifecycle.cc:472] "loading: b:1"
I1123 22:01:11.3 29626 model_lifecycle.cc:839] "successfully loaded 'a'"
I1123 22:01:11.4 29626 model_lifecycle.cc:472] "loading: c:1"
E1123 22:01:11.5 29626 model_lifecycle.cc:642] "failed to load 'c' version 1: Internal: no"
I1123 22:01:12.6 29626 model_lifecycle.cc:839] "successfully loaded 'b'"
I1123 22:01:13.7 29626 model_lifecycle.cc:472] "loading: a:2"
I1123 22:01:14.8 29626 model_lifecycle.cc:624] "successfully unloaded 'b' version 1"
I1123 22:01:15.9 29626 model_lifecycle.cc:839] "successfully loaded 'a'"
"""
    assert loaded_models(log) == ["a"]
    replaced = """"successfully unloaded 'a' version 1"\n"""
    assert loaded_models(log + replaced) == ["a"]
    assert loaded_models(log + replaced + replaced.replace("1", "2")) == []
    assert loaded_models("") == []


def test_last_words():
    record = "I1123 22:01:10.1 29626 model_lifecycle.cc:839] \"successfully loaded 'a'\"\n"
    table = "+---+\n| a |\n+---+\n\n"
    assert last_words("") is last_words(record) is last_words(record + table) is None
    crash = "Signal (11) received.\n 0# 0x1 in tritonserver\n\n 1# 0x2 in libc.so\n\n"
    assert last_words(f"warning\n{record}{table}{crash}") == "Signal (11) received."
