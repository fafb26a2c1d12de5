"""onnxruntime in place of a Triton: the same answers, and other processes can use it."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server import InProcessServer, LocalServer, build_repository
from sonic_coffea.server import _install as install
from sonic_coffea.server.launch import _fallback as fallback
from sonic_coffea.transport import connect_transport

from .conftest import save_classifier
from .support import is_listed, socket_folder

TOP = sonic.Model("top", {"x": sonic.Row([f"x{i}" for i in range(8)])}, {"scores": ["q", "t"]})


@pytest.fixture(scope="module")
def jets():
    rng = np.random.default_rng(3)
    return ak.unflatten(
        ak.zip({f"x{i}": rng.normal(size=300).astype("float32") for i in range(8)}),
        rng.multinomial(300, [0.01] * 100),
    )


def scored(url, jets):
    with sonic.connect(url) as pool:
        return TOP(jets, pool=pool)


def test_the_same_contract_and_the_same_scores(repository, server, jets):
    triton = connect_transport(server.url)
    with InProcessServer(repository, threads=1) as local:
        assert local.metadata.name == "onnxruntime"
        mine = connect_transport(local.url)
        ours, theirs = mine.contract("top", None), triton.contract("top", None)
        for what in ("version", "inputs", "outputs", "max_rows"):
            assert getattr(ours, what) == getattr(theirs, what)
        mine.close()
        here, there = scored(local.url, jets), scored(server.url, jets)
        assert ak.num(here).tolist() == ak.num(there).tolist()
        np.testing.assert_allclose(ak.flatten(here.t), ak.flatten(there.t), rtol=1e-6)
    triton.close()
    assert not is_listed(local.url)
    assert not socket_folder(local.url).exists()


def test_only_processes_of_its_user_may_ask(repository):
    with InProcessServer(repository) as local:
        assert stat.S_IMODE(socket_folder(local.url).stat().st_mode) == 0o700
        code = (
            "import sys; from sonic_coffea.transport import connect_transport;"
            f"print([m.name for m in connect_transport({local.url!r}).models()])"
        )
        ask = [sys.executable, "-c", code]
        done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == "['top']"


def test_status_lists_it_and_does_not_end_it(repository):
    with InProcessServer(repository) as local:

        def status(*arguments):
            command = [sys.executable, "-m", "sonic_coffea", "status", "--json", *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

        (listed,) = [row for row in json.loads(status().stdout) if row["url"] == local.url]
        assert listed["models"] == ["top v1"]
        refused = status("--stop", local.url)
        assert refused.returncode == 1
        assert f"a part of process {os.getpid()}" in refused.stderr


def test_the_latest_version_is_served(tmp_path, classifier):
    other = save_classifier(tmp_path / "other.onnx", features=8, ir_version=8)
    path = build_repository(tmp_path / "r", {"m": classifier}, max_batch_size=4)
    build_repository(path, {"m": other}, version=12)
    with InProcessServer(path) as local:
        assert [(m.name, m.version) for m in local.metadata.models] == [("m", "12")]


@pytest.mark.server
def test_a_version_that_is_pinned(tmp_path, classifier, serve):
    path = build_repository(tmp_path / "r", {"m": classifier})
    build_repository(path, {"m": classifier}, version=2, versions=[1])
    with InProcessServer(path) as local, serve(path) as triton:
        assert [m.version for m in local.metadata.models] == ["1"]
        contracts = []
        for server in (local, triton):
            with connect_transport(server.url) as connection:
                contracts.append(connection.contract("m", None))
    ours, theirs = contracts
    assert ours.digest == theirs.digest != ""
    assert ours.version == theirs.version == "1"


def test_from_the_command_line(repository):
    command = [sys.executable, "-m", "sonic_coffea", "serve", str(repository)]
    process = subprocess.Popen(
        [*command, "--runtime", "in-process", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        served = json.loads(process.stdout.readline())
        assert served["models"] == ["top v1"]
        connection = connect_transport(served["url"])
        assert connection.info().name == "onnxruntime"
        connection.close()
    finally:
        process.terminate()
        process.communicate(timeout=60)
    wrong = subprocess.run(
        [*command, "--runtime", "dokcer"], capture_output=True, text=True, check=False, timeout=60
    )
    assert wrong.returncode == 1
    assert "did you mean 'docker'" in wrong.stderr


def test_a_repository_of_others(tmp_path, classifier, caplog):
    folder = tmp_path / "r" / "theirs" / "3"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(classifier.read_bytes())
    (tmp_path / "r" / "code" / "1").mkdir(parents=True)
    with InProcessServer(tmp_path / "r") as local:
        mine = connect_transport(local.url)
        contract = mine.contract("theirs", None)
        mine.close()
    assert (contract.max_rows, contract.inputs[0].shape) == (None, (8,))
    assert "these are not served: code" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "which has none"),
        (lambda r: (r / "m" / "1").mkdir(parents=True), "which has others: m"),
        (
            lambda r: (
                (r / "m" / "1").mkdir(parents=True),
                (r / "m" / "1" / "model.onnx").write_text("no network"),
            ),
            "holds no ONNX graph",
        ),
    ],
)
def test_repositories_that_cannot_be_served(tmp_path, make, message):
    make(tmp_path / "r")
    with pytest.raises(ConfigError, match=message):
        InProcessServer(tmp_path / "r")


def test_a_port_in_use(repository):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"port {port} is in use"):
            InProcessServer(repository, port=port).start()
    with InProcessServer(repository, port=port) as local:
        assert local.url == f"grpc://127.0.0.1:{port}"
        assert local.metadata.name == "onnxruntime"


def test_the_fallback_of_a_machine_where_no_server_can_start(
    repository, jets, server, monkeypatch, caplog, tmp_path
):
    expected = scored(server.url, jets)
    monkeypatch.setenv("SONIC_COFFEA_SERVER_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(install.platform, "libc_ver", lambda: ("glibc", "2.28"))
    with pytest.raises(ServerStartError, match="glibc 2.28, and there is none of apptainer"):
        LocalServer(repository).start()
    # The shared server is lost, and no other is on record; the fallback is this process.
    monkeypatch.setenv("SONIC_COFFEA_STATE_DIR", str(tmp_path / "state"))
    try:
        with sonic.connect("grpc://127.0.0.1:9", fallback=repository, fallback_after_s=0.1) as pool:
            scores = TOP(jets, pool=pool)
            ((url, *_), _) = next(iter(pool.statistics))
    finally:
        for own in fallback._own.values():
            own.stop()
        fallback._own.clear()
    assert "onnxruntime takes the place of a Triton on this machine" in caplog.text
    assert url.startswith("unix:")
    np.testing.assert_allclose(ak.flatten(scores.t), ak.flatten(expected.t), rtol=1e-6)
