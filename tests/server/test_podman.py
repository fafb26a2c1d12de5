"""A server in a container of podman: started, asked, killed, started again, and stopped.

The image is made of a folder: its Triton is the binary that this machine has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tarfile

import numpy as np
import onnxruntime
import pytest
from tests.waiting import until

from .support import infer, is_gone, shared_memory, socket_folder, supervisor

IMAGE = "localhost/sonic-coffea-triton:test"
LIMITS = ["nofile=1024:1024", "nproc=1000:1000"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("podman", "runc", "catatonit"))),
        reason="needs podman, runc and catatonit",
    ),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory, installation):
    """Make an image that holds a command, with this machine's files mounted below it."""
    work = tmp_path_factory.mktemp("podman")
    python = installation.python.resolve().parents[1]
    folders = ("/usr", installation.root, installation.backend_directory, python)
    mounted = [f"{path}:{path}:ro" for path in folders]
    (work / "containers.conf").write_text(
        f"[containers]\ndefault_ulimits = {json.dumps(LIMITS)}\nvolumes = {json.dumps(mounted)}\n"
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    (work / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{work}/graph"\nrunroot = "{work}/run"\n'
    )
    root = work / "root"
    for name in ("dev", "etc", "proc", "run", "sys", "tmp", "triton", "usr"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    command = root / "triton" / "tritonserver"
    command.write_text(
        "#!/bin/sh\n"
        f"export VIRTUAL_ENV={installation.root} PATH={installation.python.parent}:$PATH\n"
        f"export LD_LIBRARY_PATH={os.pathsep.join(map(str, installation.library_path))}\n"
        f"exec {installation.tritonserver} --backend-directory={installation.backend_directory} "
        '"$@"\n'
    )
    command.chmod(0o755)
    with tarfile.open(work / "image.tar", "w") as tar:
        tar.add(root, arcname=".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(work / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(work / "storage.conf"))
        path = "ENV PATH=/triton:/usr/bin:/bin"
        podman("import", "--change", path, str(work / "image.tar"), IMAGE)
        try:
            podman("run", "--rm", "--network=host", IMAGE, "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"podman runs no container here: {error.stderr.strip()}")
        yield IMAGE
        podman("rmi", "--force", IMAGE)


def podman(*arguments):
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.split()


def containers():
    return podman("ps", "--all", "--format", "{{.Names}}")


def test_containers_score_restart_and_stop(repository, classifier, image, serve):
    x = np.random.default_rng(1).normal(size=(20, 8)).astype("float32")
    expected = onnxruntime.InferenceSession(str(classifier)).run(["scores"], {"x": x})[0]
    server = serve(
        repository, runtime="podman", image=image, restart=True,
        stop_timeout_s=5.0,
    )  # fmt: skip
    with server:
        url, first = server.url, server.pid
        (name,) = containers()
        assert url.startswith("unix:")
        np.testing.assert_array_equal(infer(server, "top", x=x)["scores"], expected)
        podman("kill", name)
        until(lambda: server.pid not in (None, first), 60.0, "a start by itself")
        assert (server.url, containers()) == (url, [name])
        np.testing.assert_array_equal(infer(server, "top", x=x)["scores"], expected)
    assert not server.running
    assert containers() == []
    assert not socket_folder(url).exists()
    assert shared_memory(url) == []


def test_no_container_outlives_its_supervisor_or_podman(light, image, serve):
    with serve(light, runtime="podman", image=image) as server:
        client = server.pid
        os.kill(client, signal.SIGKILL)
        until(lambda: not server.running, what="the end")
        assert is_gone(client)
        until(lambda: containers() == [], what="the end of the container")
        with server:
            os.kill(supervisor(server), signal.SIGTERM)
            server.wait()
            assert server.ended_on_request
            assert containers() == []
