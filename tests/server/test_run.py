"""A server that does not become ready says why; one that ends by itself is started again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from pathlib import Path

import awkward as ak
import pytest
from tests.ports import held_port
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import LocalServer, build_repository
from sonic_coffea.testing import FakeServer

from .support import function, is_listed, shared_memory, socket_folder, supervisor


@pytest.mark.parametrize(
    ("code", "configuration", "arguments", "quoted"),
    [
        ("", "nonsense {", [], "config.pbtxt"),
        ("raise OSError('no luck')", None, [], "no luck"),
        ("", None, ["--no-such-option"], "no-such-option"),
    ],
    ids=["bad configuration", "failing code", "bad argument"],
)
def test_failed_starts_quote_the_server(tmp_path, serve, code, configuration, arguments, quoted):
    source = function(tmp_path / "f.py", f"{code}\ndef f(x): return {{'y': x}}\n")
    path = build_repository(tmp_path / "repository", {"m": source})
    if configuration is not None:
        (path / "m" / "config.pbtxt").write_text(configuration)
    server = serve(path, extra_args=arguments)
    with pytest.raises(ServerStartError) as caught:
        server.start()
    text = str(caught.value)
    assert re.search(rf"(?s)It said:\n +.*{quoted}.*Its log", text)
    assert str(server.log_path) in text
    assert server.log_path.read_text()
    assert "CudaDriverHelper" not in text
    assert not server.running
    assert shared_memory(server.url) == []
    assert not socket_folder(server.url).exists()


def test_files_that_were_replaced_under_their_version_are_not_served(tmp_path, classifier, serve):
    """Their digest, and so cached scores and provenance, would be those of the file before."""
    path = build_repository(tmp_path / "repository", {"m": classifier})
    file = path / "m" / "1" / "model.onnx"
    file.write_text("another")
    with pytest.raises(ConfigError, match="1/model.onnx was changed since .* overwrite, or as the"):
        serve(path).start()
    file.unlink()
    with pytest.raises(ConfigError, match="1/model.onnx is gone since"):
        serve(path).start()


def test_files_that_are_replaced_while_a_server_runs_are_never_served(tmp_path, serve):
    one = function(tmp_path / "f.py", "def f(x): return {'y': x}\n")
    path = build_repository(tmp_path / "repository", {"m": one})
    with serve(path, restart=True) as server:
        (path / "m" / "1" / "source" / "f.py").write_text("def f(x): return {'y': 2 * x}\n")
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: "source/f.py was changed since the version was built" in server.logs)
        assert not server.running


def test_starts_that_take_too_long_are_given_up(never_ready, serve, caplog):
    server = serve(never_ready, startup_timeout_s=1.0, stop_timeout_s=1.0)
    with pytest.raises(ServerStartError, match=r"not ready after 1 s"):
        server.start()
    assert shared_memory(server.url) == []
    # That it was killed, as it did not end in time, is no crash.
    assert "is started again" not in caplog.text


def test_ports_in_use_are_reported(light, serve):
    with held_port() as port:
        server = serve(light, port=port)
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ServerStartError, match=f"port {port} of 127.0.0.1 cannot be had"),
        ):
            server.start()


@pytest.fixture
def serve_again(serve, monkeypatch):
    """Make servers that are started again after this pause, in place of 0.5 s."""

    def make(repository, pause_s, **options):
        monkeypatch.setattr(LocalServer, "_first_pause_s", pause_s)
        return serve(repository, restart=True, **options)

    return make


def test_a_first_call_waits_for_a_server_that_is_started_again(light, serve_again):
    echo = sonic.Model("echo", {"x": sonic.Row(["a", "b"])}, {"y": ["a", "b"]})
    rows = ak.Array([{"a": 1.0, "b": 2.0}])
    echo.pack(rows)  # what is compiled for the first call takes longer than the server's start
    with serve_again(light, 2.0) as server, sonic.connect(server, retry_timeout_s=60) as pool:
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.running)
        assert echo(rows, pool=pool).b.tolist() == [2.0]


def test_a_server_whose_port_was_taken_by_another_one_ends(light, serve_again, caplog):
    """Otherwise its rows would be scored by the models of the other server."""
    with held_port() as port, serve_again(light, 2.0, port=port) as server:
        os.kill(server.pid, signal.SIGKILL)
        with FakeServer({}, port=port) as other:
            assert other.url == server.url
            server.wait()
        assert not server.running
    assert f"another server has taken port {port}; port=0 takes a free one" in caplog.text


def test_servers_are_restarted_five_times(light, serve_again, tmp_path, caplog):
    repository = shutil.copytree(light, tmp_path / "repository")
    with serve_again(repository, 0.001) as server:
        (repository / "echo" / "config.pbtxt").write_text("nonsense {")
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    assert caplog.text.count("is started again in") == 5
    assert "ended with exit status 1, again and again, and is not started again" in caplog.text


def test_regions_of_late_clients_do_not_hinder_a_restart(light, serve_again, caplog):
    with serve_again(light, 2.0) as server:
        first, name = server.pid, socket_folder(server.url).name
        region = Path("/dev/shm", f"sonic-coffea-{name}", "region")  # noqa: S108
        os.kill(first, signal.SIGKILL)
        until(lambda: "is started again in 2 s" in caplog.text)
        region.parent.mkdir(exist_ok=True)
        region.touch()
        failed = "cannot be started"
        until(lambda: server.pid not in (None, first) or failed in caplog.text)
        assert failed not in caplog.text
    assert not region.parent.exists()


def test_servers_that_end_by_themselves_are_restarted(light, serve, caplog):
    """But not those that another process stops on request."""
    with serve(light, restart=True) as server:
        url, first = server.url, server.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: server.pid not in (None, first), 60.0, "a start by itself")
        assert is_listed(url)
        assert server.url == url
        assert server.metadata.name == "triton"
        assert "was ended by SIGKILL, and is started again in 0.5 s" in caplog.text
        os.kill(supervisor(server), signal.SIGTERM)
        server.wait()
        assert server.ended_on_request
    assert not server.running
