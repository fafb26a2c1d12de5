"""What works from each host of a cluster."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from distributed import Client, Security
from tests.commands import run
from tests.dask.conftest import connected_cluster
from tests.ports import held_port

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.dask import check_workers, cluster
from sonic_coffea.pool import Settings
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.tools import Checks, HostCheck, Step

MODEL = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["a"]})


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer({"m": FakeModel.of(MODEL)}) as running:
        yield running


def address(client: Client) -> str:
    (worker,) = client.nthreads()
    return str(worker)


@pytest.mark.server
def test_one_worker_of_each_host_tries_all_servers(one_worker: Client, server: FakeServer) -> None:
    with held_port() as port:
        nobody = f"grpc://127.0.0.1:{port}"
        with sonic.connect([server.url, nobody], client=one_worker) as pool:
            checks = pool.check("m", declared=[MODEL])
    assert not checks.ok
    assert [host.process for host in checks] == ["this process", address(one_worker)]
    for host, (good, bad) in zip(checks, zip(*[checks.rows()] * 2, strict=True), strict=True):
        assert [step.name for step in host.servers[server.url]][-1] == "inference"
        assert good[2:5:2] == (server.url, "✓ inference")
        assert good[3].endswith(" ms")
        assert good[5] == bad[5] == ""
        assert bad[2:4] == (nobody, "")
        assert bad[4].startswith("✗ connection: ")
        assert "nothing listens at this port" in bad[4]


@pytest.mark.server
def test_the_command(one_worker: Client, server: FakeServer, tmp_path: Path) -> None:
    scheduler = one_worker.scheduler.address
    done = run("check", server.url, "m", "--scheduler", scheduler)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ inference" in done.stdout
    done = run("check", server.url, "n", "--scheduler", scheduler, "--json")
    assert done.returncode == 1
    (host,) = json.loads(done.stdout)["hosts"]
    assert host["process"] == address(one_worker)
    assert [s["name"] for s in host["servers"][server.url] if s["ok"] is False] == ["model n"]
    with held_port() as port:
        done = run("check", server.url, "--scheduler", f"tcp://127.0.0.1:{port}")
        assert "no dask scheduler answers at" in done.stderr
    done = run("check", server.url, "--scheduler", "nonsense://here")
    assert "no dask scheduler answers at 'nonsense://here'" in done.stderr


@pytest.mark.server
def test_a_worker_that_cannot_try(one_worker: Client, server: FakeServer) -> None:
    """Such as one that lacks a package of what it is sent."""
    (host,) = check_workers(one_worker, Settings.make(server.url), ModuleOf("no_such_package"))
    assert not host.ok
    assert "No module named 'no_such_package'" in host.error
    ((*_, result, _),) = Checks([host]).rows()
    assert result == f"not tried: {host.error}"


class ModuleOf:
    """Wants a module where it arrives."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __reduce__(self) -> tuple[object, ...]:
        return __import__, (self.module,)


def test_what_a_host_lacks(server: FakeServer, tmp_path: Path) -> None:
    from sonic_coffea.pool import check_here

    token = tmp_path / "token"
    token.write_text("secret")
    settings = Settings.make(server.url, token=token)
    here = check_here(settings)
    assert here.ok
    token.unlink()
    there = check_here(settings, process="tcp://there")
    versions = {**here.versions, "awkward": "1.0", "coffea": None}
    checks = Checks([here, replace(there, versions=versions)])
    assert not checks.ok
    good, bad = checks.rows()
    assert good[5] == ""
    assert bad[5].splitlines() == [
        f"awkward 1.0, here {here.versions['awkward']}",
        f"coffea is not installed, here {here.versions['coffea']}",
    ]
    assert bad[4].startswith("✗ connection: cannot read the token")
    assert str(token) in bad[4]
    assert all(name in checks._repr_html_() for name in (here.host, "tcp://there"))
    assert "secret" not in json.dumps(checks.to_dict()) + repr(checks) + checks._repr_html_()
    # Another version may do; a missing package does not.
    step = Step(name="readiness", ok=True, seconds=0.0012)
    older = HostCheck(host="h", process="p", servers={"s": [step]}, versions={"awkward": "1.0"})
    assert older.ok
    assert next(iter(Checks([older]).rows()))[3] == "1.2 ms"
    assert not replace(older, versions={"awkward": None}).ok


def test_workers_that_are_still_to_come(server: FakeServer) -> None:
    with connected_cluster(server.url, 0) as (cluster, _, pool):
        cluster.adapt(minimum=0, maximum=1, interval="50 ms")
        assert [check.process for check in pool.check()][1:]


def test_clients_that_cannot_ask(server: FakeServer) -> None:
    settings = Settings.make(server.url)
    with (
        Client(processes=False, n_workers=0, dashboard_address="127.0.0.1:0") as client,
        pytest.raises(errors.ConfigError, match="no workers for 0.1 s"),
    ):
        check_workers(client, settings, worker_timeout_s=0.1)
    with pytest.raises(errors.ConfigError, match="closed; .*`sonic-coffea check URL`"):
        check_workers(client, settings)
    with pytest.raises(errors.ConfigError, match="client: expected .* that is open, got <Client"):
        sonic.connect(server.url, client=client)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster(1) as client:
        yield client


@pytest.mark.parametrize("security", [None, Security.temporary()], ids=["plain", "certified"])
def test_strangers_do_not_reach_own_processes(client: Client, security: Security | None) -> None:
    assert client.submit(int, 3).result() == 3
    for address in (client.scheduler.address, *client.nthreads()):
        own = address if security else address.replace("tls://", "tcp://")
        with pytest.raises(OSError, match="TLS|reset|closed|Timed out"):
            Client(own, security=security, timeout=1)


def test_ctrl_c_is_for_the_process_of_the_client(client: Client) -> None:
    """A terminal sends it to all; the workers go on until their client stops them."""
    (pid,) = client.run(os.getpid).values()
    os.kill(pid, signal.SIGINT)
    assert client.submit(int, pure=False).result(60) == 0
    assert list(client.run(os.getpid).values()) == [pid]
