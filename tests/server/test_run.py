"""A server that does not become ready says why, and another port is taken where one is lost."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest
from tests.ports import held_port

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import LocalServer

from .support import broken, shared_memory, socket_folder


def remove(model):
    (model / "1" / "model.onnx").unlink()


@pytest.mark.parametrize(
    ("edit", "expected", "arguments"),
    [
        (remove, "model.onnx", []),
        (remove, "model.onnx", ["--log-format=ISO8601"]),
        (lambda m: (m / "config.pbtxt").write_text("nonsense {"), "config.pbtxt", []),
        (lambda m: (m / "1" / "model.py").write_text("raise OSError('no luck')"), "no luck", []),
        (lambda _: None, "no-such-option", ["--no-such-option"]),
    ],
    ids=["missing file", "other log", "bad configuration", "failing code", "bad argument"],
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


def test_crashes_during_the_start_are_tried_again(tmp_path, classifier, serve, caplog):
    crash = (
        "import os, pathlib, signal\n"
        "tried = pathlib.Path(__file__).with_name('tried')\n"
        "if not tried.exists():\n"
        "    tried.touch()\n"
        "    os.kill(os.getppid(), signal.SIGABRT)\n"
    )

    def edit(model):
        code = model / "1" / "model.py"
        future, rest = code.read_text().split("from __future__ import annotations\n", 1)
        code.write_text(f"{future}from __future__ import annotations\n{crash}{rest}")

    path = broken(tmp_path, classifier, edit)
    with serve(path) as server:
        assert server.metadata.name == "triton"
    assert "was ended by SIGABRT" in caplog.text
    assert "is started again in 0.5 s" in caplog.text


@pytest.mark.parametrize("argument", ["--grpc-port=8001", "--model-repository=/elsewhere"])
def test_arguments_that_would_hide_the_server_are_refused(light, argument):
    with pytest.raises(ConfigError, match=argument.partition("=")[0]):
        LocalServer(light, extra_args=[argument])


LOGGING = ["--log-info=false", "--log-format=ISO8601"]


@pytest.mark.parametrize("arguments", [*([a] for a in LOGGING), ["--log-error=false", *LOGGING]])
def test_servers_work_however_they_log(light, serve, arguments):
    with serve(light, extra_args=arguments) as server:
        assert server.metadata.models[0].state == "READY"


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


def test_starts_that_take_too_long_are_given_up(tmp_path, classifier, serve, caplog):
    path = broken(
        tmp_path,
        classifier,
        lambda m: (m / "1" / "model.py").write_text("import time\ntime.sleep(600)"),
    )
    server = serve(path, startup_timeout_s=1.0, stop_timeout_s=1.0)
    begun = time.monotonic()
    with pytest.raises(ServerStartError, match=r"not ready after 1 s"):
        server.start()
    assert time.monotonic() - begun < 15.0
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
