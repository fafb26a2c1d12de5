"""A server that ends by itself is started again; one that is stopped is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import until

from sonic_coffea.server import LocalServer

from .support import is_listed, supervisor


class ImpatientServer(LocalServer):
    _first_pause_s = 0.001


class PatientServer(LocalServer):
    _first_pause_s = 2.0


def test_servers_are_restarted_five_times(light, installation, tmp_path, caplog):
    repository = shutil.copytree(light, tmp_path / "repository")
    server = ImpatientServer(repository, stop_timeout_s=0.0)
    with server:
        (repository / "echo" / "config.pbtxt").write_text("nonsense {")
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    assert caplog.text.count("is started again in") == 5
    assert "ended with exit status 1, again and again, and is not started again" in caplog.text


def test_regions_of_late_clients_do_not_hinder_a_restart(light, installation, caplog):
    with PatientServer(light, stop_timeout_s=0.0) as server:
        first, name = server.pid, Path(server.url.removeprefix("unix:")).parent.name
        region = Path("/dev/shm", f"sonic-coffea-{name}", "region")  # noqa: S108
        os.kill(first, signal.SIGKILL)
        until(lambda: "is started again in 2 s" in caplog.text)
        region.parent.mkdir(exist_ok=True)
        region.touch()
        failed = "cannot be started"
        until(lambda: server.pid not in (None, first) or failed in caplog.text)
        assert failed not in caplog.text
    assert not region.parent.exists()


def test_servers_that_were_stopped_on_request_stay_stopped(light, installation):
    command = [sys.executable, "-m", "sonic_coffea"]
    serving = subprocess.Popen(
        [*command, "serve", str(light), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = json.loads(serving.stdout.readline())["url"]
        stop = [*command, "status", "--stop", url]
        done = subprocess.run(stop, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == f"stopped {url}\n"
        assert serving.wait(30) == 0
        assert f"{url} was stopped on request" in serving.stderr.read()
        assert not is_listed(url)
    finally:
        serving.kill()
        serving.communicate()


def test_servers_that_end_by_themselves_are_restarted(light, serve, caplog):
    """Even one that was stopped on request before, which stays stopped until it is started."""
    with serve(light, restart=True) as server:
        first = server.pid
        os.kill(supervisor(server), signal.SIGTERM)
        server.wait()
        assert server.ended_on_request
        server.start()
        assert not server.ended_on_request
        url, second = server.url, server.pid
        os.kill(second, signal.SIGKILL)
        until(lambda: server.pid not in (None, first, second), 60.0, "a start by itself")
        assert is_listed(url)
        assert server.url == url
        assert server.metadata.name == "triton"
    assert "was ended by SIGKILL, and is started again in 0.5 s" in caplog.text
    assert not server.running
