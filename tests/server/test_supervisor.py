"""No server outlives its owner, whatever ends the owner."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from tests.waiting import until

from .support import family, is_gone, is_listed, shared_memory, socket_folder

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
        -signal.SIGKILL,
    ),
    "just exits": ("announce()\nsys.stdin.readline()", 0),
}


@pytest.mark.parametrize(("then", "code"), ENDS.values(), ids=ENDS)
def test_no_server_outlives_its_owner(own, then, code):
    owner = own(then)
    below = psutil.Process(owner.process.pid).children()
    children = [process for process in below if process.pid != owner.supervisor]
    assert len(children) == ("fork" in then)
    if code:
        owner.process.kill()
    else:
        print(file=owner.process.stdin, flush=True)
    assert owner.process.wait(20.0) == code
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
