"""The real server: ready, right, private, and gone when it should be."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
import pytest
import tritonclient.grpc as grpc_client
from tests.waiting import until

from sonic_coffea import local_state
from sonic_coffea.errors import ConfigError, ModelNotFoundError, ServerError, ServerStartError
from sonic_coffea.server import LocalServer, build_repository, local
from sonic_coffea.server._watcher import Watcher

from .support import family, is_gone, listening, shared_memory, wait_until

OWNER = """
import sys, time
from sonic_coffea.server import LocalServer
server = LocalServer(sys.argv[1]).start()
def announce():
    print(server.pid, server._guard.pid, server._run.shm_prefix, server.url, flush=True)
{then}
"""


def infer(server, x, *, model="top", headers=None):
    client = grpc_client.InferenceServerClient(server.url.removeprefix("grpc://"))
    try:
        tensor = grpc_client.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        headers = server.headers if headers is None else headers
        return client.infer(model, [tensor], headers=headers).as_numpy("scores")
    finally:
        client.close()


def is_another(url, pid):
    record = local_state.lookup(url)
    return record is not None and record.pid != pid


class Owner:
    """A process of its own that starts a server, to be ended in whatever way."""

    def __init__(self, repository, then):
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER.format(then=then), str(repository)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        line = self.process.stdout.readline().split()
        assert line, self.process.stderr.read()
        self.server, self.guard, self.shm_prefix, self.url = int(line[0]), int(line[1]), *line[2:]
        self.family = [self.guard, *family(self.server)]
        assert len(self.family) >= 3, "expected a guard, a server and a model process"
        assert shared_memory(self.shm_prefix)
        assert local_state.lookup(self.url).pid == self.server

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def expect_nothing_left(self):
        for pid in self.family:
            wait_until(lambda pid=pid: is_gone(pid), what=f"the end of process {pid}")
        assert shared_memory(self.shm_prefix) == []
        assert local_state.lookup(self.url) is None


@pytest.fixture
def own(repository, installation):
    owners = []

    def start(then="announce()\ntime.sleep(600)"):
        owners.append(Owner(repository, then))
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


def test_ready_and_described(server):
    assert server.running
    metadata = server.metadata
    assert (metadata.name, metadata.version) == ("triton", "2.51.0")
    assert "statistics" in metadata.extensions
    assert [(m.name, m.version, m.state) for m in metadata.models] == [("top", "1", "READY")]
    assert "successfully loaded 'top'" in server.logs
    assert stat.S_IMODE(server.log_path.stat().st_mode) == 0o600
    assert psutil.Process(server.pid).name().startswith("tritonserver")


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_scores_are_those_of_onnxruntime(server, classifier, rows):
    session = onnxruntime.InferenceSession(str(classifier))
    x = np.random.default_rng(rows).normal(size=(rows, 8)).astype("float32")
    expected = session.run(["scores"], {"x": x})[0]
    got = infer(server, x)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_requests_batched_together_come_back_to_their_senders(server, classifier):
    session = onnxruntime.InferenceSession(str(classifier))
    client = grpc_client.InferenceServerClient(server.url.removeprefix("grpc://"))
    answers, inputs, done = {}, {}, threading.Event()

    def take(number, result, error):
        answers[number] = error if error is not None else result.as_numpy("scores")
        if len(answers) == len(inputs):
            done.set()

    rng = np.random.default_rng(0)
    inputs.update({n: rng.normal(size=(1 + n % 5, 8)).astype("float32") for n in range(200)})
    try:
        for number, x in inputs.items():
            tensor = grpc_client.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            client.async_infer(
                "top",
                [tensor],
                lambda result, error, number=number: take(number, result, error),
                headers=server.headers,
            )
        assert done.wait(30.0)

        def counted():
            return client.get_inference_statistics("top", headers=server.headers).model_stats[0]

        # Triton counts after it answers; the module's other tests are in these figures, too.
        until(lambda: counted().inference_stats.success.count >= len(inputs))
        statistics = counted()
    finally:
        client.close()
    for number, x in inputs.items():
        np.testing.assert_array_equal(answers[number], session.run(None, {"x": x})[0])
    assert statistics.execution_count < statistics.inference_count


@pytest.mark.parametrize("headers", [{}, {"triton-grpc-protocol-sonic": "0" * 64}])
def test_without_the_secret_nothing_is_answered(server, headers):
    client = grpc_client.InferenceServerClient(server.url.removeprefix("grpc://"))
    calls = [
        client.is_server_live,
        client.is_server_ready,
        client.get_server_metadata,
        client.get_model_repository_index,
        client.get_inference_statistics,
        client.get_system_shared_memory_status,
        client.get_log_settings,
        client.get_trace_settings,
        lambda **kw: client.get_model_config("top", **kw),
        lambda **kw: client.unload_model("top", **kw),
    ]
    try:
        for call in calls:
            with pytest.raises(grpc_client.InferenceServerException, match="restricted"):
                call(headers=headers)
    finally:
        client.close()
    with pytest.raises(grpc_client.InferenceServerException, match="restricted"):
        infer(server, np.zeros((1, 8), "float32"), headers=headers)


def test_listens_on_loopback_only(server):
    processes = [psutil.Process(pid) for pid in family(server.pid)]
    assert set().union(*map(listening, processes)) == {("127.0.0.1", server.port)}


def test_metrics_are_served_on_loopback_when_asked(repository, installation):
    from urllib.request import urlopen

    with LocalServer(repository, installation=installation, metrics=True) as server:
        with urlopen(server.metrics_url, timeout=10.0) as answer:  # noqa: S310
            assert b"nv_inference_request_success" in answer.read()
        assert {ip for ip, _ in listening(psutil.Process(server.pid))} == {"127.0.0.1"}


def test_the_secret_is_nowhere_to_be_read(server):
    secret = server.headers["triton-grpc-protocol-sonic"]
    assert len(secret) == 64
    for process in [server.pid, server._guard.pid, *family(server.pid)]:
        assert secret.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
    listed = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True)
    assert f"--grpc-port={server.port}" in listed.stdout
    assert secret not in listed.stdout
    assert secret not in repr(server)
    assert secret not in repr(local_state.lookup(server.url))
    assert secret not in server.logs
    with pytest.raises(TypeError, match="pass its url"):
        pickle.dumps(server)


def test_its_url_is_enough_for_processes_of_the_same_user(server):
    code = f"from sonic_coffea import local_state; print(local_state.lookup({server.url!r}).secret)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"triton-grpc-protocol-sonic": done.stdout.strip()} == server.headers


def test_stop_is_idempotent_and_leaves_nothing(repository, installation):
    server = LocalServer(repository, installation=installation)
    assert not server.running
    assert server.pid is None
    server.stop()
    with pytest.raises(ServerError, match=r"start\(\) it"):
        _ = server.url

    assert server.start() is server
    pids, prefix, url = [*family(server.pid), server._guard.pid], server._run.shm_prefix, server.url
    assert server.start().pid == pids[0]
    server.stop()
    server.stop()
    assert all(is_gone(pid) for pid in pids)
    assert shared_memory(prefix) == []
    assert local_state.lookup(url) is None
    assert not server.running
    assert "successfully loaded 'top'" in server.logs
    with pytest.raises(ServerError, match="stopped"):
        _ = server.metadata
    assert "stopped" in repr(server)

    with server:
        assert server.running
        assert server.pid != pids[0]


def test_an_exception_ends_it(repository, installation):
    pids = []

    def work():
        with LocalServer(repository, installation=installation) as server:
            pids.extend(family(server.pid))
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert pids
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphan_after_the_owner_is_killed(own, number):
    owner = own()
    owner.process.send_signal(number)
    owner.process.wait(20.0)
    owner.expect_nothing_left()


def test_no_orphan_after_the_owner_is_killed_while_it_starts(tmp_path, classifier, installation):
    def never_ready(model):
        (model / "1" / "model.py").write_text("import time\ntime.sleep(600)")

    code = """
import sys, threading, time
from sonic_coffea.server import LocalServer
server = LocalServer(sys.argv[1], stop_timeout_s=0.5)
threading.Thread(target=server.start, daemon=True).start()
while server._guard is None or "loading" not in server.logs: time.sleep(0.01)
print(server._guard.pid, server._guard.server_pid, server._run.shm_prefix, flush=True)
time.sleep(600)
"""
    path = broken(tmp_path, classifier, never_ready)
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as owner:
        guard, server, prefix = owner.stdout.readline().decode().split()
        pids = [int(guard), *family(int(server))]
        owner.kill()
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), what=f"the end of process {pid}")
    assert shared_memory(prefix) == []


def test_no_orphan_after_the_owner_just_exits(own):
    owner = own("announce()")
    owner.process.wait(20.0)
    assert owner.process.returncode == 0
    owner.expect_nothing_left()


def test_no_orphan_while_forked_children_of_the_owner_live_on(own):
    # They hold the owner's pipes open, so closing pipes cannot be what the guard goes by alone.
    owner = own("import os\nif os.fork() == 0: time.sleep(60)\nannounce()\ntime.sleep(600)")
    processes = psutil.Process(owner.process.pid).children()
    children = [process.pid for process in processes if process.pid != owner.guard]
    assert children
    try:
        owner.process.kill()
        owner.process.wait(20.0)
        owner.expect_nothing_left()
        assert not any(is_gone(pid) for pid in children)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_ctrl_c_lets_the_owner_finish_with_the_server(own):
    then = (
        "try:\n    announce()\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print(server.running, len(server.metadata.models), flush=True)\n"
        "    server.stop()"
    )
    owner = own(then)
    os.killpg(owner.process.pid, signal.SIGINT)
    output, _ = owner.process.communicate(timeout=30.0)
    assert output.split() == ["True", "1"]
    owner.expect_nothing_left()


def test_no_orphan_after_the_guard_is_killed(own):
    owner = own()
    os.kill(owner.guard, signal.SIGKILL)
    for pid in owner.family:
        wait_until(lambda pid=pid: is_gone(pid), what=f"the end of process {pid}")
    # Nobody was left to tidy up, so looking the server up does.
    assert local_state.lookup(owner.url) is None
    assert shared_memory(owner.shm_prefix) == []


def test_a_crash_is_noticed(repository, installation):
    with LocalServer(repository, installation=installation) as server:
        pids, prefix = family(server.pid), server._run.shm_prefix
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.running, what="the end of the server")
        assert server.pid is None
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid), what=f"the end of process {pid}")
        wait_until(lambda: not shared_memory(prefix), what="the end of its shared memory")
        assert server.start().metadata.models[0].state == "READY"


def test_a_forked_child_cannot_stop_it(server):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            server.stop()
            code = 0 if not server.running else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert server.running
    assert server.metadata.models


def broken(tmp_path, classifier, edit):
    path = build_repository(tmp_path / "repository", {"top": classifier}, platform="python")
    edit(path / "top")
    return path


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda m: (m / "1" / "model.onnx").unlink(), "model.onnx"),
        (lambda m: (m / "config.pbtxt").write_text("nonsense {"), "config.pbtxt"),
        (lambda m: (m / "1" / "model.py").write_text("raise RuntimeError('no luck')"), "no luck"),
    ],
    ids=["missing file", "bad configuration", "failing code"],
)
def test_a_failed_start_quotes_the_server(tmp_path, classifier, installation, edit, expected):
    server = LocalServer(broken(tmp_path, classifier, edit), installation=installation)
    with pytest.raises(ServerStartError, match=expected) as caught:
        server.start()
    text = str(caught.value)
    assert str(server.log_path) in text
    assert server.log_path.read_text()
    assert "CudaDriverHelper" not in text
    assert server.headers["triton-grpc-protocol-sonic"] not in text
    assert not server.running
    assert shared_memory(server._run.shm_prefix) == []
    assert local_state.lookup(server.url) is None


def test_a_bad_argument_is_quoted_without_the_secret(repository, installation):
    server = LocalServer(repository, installation=installation, extra_args=["--no-such-option"])
    with pytest.raises(ServerStartError, match="no-such-option") as caught:
        server.start()
    assert server.headers["triton-grpc-protocol-sonic"] not in str(caught.value)


def test_a_start_that_takes_too_long_is_given_up(tmp_path, classifier, installation):
    path = broken(
        tmp_path,
        classifier,
        lambda m: (m / "1" / "model.py").write_text("import time\ntime.sleep(600)"),
    )
    server = LocalServer(path, installation=installation, startup_timeout_s=1.5, stop_timeout_s=0.5)
    begun = time.monotonic()
    with pytest.raises(ServerStartError, match=r"not ready after 1\.5 s"):
        server.start()
    assert time.monotonic() - begun < 15.0
    assert shared_memory(server._run.shm_prefix) == []


def test_a_missing_repository(tmp_path, installation):
    with pytest.raises(ConfigError, match="expected a directory as model repository"):
        LocalServer(tmp_path / "nothing", installation=installation).start()


@pytest.mark.parametrize("batched", [True, False])
def test_a_native_repository_that_others_built(tmp_path, classifier, installation, batched):
    """As for NVIDIA's container: a network, and a configuration."""
    path = build_repository(
        tmp_path / "r", {"top": classifier}, max_batch_size=64 if batched else 0
    )
    (path / "top" / "1" / "sonic-manifest.json").unlink()
    assert sorted(p.name for p in (path / "top" / "1").iterdir()) == ["model.onnx"]
    x = np.random.default_rng(1).normal(size=(7, 8)).astype("float32")
    with LocalServer(path, installation=installation, threads=1) as server:
        found = infer(server, x)
    expected = onnxruntime.InferenceSession(str(classifier)).run(None, {"x": x})[0]
    np.testing.assert_array_equal(found, expected)


def test_a_repository_without_models(tmp_path, installation):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="which has no models; build_repository makes one"):
        LocalServer(tmp_path, installation=installation).start()


def test_a_port_in_use_is_said(repository, installation):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = LocalServer(repository, installation=installation, port=port)
        with pytest.raises(ServerStartError, match=f"port {port} is in use"):
            server.start()
    with server:
        assert server.url == f"grpc://127.0.0.1:{port}"


def test_a_port_lost_in_a_race_is_replaced(repository, installation, monkeypatch):
    from sonic_coffea.server import local

    free = local._free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1]])
        monkeypatch.setattr(local, "_free_port", lambda: next(ports, None) or free())
        with LocalServer(repository, installation=installation) as server:
            assert server.port != taken.getsockname()[1]


def test_chosen_models_only(tmp_path, classifier, installation):
    path = build_repository(tmp_path / "repository", {"one": classifier, "two": classifier})
    with LocalServer(path, installation=installation, models=["two"]) as server:
        ready = [m.name for m in server.metadata.models if m.state == "READY"]
        assert ready == ["two"]


def test_poll_mode_follows_the_repository(tmp_path, classifier, installation):
    path = build_repository(tmp_path / "repository", {"one": classifier})
    with LocalServer(path, installation=installation, model_control="poll", poll_s=1) as server:
        build_repository(path, {"two": classifier})
        server.wait_for("two")
        build_repository(path, {"two": classifier}, add_version=True)
        server.wait_for("two", 2)
        ready = {(m.name, m.version) for m in server.metadata.models if m.state == "READY"}
        assert ready == {("one", "1"), ("two", "1"), ("two", "2")}
        with pytest.raises(ModelNotFoundError, match=r"after 0 s; the server says: nothing"):
            server.wait_for("three", timeout_s=0)
    with pytest.raises(ServerError, match="expected a running server"):
        server.wait_for("one")


def test_the_analysis_python_does_not_leak_in(repository, installation, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with LocalServer(repository, installation=installation, threads=3) as server:
        env = psutil.Process(server.pid).environ()
    assert "PYTHONPATH" not in env
    assert "PYTHONHOME" not in env
    assert env["PATH"].startswith(str(installation.root))
    assert env["OMP_NUM_THREADS"] == "3"


def test_a_secret_that_cannot_be_hidden_is_said(caplog, monkeypatch):
    from sonic_coffea.server._child import Guard

    guard = Guard.__new__(Guard)
    with caplog.at_level(logging.DEBUG, "sonic_coffea.server"):
        guard._take({"event": "hidden", "message": "PermissionError: no"})
    assert "PermissionError: no" in caplog.text


def test_a_server_that_ends_by_itself_is_started_again(repository, installation, caplog):
    server = LocalServer(repository, installation=installation, threads=1, restart=True)
    with server:
        url, first = server.url, server.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: is_another(url, first), 60.0, "a second start")
        assert server.url == url
        assert server.metadata.models
    assert "has ended by itself; starting it again" in caplog.text
    assert not server.running


def test_a_server_that_ends_again_and_again_is_left(caplog, monkeypatch):
    monkeypatch.setattr("sonic_coffea.server._watcher._LOOK_S", 0.001)
    monkeypatch.setattr("sonic_coffea.server._watcher._FIRST_PAUSE_S", 0.001)

    class Failing:
        running = False
        ended_on_request = False
        starts = 0

        def start_again(self):
            self.starts += 1
            raise ServerStartError("no")

    failing = Failing()
    watcher = Watcher(failing)
    watcher._thread.join(20)
    assert failing.starts == 5
    assert "ended 5 times in a row" in caplog.text
    watcher.stop()


def test_a_server_that_was_stopped_on_request_stays_so(repository, installation):
    command = [sys.executable, "-m", "sonic_coffea"]
    serving = subprocess.Popen(
        [*command, "serve", str(repository), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = json.loads(serving.stdout.readline())["url"]
        # One that ends by itself is started again, and then ends on request all the same.
        first = local_state.lookup(url).pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: is_another(url, first), 60.0, "a second start")
        stop = [*command, "status", "--stop", url]
        done = subprocess.run(stop, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == f"stopped {url}\n"
        assert serving.wait(30) == 0
        assert f"{url} was stopped on request" in serving.stderr.read()
        assert local_state.lookup(url) is None
    finally:
        serving.kill()
        serving.communicate()


def test_a_server_that_was_stopped_on_request_can_be_started(repository, installation):
    with LocalServer(repository, installation=installation, threads=1, restart=True) as server:
        first = server.pid
        os.kill(server._guard.pid, signal.SIGTERM)
        server.wait()
        assert server.ended_on_request
        server.start()
        assert not server.ended_on_request
        # It is looked after as before.
        second = server.pid
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: server.pid not in (None, first, second), 60.0, "a start by itself")
    assert not server.ended_on_request


def written_before(paths, days):
    then = time.time() - days * 86400
    for path in paths:
        os.utime(path, (then, then))


def test_the_log_of_a_server_that_is_starting_is_kept(tmp_path):
    logs = {local._new_log(tmp_path) for _ in range(30)}
    assert logs == set(tmp_path.iterdir())


def test_old_logs_of_this_machine_are_removed(tmp_path):
    logs = [local._new_log(tmp_path) for _ in range(30)]
    other = tmp_path / "triton-0000000000000000-abc.log"
    older = tmp_path / "triton-1111111111111111-abc.log"
    other.touch()
    older.touch()
    written_before([*logs, other], days=2)
    written_before([older], days=40)
    written_before(logs[:5], days=3)
    newest = local._new_log(tmp_path)
    left = set(tmp_path.iterdir())
    assert {newest, other} < left
    assert len(left) == 22
    assert left.isdisjoint(logs[:5])


def test_logs_that_another_process_removes_at_the_same_time(tmp_path, monkeypatch):
    path = local._new_log(tmp_path)
    real = Path.stat

    def stat_of(self, **options):
        if self == path:
            raise FileNotFoundError
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat_of)
    assert local._new_log(tmp_path).exists()
