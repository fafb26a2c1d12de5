"""Records of local servers: private, tidy, and worthless to others."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import stat
import subprocess
import sys
import time

import pytest
from tests.limits import without_room

from sonic_coffea.transport import local_state

URL = "grpc://127.0.0.1:4711"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    folder = tmp_path / "state"
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(folder))
    return folder


def record(pid=None, url=URL, **changes):
    pid = os.getpid() if pid is None else pid
    values = {
        "url": url,
        "pid": pid,
        "start_ticks": local_state.process_start_ticks(pid),
        "supervisor_pid": 1,
        "header": "triton-grpc-protocol-sonic",
        "secret": "hush",
        "repository": "/models",
        "log": "/log",
        "started": 1.5,
        "shm_prefix": "sonic_none_",
    }
    return local_state.ServerRecord(**{**values, **changes})


def test_round_trip_by_any_way_of_writing_the_address():
    assert local_state.lookup(URL) is None
    local_state.register(record())
    for url in (
        URL,
        "grpc://localhost:4711",
        "triton+grpc://127.0.0.1:4711/top/1",
    ):
        assert local_state.lookup(url) == record()
    assert local_state.records() == [record()]
    assert record().headers == {"triton-grpc-protocol-sonic": "hush"}
    local_state.remove(URL, os.getppid())
    assert local_state.lookup(URL) == record()  # another process ends
    local_state.remove(URL, os.getpid())
    local_state.remove(URL, os.getpid())
    assert local_state.lookup(URL) is None
    assert local_state.records() == []


@pytest.mark.parametrize(
    "url",
    ["grpc://triton.example:4711", "grpc://10.0.0.1:4711", "grpc://127.0.0.1", ""],
)
def test_other_addresses_have_no_record(url):
    local_state.register(record())
    assert local_state.lookup(url) is None


def test_files_are_private_whatever_the_umask(state):
    before = os.umask(0)
    try:
        path = local_state.register(record())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_reach_is_ignored(mode, caplog):
    path = local_state.register(record())
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert local_state.lookup(URL) is None
    assert "expected a file of this user with mode 0600" in caplog.text
    assert "hush" not in caplog.text


def test_a_directory_that_others_can_reach_is_ignored(state, caplog):
    local_state.register(record())
    (state / "servers").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert local_state.lookup(URL) is None
    assert "mode 0700" in caplog.text


@pytest.mark.parametrize("way", ["itself", "link"])
def test_a_directory_of_others_stays_as_it_is(way, tmp_path, monkeypatch, caplog):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    named = shared
    if way == "link":
        named = tmp_path / "link"
        named.symlink_to(shared)
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(named))
    with caplog.at_level(logging.WARNING):
        assert local_state.directory() is None
        assert local_state.register(record()) is None
    assert f"ignoring {named}: expected a directory of this user with mode 0700" in caplog.text
    assert stat.S_IMODE(shared.stat().st_mode) == 0o775
    assert list(shared.iterdir()) == []


def test_the_directory_of_records_is_not_made_private_by_force(state, caplog):
    (state / "servers").mkdir(parents=True)
    state.chmod(0o700)
    (state / "servers").chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert local_state.register(record()) is None
    assert stat.S_IMODE((state / "servers").stat().st_mode) == 0o755


def test_a_link_is_not_followed(tmp_path, caplog):
    path = local_state.register(record())
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with caplog.at_level(logging.WARNING):
        assert local_state.lookup(URL) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_ignored(caplog):
    path = local_state.register(record())
    os.chown(path, 12345, -1)
    with caplog.at_level(logging.WARNING):
        assert local_state.lookup(URL) is None
    assert path.exists()


@pytest.mark.parametrize("content", [b"", b"not json", b"[]", b'{"url": "x"}'])
def test_a_damaged_record_is_ignored(content, caplog):
    path = local_state.register(record())
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert local_state.lookup(URL) is None
    assert str(path) in caplog.text


def test_a_server_that_has_ended_by_itself_stays_on_record():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        local_state.register(record(process.pid))
        assert local_state.lookup(URL).pid == process.pid
    assert local_state.lookup(URL) is None
    assert local_state.records() == []
    assert local_state.find(URL).pid == process.pid
    local_state.remove(URL)
    assert local_state.find(URL) is None


def test_a_process_number_that_was_used_again_is_noticed():
    local_state.register(record(start_ticks=1))
    assert local_state.records() == []
    assert local_state.lookup(URL) is None


def test_old_records_of_servers_that_have_ended_go(state):
    old, recent, running = (f"grpc://127.0.0.1:{port}" for port in (4712, 4713, 4714))
    for url in (old, recent):
        local_state.register(record(url=url, start_ticks=1))
    local_state.register(record(url=running))
    then = time.time() - 40 * 86400
    for url in (old, running):
        os.utime(local_state.record_path(url), (then, then))
    local_state.register(record())
    assert local_state.find(old) is None
    assert local_state.find(recent) is not None
    assert local_state.lookup(running) is not None


def test_the_other_loopback_address_has_other_ports():
    local_state.register(record())
    assert local_state.lookup("grpc://[::1]:4711") is None


def test_records_of_other_machines_on_a_shared_disk_are_left_alone(state):
    path = local_state.register(record())
    other = path.with_name(f"{'0' * 16}-4711.json")
    other.write_text(json.dumps({"anything": 1}))
    path.unlink()
    assert local_state.lookup(URL) is None
    assert local_state.records() == []
    assert other.exists()


def test_where_no_directory_can_be_made(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "file" / "state"))
    with caplog.at_level(logging.WARNING):
        assert local_state.register(record()) is None
    assert "SONIC_COFFEA_STATE_DIR" in caplog.text
    assert "hush" not in caplog.text
    assert local_state.lookup(URL) is None


def test_a_machine_without_proc_has_a_name(tmp_path):
    assert re.fullmatch("[0-9a-f]{16}", local_state.machine(proc=tmp_path))
    assert local_state.machine(proc=tmp_path) != local_state.machine()


def test_a_record_that_cannot_be_written_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING), without_room():
        assert local_state.register(record()) is None
    assert "File too large" in caplog.text


def test_the_secret_does_not_show():
    assert "hush" not in repr(record())
    assert pickle.loads(pickle.dumps(record())) == record()
