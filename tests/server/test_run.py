"""A server that does not become ready says why, and another port is taken where one is lost."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from tests.ports import held_port
from tests.waiting import until

from sonic_coffea.errors import ServerStartError
from sonic_coffea.transport import local_state

from .support import broken, shared_memory


def own_regions():
    """Of all servers that this process has started."""
    return shared_memory(f"sonic_{os.getpid()}_")


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
    server, regions = serve(broken(tmp_path, classifier, edit)), own_regions()
    with pytest.raises(ServerStartError, match=expected) as caught:
        server.start()
    text = str(caught.value)
    assert str(server.log_path) in text
    assert server.log_path.read_text()
    assert "CudaDriverHelper" not in text
    assert server.headers["triton-grpc-protocol-sonic"] not in text
    assert not server.running
    assert own_regions() == regions
    assert local_state.lookup(server.url) is None


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
    assert "starting it once more" in caplog.text


def test_a_bad_argument_is_quoted_without_the_secret(repository, serve):
    server = serve(repository, extra_args=["--no-such-option"])
    with pytest.raises(ServerStartError, match="no-such-option") as caught:
        server.start()
    assert server.headers["triton-grpc-protocol-sonic"] not in str(caught.value)


def test_a_start_that_takes_too_long_is_given_up(tmp_path, classifier, serve):
    path = broken(
        tmp_path,
        classifier,
        lambda m: (m / "1" / "model.py").write_text("import time\ntime.sleep(600)"),
    )
    server, regions = serve(path, startup_timeout_s=1.0), own_regions()
    begun = time.monotonic()
    with pytest.raises(ServerStartError, match=r"not ready after 1 s"):
        server.start()
    assert time.monotonic() - begun < 15.0
    assert own_regions() == regions


def test_a_port_in_use_is_said(repository, serve):
    with held_port() as port:
        server = serve(repository, port=port, models=[])
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ServerStartError, match=f"port {port} is in use"),
        ):
            server.start()
        with server:
            assert server.url == f"grpc://127.0.0.1:{port}"


def test_its_port_is_not_lost_while_it_is_down(light, serve):
    with serve(light) as server:
        port = server.port
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.running, what="the end of the server")
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        assert server.start().port == port
    socket.create_server(("127.0.0.1", port)).close()
