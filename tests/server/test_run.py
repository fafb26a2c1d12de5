"""A server that does not become ready says why; one that ends by itself is started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import awkward as ak
import pytest
from tests.ports import held_port
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import LocalServer, build_repository
from sonic_coffea.testing import FakeServer

from .support import broken, function, is_listed, shared_memory, socket_folder, supervisor


def remove(model):
    forget(model)
    (model / "1" / "model.onnx").unlink()


def break_code(model):
    forget(model)
    (model / "1" / "model.py").write_text("raise OSError('no luck')")


def forget(model):
    """Leave the checksums of a version's files out of its manifest."""
    manifest = model / "1" / "sonic-manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "files": {}}))


@pytest.mark.parametrize(
    ("edit", "expected", "arguments"),
    [
        (remove, "model.onnx", []),
        (lambda m: (m / "config.pbtxt").write_text("nonsense {"), "config.pbtxt", []),
        (break_code, "no luck", []),
        (lambda _: None, "no-such-option", ["--no-such-option"]),
    ],
    ids=["missing file", "bad configuration", "failing code", "bad argument"],
)
def test_failed_starts_quote_the_server(tmp_path, classifier, serve, edit, expected, arguments):
    server = serve(broken(tmp_path, classifier, edit), extra_args=arguments)
    with pytest.raises(ServerStartError) as caught:
        server.start()
    text = str(caught.value)
    assert re.search(rf"(?s)It said:\n +.*{expected}.*Its log", text)
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
    build_repository(path, {"m": classifier}, overwrite=True)
    with serve(path) as server:
        assert [m.state for m in server.metadata.models] == ["READY"]


def test_files_that_are_replaced_while_a_server_runs_are_never_served(tmp_path, serve):
    one = function(tmp_path / "f.py", "def f(x): return {'y': x}\n")
    path = build_repository(tmp_path / "repository", {"m": one})
    with serve(path, restart=True) as server:
        (path / "m" / "1" / "source" / "f.py").write_text("def f(x): return {'y': 2 * x}\n")
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: "source/f.py was changed since the version was built" in server.logs)
        assert not server.running


def test_crashes_during_the_start_are_tried_again(tmp_path, serve, caplog):
    code = """
import os, pathlib, signal
tried = pathlib.Path(__file__).with_name("tried")
if not tried.exists():
    tried.touch()
    os.kill(os.getppid(), signal.SIGABRT)
def crash(x): return {"y": x}
"""
    models = {"m": function(tmp_path / "crash.py", code)}
    with serve(build_repository(tmp_path / "r", models)) as server:
        assert server.metadata.name == "triton"
    assert "was ended by SIGABRT" in caplog.text
    assert "is started again in 0.5 s" in caplog.text


FULL = """
import sys, sonic_coffea as sonic
try:
    sonic.LocalServer(sys.argv[1], stop_timeout_s=0.0).start()
except sonic.errors.ServerStartError as error:
    print(error)
"""


def test_full_disks_are_reported_at_once(light, installation, tmp_path):
    if subprocess.run(["unshare", "--map-root-user", "--mount", "true"], check=False).returncode:
        pytest.skip("this user cannot mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    script = 'mount -t tmpfs -o size=32k,mode=0700 none "$SONIC_COFFEA_STATE_DIR"; exec "$@"'
    done = subprocess.run(
        [
            *("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"),
            *(sys.executable, "-c", FULL, str(light)),
        ],
        env={**os.environ, "SONIC_COFFEA_STATE_DIR": str(disk)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "No space left on device" in done.stdout, done.stderr


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
        with server:
            assert server.url == f"grpc://127.0.0.1:{port}"
    with pytest.raises(ConfigError, match="expected port to be a number up to 65535, got 70000"):
        serve(light, port=70_000)


class ImpatientServer(LocalServer):
    _first_pause_s = 0.001


class PatientServer(LocalServer):
    _first_pause_s = 2.0


class VeryPatientServer(LocalServer):
    _first_pause_s = 4.0


def test_a_first_call_waits_for_a_server_that_is_started_again(light, installation):
    echo = sonic.Model("echo", {"x": sonic.Row(["a", "b"])}, {"y": ["a", "b"]})
    rows = ak.Array([{"a": 1.0, "b": 2.0}])
    echo.pack(rows)  # what is compiled for the first call takes longer than the server's start
    with (
        VeryPatientServer(light, stop_timeout_s=0.0) as server,
        sonic.connect(server, retry_timeout_s=60) as pool,
    ):
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.running)
        assert echo(rows, pool=pool).b.tolist() == [2.0]


def test_a_server_whose_port_was_taken_by_another_one_ends(light, installation, caplog):
    """Otherwise its rows would be scored by the models of the other server."""
    with held_port() as port, PatientServer(light, port=port, stop_timeout_s=0.0) as server:
        os.kill(server.pid, signal.SIGKILL)
        with FakeServer({}, port=port) as other:
            assert other.url == server.url
            server.wait()
        assert not server.running
    assert f"another server has taken port {port}; port=0 takes a free one" in caplog.text


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
    assert not server.ended_on_request
