"""A server that ends by itself is started again; one that is stopped is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

from tests.waiting import insist, until
from tritonclient.grpc import InferenceServerClient

from sonic_coffea.server import LocalServer

from .support import is_listed, supervisor


class ImpatientServer(LocalServer):
    _first_pause_s = 0.001


def test_a_server_that_ends_again_and_again_is_left(light, installation, tmp_path, caplog):
    repository = shutil.copytree(light, tmp_path / "repository")
    server = ImpatientServer(repository, installation=installation, stop_timeout_s=0.0)
    with server:
        (repository / "echo" / "config.pbtxt").write_text("nonsense {")
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    assert caplog.text.count("is started again in") == 5
    assert caplog.text.count("ended with exit status 1. It said:") == 5
    assert "ended 5 times in a row; it is left" in caplog.text


def test_a_server_that_was_stopped_on_request_stays_so(light, installation):
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


def test_a_server_that_ends_by_itself_is_started_again(light, serve, caplog):
    """Even one that was stopped on request before, which stays stopped until it is started."""
    with serve(light, models=[], restart=True) as server:
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
    assert "was ended by SIGKILL (log: " in caplog.text
    assert "is started again in 0.5 s" in caplog.text
    assert not server.running


def test_it_is_started_again_with_the_models_that_were_loaded(light, serve, tmp_path):
    repository = tmp_path / "repository"
    for name in ("started", "unloaded", "loaded"):
        shutil.copytree(light / "echo", repository / name)
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace('"echo"', f'"{name}"'))
    with serve(
        repository, models=["started", "unloaded"], restart=True, extra_args=["--log-verbose=1"]
    ) as server:
        with InferenceServerClient(server.url) as client:
            insist(lambda: client.load_model("loaded"))
            insist(lambda: client.unload_model("unloaded"))
        until(lambda: "successfully unloaded 'unloaded'" in server.logs, what="the unloading")
        # The server is asked each second which models it has.
        asked = server.logs.count("RepositoryIndex")
        until(
            lambda: server.logs.count("RepositoryIndex") > asked + 10, what="a look at the models"
        )
        first = server.pid
        os.kill(first, signal.SIGKILL)
        # So a model is waited for while the server is away.
        server.wait_for("loaded")
        assert server.pid not in (None, first)
        ready = {model.name for model in server.metadata.models if model.state == "READY"}
        assert ready == {"started", "loaded"}
