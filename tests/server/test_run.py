"""A server says why it is not ready, is started again if it ends, and never outlives its owner."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import awkward as ak
import numpy as np
import psutil
import pytest
from tests.ports import held_port
from tests.waiting import PATIENT, until

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.server import LocalServer, build_repository
from sonic_coffea.testing import FakeServer

from .support import (
    family,
    function,
    infer,
    is_gone,
    is_listed,
    shared_memory,
    socket_folder,
    supervisor,
)


@pytest.mark.parametrize(
    ("code", "configuration", "arguments", "quoted"),
    [
        ("", "nonsense {", [], "config.pbtxt"),
        ("raise OSError('no luck')", None, [], "no luck"),
        ("", None, ["--no-such-option"], "unrecognized option '--no-such-option'"),
        ("", None, ["--log-verbose=x"], 'Bad option: "--log-verbose"'),
    ],
    ids=["bad configuration", "failing code", "no argument", "bad argument"],
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
    with pytest.raises(ServerStartError, match=r"(?s)not ready after 1 s.*loading: wait:1"):
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


def test_each_start_has_the_whole_time(serve_again, tmp_path, caplog):
    marker = tmp_path / "late"
    code = f"""
import pathlib, time
while pathlib.Path({str(marker)!r}).exists(): time.sleep(0.05)
def f(x): return {{'y': x}}
"""
    path = build_repository(tmp_path / "repository", {"f": function(tmp_path / "f.py", code)})
    with serve_again(path, 0.001, startup_timeout_s=6.0) as server:
        marker.touch()
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: "was not ready after 6 s, and is started again" in caplog.text)
        marker.unlink()
        assert server.start().running


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
        assert server.start().pid not in (None, first)
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
        # As of a terminal or a batch system; the owner decides what they mean.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(supervisor(server), number)
        server.wait()
        assert server.ended_on_request
    assert not server.running


OWNER = """
import sys, time
from sonic_coffea.server import LocalServer
server = LocalServer(sys.argv[1], stop_timeout_s=0.0).start()
def announce():
    print(server.url, flush=True)
def rest():
    while True:  # a signal that comes as a sleep begins is heard when that ends
        time.sleep(0.05)
{then}
"""


class Owner:
    """A process of its own that starts a server, to be ended in whatever way."""

    def __init__(self, repository, then):
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER.format(then=then), str(repository)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.process.stderr.read()
        (self.supervisor,) = (
            child.pid
            for child in psutil.Process(self.process.pid).children()
            if "_supervisor.py" in " ".join(child.cmdline())
        )
        self.family = family(self.supervisor)
        assert len(self.family) >= 3, "expected a supervisor, a server and a model process"
        assert shared_memory(self.url)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def expect_nothing_left(self):
        for pid in self.family:
            until(lambda pid=pid: is_gone(pid), what=f"the end of process {pid}")
        assert shared_memory(self.url) == []
        assert not is_listed(self.url)
        until(lambda: not socket_folder(self.url).exists(), what="the end of its folder")


@pytest.fixture
def own(light, installation):
    owners = []

    def start(then="announce()\nrest()"):
        owners.append(Owner(light, then))
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


ENDS = {
    # Forked children hold the owner's pipes open: the supervisor must not go by these alone.
    "killed with children": (
        "import os\nif os.fork() == 0: time.sleep(60)\nannounce()\nrest()",
        os.kill,
    ),
    "killed as a group": ("announce()\nrest()", os.killpg),
    "just exits": ("announce()\nsys.stdin.readline()", None),
}


@pytest.mark.parametrize(("then", "kill"), ENDS.values(), ids=ENDS)
def test_no_server_outlives_its_owner(own, then, kill):
    owner = own(then)
    below = psutil.Process(owner.process.pid).children()
    children = [process for process in below if process.pid != owner.supervisor]
    assert len(children) == ("fork" in then)
    if kill:
        kill(owner.process.pid, signal.SIGKILL)
    else:
        print(file=owner.process.stdin, flush=True)
    assert owner.process.wait(20.0) == (-signal.SIGKILL if kill else 0)
    owner.expect_nothing_left()
    assert not any(is_gone(process.pid) for process in children)


def test_no_server_outlives_an_owner_that_is_killed_while_it_starts(never_ready, installation):
    code = """
import sys, threading, time
from sonic_coffea.server import LocalServer
server = LocalServer(sys.argv[1], stop_timeout_s=0.0)
threading.Thread(target=server.start, daemon=True).start()
while "loading" not in server.logs: time.sleep(0.01)
print("loading", flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code, str(never_ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"loading\n"
        pids = family(owner.pid)
        assert len(pids) >= 3, "expected the owner, a supervisor and a server"
        owner.kill()
    for pid in pids:
        until(lambda pid=pid: is_gone(pid), what=f"the end of process {pid}")


def test_ctrl_c_ends_a_server_that_starts(never_ready, serve):
    server = serve(never_ready)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # dask-jobqueue sets its own

    def press():
        until(lambda: "loading" in server.logs)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor() as thread:
        thread.submit(press)
        with pytest.raises(KeyboardInterrupt):
            server.start()
    assert not socket_folder(server.url).exists()


def test_ctrl_c_lets_the_owner_finish_with_the_server(own):
    then = (
        "try:\n    announce()\n    rest()\n"
        "except KeyboardInterrupt:\n"
        "    print(server.running, len(server.metadata.models), flush=True)\n"
        "    server.stop()"
    )
    owner = own(then)
    os.killpg(owner.process.pid, signal.SIGINT)
    output, _ = owner.process.communicate(timeout=30.0)
    assert output.split() == ["True", "1"]
    owner.expect_nothing_left()


def test_no_server_outlives_its_supervisor(own, light, serve):
    owner = own()
    os.kill(owner.supervisor, signal.SIGKILL)
    for pid in owner.family:
        until(lambda pid=pid: is_gone(pid), what=f"the end of process {pid}")
    # Nobody was left to tidy up, so the owner does, or else the next server.
    owner.close()
    assert not is_listed(owner.url)
    with serve(light):
        assert shared_memory(owner.url) == []
        assert not socket_folder(owner.url).exists()


ECHO = sonic.Model("echo", {"x": sonic.Row(["a", "b"])}, {"y": ["a", "b"]})


@pytest.fixture
def impatient(monkeypatch):
    """Servers take their default of how long a process may stand still."""
    for name in PATIENT:
        monkeypatch.delenv(name)


def model_process(server: sonic.LocalServer) -> psutil.Process:
    below = psutil.Process(server.pid).children(recursive=True)
    return next(process for process in below if process.name().startswith("triton_python"))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("seconds", "is_asked"), [(0.8, True), (1.2, False)])
def test_a_process_that_stood_still_ends_its_server(light, serve, seconds, is_asked):
    """With a request, even for less than the second after which Triton gives the request up."""
    with serve(light) as server, ThreadPoolExecutor() as thread:
        process = model_process(server)
        time.sleep(0.5)  # since the request by which it was warmed up
        process.suspend()
        if is_asked:
            thread.submit(infer, server, "echo", x=np.ones((8, 2), np.float32))
        time.sleep(seconds)  # how long it stands still
        process.resume()
        until(lambda: not server.running, 20.0, "the server's end")
        # On a busy machine, Triton may have used memory that it had given back.
        assert "the model's process stood still" in server.logs or "Signal (" in server.logs


def test_a_server_whose_model_lost_its_process_is_started_again(light, serve, caplog):
    """As one that used too much memory does; Triton starts it only once."""
    values = np.arange(50, dtype=np.float32)
    with serve(light, restart=True) as server, Pool(Settings.make(server.url)) as pool:
        model_process(server).kill()
        scores = ECHO(ak.zip({"a": values, "b": values}), pool=pool)
        np.testing.assert_array_equal(scores.a, values)
    assert "was ended, as a model's process had died, and is started again" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_rows_are_right_while_the_server_starts_again(light, serve, caplog):
    """Triton gives a request up after a second, and takes its answer for that to the next."""
    calls, over = [], threading.Event()

    def score(first: int):
        with Pool(Settings.make(server.url)) as pool:
            while not over.is_set():
                first += 1
                values = np.full(200, first, np.float32)
                scores = ECHO(ak.zip({"a": values, "b": values}), pool=pool)
                np.testing.assert_array_equal(scores.a, values)
                calls.append(first)

    with serve(light, restart=True) as server, ThreadPoolExecutor() as threads:
        scoring = [threads.submit(score, 1000 * k) for k in range(4)]
        try:
            until(lambda: len(calls) > 20, what="a call")
            first, process = server.pid, model_process(server)
            process.suspend()
            until(lambda: "is not healthy" in caplog.text, what="a request that is given up")
            process.resume()
            until(lambda: server.pid not in (None, first), what="another server")
            before = len(calls)
            until(lambda: len(calls) > before + 20, what="a call")
        finally:
            over.set()
        for done in scoring:
            done.result(60)
    assert re.search(r"was ended.*, and is started again", caplog.text)
