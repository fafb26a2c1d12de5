"""The real server: ready, right, private, and gone when it should be."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import dask.config
import numpy as np
import onnxruntime
import psutil
import pytest
from tests.limits import without_room
from tests.network.processes import answers, page
from tests.onnx_files import save_onnx
from tests.ports import held_port
from tests.scripts import python
from tests.waiting import until

from sonic_coffea.errors import ConfigError, ServerError, ServerStartError
from sonic_coffea.server import LocalServer, Served, _folders, build_repository
from sonic_coffea.transport import Address

from .support import (
    configuration,
    family,
    files,
    infer,
    is_gone,
    is_listed,
    listening,
    shared_memory,
    socket_folder,
    supervisor,
)


def test_servers_are_ready_and_described(server):
    assert server.running
    metadata = server.metadata
    assert (metadata.name, metadata.version) == ("triton", "2.51.0")
    assert "statistics" in metadata.extensions
    served = {(m.name, m.version) for m in metadata.models if m.state == "READY"}
    assert served == {("top", "1"), ("pinned", "1")}
    assert "successfully loaded 'top'" in server.logs
    assert stat.S_IMODE(server.log_path.stat().st_mode) == 0o600
    assert psutil.Process(server.pid).name().startswith("tritonserver")


def test_only_its_owner_reaches_it(server):
    processes = [psutil.Process(pid) for pid in family(server.pid)]
    assert set().union(*map(listening, processes)) == set()
    folder = socket_folder(server.url)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    with pytest.raises(TypeError, match="pass its url"):
        pickle.dumps(server)


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root")
def test_another_user_reaches_neither_the_socket_nor_the_rows(server):
    stranger = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    (private,) = shared_memory(server.url)
    for path in (f"/dev/shm/{private}/", f"{socket_folder(server.url)}/"):  # noqa: S108
        assert any(Path(path).iterdir())
        done = subprocess.run([*stranger, "ls", path], capture_output=True, text=True, check=False)
        assert "Permission denied" in done.stderr


SCORES = """
import logging, sys
import sonic_coffea as sonic
logging.basicConfig()
with sonic.LocalServer(sys.argv[1], stop_timeout_s=0.0) as server:
    print([m.name for m in server.metadata.models])
"""


def test_kernels_that_cannot_hide_rows_are_named(light, installation):
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv "$@"'
    without = ["unshare", "--map-root-user", "sh", "-c", script, "sh"]
    without += ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    if subprocess.run([*without, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user cannot give up namespaces")
    command = [*without, sys.executable, "-c", SCORES, str(light)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "['echo']"
    assert "can read the rows and scores of" in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
def test_ports_are_for_others_and_warn(light, serve, caplog, host):
    with serve(light, port=0, host=host) as server:
        port = Address.parse(server.url).port
        name = host if host == "127.0.0.1" else socket.gethostname()
        assert server.url == f"grpc://{name}:{port}"
        processes = [psutil.Process(pid) for pid in family(server.pid)]
        # gRPC listens at all addresses by one socket of IPv6.
        assert set().union(*map(listening, processes)) <= {(host, port), ("::", port)}
        assert server.metadata.models[0].name == "echo"
    (said,) = [text for text in caplog.messages if "no access control" in text]
    assert ("by the network" in said) is (host == "0.0.0.0")  # noqa: S104


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: value}, f"expected {name} as a number of seconds")
            for name in ("startup_timeout_s", "stop_timeout_s")
            for value in (-1, float("inf"), float("nan"), 1e12, "10", None)
        ),
        ({"host": "0.0.0.0"}, r"host='0.0.0.0' needs a port="),  # noqa: S104
        ({"extra_args": ["--grpc-port=8001"]}, "extra_args has --grpc-port"),
        ({"extra_args": ["--id=mine"]}, "extra_args has --id"),
        ({"extra_args": "--log-verbose=1"}, "expected extra_args as a list of strings, got '--log"),
        ({"extra_args": [1]}, "expected extra_args as a list of strings, got .1"),
        *(({"env": env}, "expected env as a dict of strings") for env in ({"A": 1}, ["A"])),
        *(({"threads": n}, f"threads to be an integer >= 1, got {n!r}") for n in (0, "x", 1.5)),
        *(
            ({"port": port}, f"port to be an integer >= 0, got {port!r}")
            for port in ("x", 1.5, True)
        ),
        ({"port": 70_000}, "expected port to be a number up to 65535, got 70000"),
        ({"extra_args": ["--model-repository=/a"]}, "extra_args has --model-repository"),
    ],
)
def test_options_that_no_server_can_have_are_refused(light, options, message):
    with pytest.raises(ConfigError, match=message):
        LocalServer(light, **options)


@pytest.mark.parametrize(
    ("configured", "message"),
    [("podman", "a dict as sonic.local in dask's"), ({"image": 5}, "image as a name or a path")],
)
def test_configurations_of_another_form_are_refused(light, configured, message):
    with dask.config.set({"sonic.local": configured}), pytest.raises(ConfigError, match=message):
        LocalServer(light)
    with dask.config.set({"sonic.local": None}):  # as a key of YAML without a value is
        LocalServer(light)


def test_stop_is_idempotent_and_leaves_nothing(light, installation):
    # With time for requests to finish, as users have it.
    server = LocalServer(light)
    assert not server.running
    assert server.pid is None
    server.stop()
    with pytest.raises(ServerError, match=r"start\(\) it"):
        _ = server.url

    assert server.start() is server
    url = server.url
    assert is_listed(url)
    pids = [*family(server.pid), supervisor(server)]
    assert server.start().pid == pids[0]
    server.stop()
    server.stop()
    assert all(is_gone(pid) for pid in pids)
    assert shared_memory(url) == []
    assert not socket_folder(url).exists()
    assert not is_listed(url)
    assert not server.running
    assert not server.ended_on_request
    assert "successfully loaded 'echo'" in server.logs
    with pytest.raises(ServerError, match="stopped"):
        _ = server.metadata
    assert "stopped" in repr(server)


TWO_SERVERS = """
import os, sys
import sonic_coffea as sonic
from sonic_coffea.server import local_servers
os.close(0)
servers = [sonic.LocalServer(sys.argv[1], stop_timeout_s=0.0).start() for _ in range(2)]
listed = {record["url"] for record in local_servers()}
text = str({server.url for server in servers} <= listed)
for server in servers:
    server.stop()
with open(sys.argv[2], "w") as file:
    file.write(text)
"""


@pytest.mark.usefixtures("installation")
def test_processes_without_a_standard_stream_keep_their_servers(light, tmp_path):
    """As daemons are; otherwise the next server takes the folder for one that was left."""
    python("-c", TWO_SERVERS, light, tmp_path / "listed")
    assert (tmp_path / "listed").read_text() == "True"


@pytest.mark.usefixtures("installation")
def test_systems_without_shared_memory_are_named(light, tmp_path, monkeypatch):
    monkeypatch.setattr(_folders, "SHARED_MEMORY", tmp_path / "shm")
    with pytest.raises(ServerStartError, match=r"No such file or directory: '.*shm'"):
        LocalServer(light).start()


@pytest.mark.usefixtures("installation")
def test_full_disks_are_named(light):
    message = r"cannot write the server's log: \[Errno 27\] File too large"
    with without_room(), pytest.raises(ServerStartError, match=message):
        LocalServer(light).start()


def test_paths_may_have_characters_of_shells(light, serve, installation, tmp_path, monkeypatch):
    """Triton's Python backend starts the processes of models by bash."""
    odd = tmp_path / "it's a $(folder)"
    shutil.copytree(light, odd / "repository")
    (odd / "servers").symlink_to(installation.root.parent)
    monkeypatch.setenv("SONIC_COFFEA_SERVER_DIR", str(odd / "servers"))
    with serve(odd / "repository", startup_timeout_s=30.0) as server:
        rows = np.ones((1, 2), np.float32)
        assert infer(server, "echo", x=rows)["y"].tolist() == rows.tolist()


def test_starts_that_the_system_refuses_leave_nothing_and_may_be_repeated(
    light, serve, monkeypatch
):
    server = serve(light)
    for owner, method, error in (
        (subprocess, "Popen", OSError("no more processes")),
        (threading.Thread, "start", RuntimeError("no more threads")),
    ):
        with monkeypatch.context() as limited:
            limited.setattr(owner, method, Mock(side_effect=error))
            with pytest.raises(ServerStartError, match=f"cannot start .*supervisor: {error}"):
                server.start()
        assert not socket_folder(server.url).exists()
        assert "stopped" in repr(server)
    with server:
        assert server.running


def test_starts_do_not_wait_for_a_supervisor_that_ends_at_once(light, serve, monkeypatch):
    server, start = serve(light), threading.Thread.start

    def start_and_end(thread):
        start(thread)
        if thread.name == "sonic-server":
            thread.join()

    with monkeypatch.context() as ending:
        ending.setattr(sys, "executable", shutil.which("false"))
        ending.setattr(threading.Thread, "start", start_and_end)
        starting = threading.Thread(target=start_or_fail, args=[server], daemon=True)
        start(starting)
        starting.join(10)
        assert not starting.is_alive()


def start_or_fail(server):
    with pytest.raises(ServerStartError, match="was stopped while it started"):
        server.start()


@pytest.mark.usefixtures("installation")
def test_folders_that_others_can_enter_are_refused(light, tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path))
    with pytest.raises(ServerStartError, match="not a directory of this user with mode 0700"):
        LocalServer(light).start()


def test_servers_of_another_state_folder_stay_however_they_log(server, light, serve, monkeypatch):
    """Also of a home folder that cannot be written: records and logs are in a temporary one."""
    monkeypatch.delenv("SONIC_COFFEA_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    quiet = ["--log-error=false", "--log-info=false", "--log-format=ISO8601"]
    with serve(light, extra_args=quiet) as other:
        assert socket_folder(other.url).parent != socket_folder(server.url).parent
        assert [(m.name, m.state) for m in other.metadata.models] == [("echo", "READY")]
        assert other.log_path.is_relative_to(tempfile.gettempdir())
        assert other.logs
    assert "top" in [model.name for model in server.metadata.models]


def test_crashes_are_noticed_and_old_logs_removed(light, serve):
    with serve(light) as server:
        recent, old = server.log_path, server.log_path.with_name("triton-old.log")
        for path, days in ((recent, 2), (old, 40)):
            then = time.time() - days * 86400
            path.touch()
            os.utime(path, (then, then))
        pids = family(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.running, what="the end of the server")
        assert server.pid is None
        for pid in pids:
            until(lambda pid=pid: is_gone(pid), what=f"the end of process {pid}")
        until(lambda: not shared_memory(server.url), what="the end of its shared memory")
        assert server.start().metadata.models[0].state == "READY"
        assert (recent.exists(), old.exists()) == (True, False)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_children_neither_stop_a_server_nor_keep_it(light, serve):
    """They hold the pipe open, by whose end the supervisor could notice that the owner is gone."""
    stopped, told = os.pipe()
    with serve(light) as server:
        pid = os.fork()
        if pid == 0:
            try:
                server.stop()
                os.write(told, b"running" if server.running else b"stopped")
                signal.pause()
            finally:
                os._exit(0)
        os.close(told)
        try:
            with os.fdopen(stopped, "rb") as answer:
                assert answer.read(7) == b"stopped"
            assert server.running
            assert server.metadata.models
            minder = supervisor(server)
            server.stop()
            assert is_gone(minder)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_options_reach_the_server(tmp_path, classifier, serve, installation, monkeypatch, caplog):
    path = build_repository(tmp_path / "repository", {"one": classifier, "two": classifier})
    (path / "one" / "1" / "model.onnx").write_text("to be replaced before it is loaded")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with held_port() as port:
        arguments = ["--allow-metrics=true", "--metrics-address=127.0.0.1"]
        arguments += ["--model-control-mode=explicit", "--load-model=two"]
        options = {"extra_args": [*arguments, f"--metrics-port={port}"], "threads": 3}
        server = serve(path, **options).start()
    with server:
        assert [m.name for m in server.metadata.models if m.state == "READY"] == ["two"]
        metrics = f"http://127.0.0.1:{port}/metrics"
        until(lambda: answers(metrics))  # a moment later than requests
        assert "nv_inference_request_success" in page(metrics)
        process = psutil.Process(server.pid)
        assert {ip for ip, _ in listening(process)} == {"127.0.0.1"}
        assert "--exit-timeout-secs=1" in process.cmdline()
        env = process.environ()
        build_repository(path, {"one": classifier}, overwrite=True)
        assert f"{server.url} has the models in memory that it loaded" in caplog.text
    # Nothing of the analysis environment's Python leaks in.
    assert "PYTHONPATH" not in env
    assert "PYTHONHOME" not in env
    assert env["PATH"].startswith(str(installation.root))
    assert env["OMP_NUM_THREADS"] == "3"


PUBLISHED = """
name: "published" platform: "onnxruntime_onnx" max_batch_size: 32
input [{ name: "x" data_type: TYPE_FP32 dims: [8] }]
output [{ name: "scores" data_type: TYPE_FP32 dims: [2] label_filename: "labels.txt" }]
instance_group { count: 2 kind: KIND_AUTO }
dynamic_batching { preferred_batch_size: [16] }
optimization { graph { level: -1 } }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
model_repository_agents {
  agents [{ name: "checksum" parameters { key: "MD5:1/model.onnx" value: "DIGEST" } }]
}
"""


def save_published(repository: Path, classifier: Path) -> Path:
    """A model as experiments publish it, with a checksum in its configuration."""
    folder = repository / "published"
    (folder / "1").mkdir(parents=True)
    shutil.copy(classifier, folder / "1" / "model.onnx")
    digest = hashlib.md5(classifier.read_bytes(), usedforsecurity=False).hexdigest()
    (folder / "config.pbtxt").write_text(PUBLISHED.replace("DIGEST", digest))
    (folder / "labels.txt").write_text("QCD\nTop\n")
    return folder


def test_repositories_of_others_are_served_unchanged(tmp_path, classifier, serve):
    """As for NVIDIA's container: networks, with configurations that say more or less."""
    path = tmp_path / "r"
    numbers = "(float[N] x) => (float[N] y) { y = Neg(x) }"
    words = "(string[N, 1] x) => (string[N, 1] y) { y = Identity(x) }"
    models = {
        "whole": Served(classifier, max_batch_size=0),
        "numbers": save_onnx(tmp_path / "numbers.onnx", numbers),
        "words": save_onnx(tmp_path / "words.onnx", words),
    }
    build_repository(path, models)
    for name in models:
        (path / name / "1" / "sonic-manifest.json").unlink()
        assert [p.name for p in (path / name / "1").iterdir()] == ["model.onnx"]
    assert "reshape" in configuration(path, "numbers")["output"][0]
    save_published(path, classifier)
    before = files(path)
    x = np.random.default_rng(1).normal(size=(7, 8)).astype("float32")
    expected = onnxruntime.InferenceSession(str(classifier)).run(None, {"x": x})[0]
    with serve(path) as server:
        for name in ("whole", "published"):
            np.testing.assert_array_equal(infer(server, name, x=x)["scores"], expected)
        np.testing.assert_array_equal(infer(server, "numbers", x=x[:, :1])["y"], -x[:, :1])
        text = np.array([["é".encode()]], object)
        np.testing.assert_array_equal(infer(server, "words", x=text)["y"], text)
    assert files(path) == before
    # Without a configuration, a native backend would take the tensors from the file.
    shutil.copytree(path / "published" / "1", tmp_path / "s" / "bare" / "1")
    with pytest.raises(ServerStartError, match="expected the inputs and outputs of .*/bare/1 in"):
        serve(tmp_path / "s").start()
    # A configuration that was copied for another network has the digest of the first.
    shutil.copytree(path / "words", tmp_path / "t" / "words")
    shutil.copy(classifier, tmp_path / "t" / "words" / "1" / "model.onnx")
    with pytest.raises(ServerStartError, match="the digest of version 1 in .* was changed"):
        serve(tmp_path / "t").start()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("MD5:1/model.onnx", "MD5:1/model.pt", "'published' asks .* 'MD5:1/model.pt'; without"),
        ("MD5:", "SHA1:", "'published' asks .* 'checksum' with 'SHA1:1/model.onnx'; without"),
        ('value: "', 'value: "0', "model.onnx to have the MD5 checksum 0.*damaged"),
        ('"checksum"', '"decrypt"', "'published' asks for repository agent 'decrypt'"),
        ("", "", "checked when the server starts, which poll=True cannot do"),
    ],
)
@pytest.mark.usefixtures("installation")
def test_other_checksums_and_agents_are_refused(tmp_path, classifier, old, new, message):
    config = save_published(tmp_path / "r", classifier) / "config.pbtxt"
    before, after = config.read_text().split("agents [")
    config.write_text(f"{before}agents [{after.replace(old, new) if old else after}")
    with pytest.raises(ConfigError, match=message):
        LocalServer(tmp_path / "r", poll=not old).start()
