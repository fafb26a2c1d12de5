"""A server that does not become ready says why, and another port is taken where one is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from tests.ports import held_port
from tests.waiting import until

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import LocalServer

from .support import broken, shared_memory, socket_folder


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda m: (m / "1" / "model.onnx").unlink(), "model.onnx"),
        (lambda m: (m / "config.pbtxt").write_text("nonsense {"), "config.pbtxt"),
        (lambda m: (m / "1" / "model.py").write_text("raise RuntimeError('no luck')"), "no luck"),
    ],
    ids=["missing file", "bad configuration", "failing code"],
)
def test_a_failed_start_quotes_the_server(tmp_path, classifier, serve, edit, expected):
    server = serve(broken(tmp_path, classifier, edit))
    with pytest.raises(ServerStartError, match=expected) as caught:
        server.start()
    text = str(caught.value)
    assert str(server.log_path) in text
    assert server.log_path.read_text()
    assert "CudaDriverHelper" not in text
    assert not server.running
    assert shared_memory(server.url) == []
    assert not socket_folder(server.url).exists()


def test_a_server_that_crashes_while_it_starts_is_started_once_more(
    tmp_path, classifier, serve, caplog
):
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


def test_a_bad_argument_is_quoted(repository, serve):
    server = serve(repository, extra_args=["--no-such-option"])
    with pytest.raises(ServerStartError, match="no-such-option"):
        server.start()


@pytest.mark.parametrize("argument", ["--grpc-port=8001", "--model-repository=/elsewhere"])
def test_arguments_that_would_hide_the_server_are_refused(light, argument):
    with pytest.raises(ConfigError, match=argument.partition("=")[0]):
        LocalServer(light, extra_args=[argument])


LOGGING = ["--log-info=false", "--log-format=ISO8601"]


@pytest.mark.parametrize("arguments", [*([a] for a in LOGGING), ["--log-error=false", *LOGGING]])
def test_how_it_logs_does_not_change_whether_it_works(light, serve, arguments):
    with serve(light, extra_args=arguments) as server:
        assert server.metadata.models[0].state == "READY"


def test_errors_are_quoted_in_each_format_of_the_log(tmp_path, classifier, serve):
    path = broken(tmp_path, classifier, lambda m: (m / "1" / "model.onnx").unlink())
    with pytest.raises(ServerStartError) as caught:
        serve(path, extra_args=["--log-format=ISO8601"]).start()
    assert re.search(r"It said:\n +.*model\.onnx", str(caught.value))


FULL = """
import sys, sonic_coffea as sonic
try:
    sonic.LocalServer(sys.argv[1], stop_timeout_s=0.0).start()
except sonic.errors.ServerStartError as error:
    print(error)
"""


def test_a_full_disk_is_said_at_once(light, installation, tmp_path):
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


def test_a_start_that_takes_too_long_is_given_up(tmp_path, classifier, serve, caplog):
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


def test_a_port_in_use_is_said(light, serve):
    with held_port() as port:
        server = serve(light, port=port)
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ServerStartError, match=f"port {port} of 127.0.0.1 cannot be had"),
        ):
            server.start()
        with server:
            assert server.url == f"grpc://127.0.0.1:{port}"


@pytest.mark.parametrize("port", [None, 0])
def test_its_url_stays_the_same(light, serve, port):
    with serve(light, port=port) as server:
        url = server.url
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.running, what="the end of the server")
        assert server.start().url == url
    with server:
        assert server.url == url
        assert server.metadata.name == "triton"
