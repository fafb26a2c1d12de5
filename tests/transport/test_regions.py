"""Regions of shared memory with a real Triton: nothing is left behind, on disk or in the server."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from tests.ports import held_port
from tests.transport.shared import check, files, model, objects, pool_of, registered
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.transport import _regions, local_state
from sonic_coffea.transport import _shared_memory as shm

if TYPE_CHECKING:
    from pathlib import Path

    from tests.transport.shared import Held


def test_what_was_abandoned_is_not_used_again(held: Held, held_server: sonic.LocalServer) -> None:
    with pool_of(held_server) as pool, registered(held_server) as regions:
        pending = held.submit(pool)
        (abandoned,) = regions()
        pending.cancel()
        # Else the server might answer before it hears of it, which frees the region.
        until(lambda: abandoned not in files())
        held.release()
        assert len(model()(objects(2000), pool=pool)) == 2000
        assert len(files()) == 1


def killed(server: sonic.LocalServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)


@pytest.mark.server
def test_a_server_that_is_started_anew_knows_no_regions(wide: Path) -> None:
    """And to unregister them with a server that is dead is no error."""
    sent = objects(12_000)
    with held_port() as port, contextlib.ExitStack() as stack:
        options = {"port": port, "stop_timeout_s": 0.1, "restart": False}
        first, second = (sonic.LocalServer(wide, **options) for _ in range(2))
        stack.callback(first.stop)
        with pool_of(first.start(), retry_timeout_s=60) as pool:
            check(model()(sent[:4000], pool=pool), sent[:4000])
            pending = model().submit(sent, pool=pool)
            killed(first)
            stack.callback(second.stop)
            second.start()
            check(pending.result(timeout_s=100), sent)
            check(model()(sent[:4000], pool=pool), sent[:4000])
        with pool_of(second, retry_timeout_s=0.2) as pool:
            check(model()(sent[:4000], pool=pool), sent[:4000])
            killed(second)
            with pytest.raises(errors.ServerLostError):
                model()(sent[:4000], pool=pool)


@pytest.mark.server
def test_letting_go_of_a_dead_server_is_no_error(wide: Path) -> None:
    server = sonic.LocalServer(wide, stop_timeout_s=0.1, restart=False).start()
    with pool_of(server, retry_timeout_s=0.2) as pool:
        check(model()(objects(4000), pool=pool), objects(4000))
        killed(server)
        with pytest.raises(errors.ServerLostError):
            model()(objects(4000), pool=pool)
    server.stop()


def test_nothing_is_registered_after_closing(wide_server: sonic.LocalServer) -> None:
    with pool_of(wide_server) as pool, registered(wide_server) as regions:
        check(model()(objects(4000), pool=pool), objects(4000))
        assert regions()
        pool.close()
        until(lambda: regions() == [])


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return each time that the server refused to let go of a region."""
    return [r.getMessage() for r in caplog.records if "currently in use" in r.getMessage()]


def test_the_server_lets_go_of_what_was_abandoned(
    held: Held, held_server: sonic.LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that is cancelled while it runs; nothing else is asked of the pool then."""
    caplog.set_level(logging.DEBUG, logger=shm.__name__)
    with pool_of(held_server) as pool, registered(held_server) as regions:
        pending = held.submit(pool)
        (region,) = regions()
        pending.cancel()
        until(lambda: len(refusals(caplog)) > 1)
        assert regions() == [region]
        assert files() == []
        held.release()
        until(lambda: regions() == [])
        assert all(region in refusal for refusal in refusals(caplog))
        assert len(model()(objects(2000), pool=pool)) == 2000


@pytest.mark.parametrize("waits_for_close", [True, False])
def test_closing_unregisters_what_is_in_flight(
    held: Held,
    held_server: sonic.LocalServer,
    caplog: pytest.LogCaptureFixture,
    waits_for_close: bool,
) -> None:
    """It waits for the server for a moment; then a thread does, and the channel is open for it."""
    caplog.set_level(logging.DEBUG, logger=shm.__name__)
    with pool_of(held_server) as pool, registered(held_server) as regions:
        pending = held.submit(pool)
        closing = threading.Thread(target=pool.close)
        closing.start()
        until(lambda: len(refusals(caplog)) > 0)
        if waits_for_close:
            closing.join()
            assert regions()
        with pytest.raises(errors.CancelledError):
            pending.result()
        held.release()
        closing.join()
        until(lambda: regions() == [])


# The process ends half a second after its pool begins to close, as the server works on.
_CLOSED = """
import sys
from pathlib import Path
from tests.transport.shared import Held, files, pool_of
held = Held(Path(sys.argv[2]))
with pool_of(sys.argv[1]) as pool:
    held.submit(pool)
    print(*files())
"""


def test_a_client_that_ended_too_soon_leaves_it_to_the_next(
    held: Held, held_server: sonic.LocalServer
) -> None:
    command = [sys.executable, "-c", _CLOSED, held_server.url, str(held.folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    left = set(ended.stdout.split())
    assert left
    with registered(held_server) as regions:
        held.release()
        with pool_of(held_server) as pool:
            model()(objects(2000), pool=pool)
            until(lambda: left.isdisjoint(regions("*")))
            assert regions()


_KILLED = """
import os, signal, sys
import sonic_coffea as sonic
from tests.transport.shared import files, model, objects
with sonic.connect(sys.argv[1]):
    model()(objects(4000))
    print(*files(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_client_left_is_removed(wide_server: sonic.LocalServer) -> None:
    """By any process of its user: perhaps by one that runs tests beside this one."""
    command = [sys.executable, "-c", _KILLED, wide_server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        left = client.communicate(timeout=100)[0].split()
    assert client.returncode == -signal.SIGKILL
    assert left
    mine = _regions.create(1000)
    foreign = local_state.SHARED_MEMORY / f"{_regions.PREFIX}-{os.getuid() + 1}-1-1-1-1"
    foreign.touch()
    try:
        with pool_of(wide_server) as pool, registered(wide_server) as regions:
            assert set(left) <= set(regions(client.pid))
            check(model()(objects(4000), pool=pool), objects(4000))
            assert files(client.pid) == []
            assert mine.path.exists()
            assert foreign.exists()
            until(lambda: regions(client.pid) == [])
            assert regions()
    finally:
        foreign.unlink()
        mine.remove()


_ENDS = """
import sys
import sonic_coffea as sonic
from tests.transport.shared import check, model, objects
sonic.connect(sys.argv[1])
check(model()(objects(4000)), objects(4000))
"""


def test_a_client_that_ends_leaves_nothing(wide_server: sonic.LocalServer) -> None:
    client = subprocess.Popen([sys.executable, "-c", _ENDS, wide_server.url])
    assert client.wait(100) == 0
    assert files(client.pid) == []


_FORKS = """
import os, sys
import sonic_coffea as sonic
from tests.transport.shared import check, files, model, objects
with sonic.connect(sys.argv[1]) as pool:
    check(model()(objects(4000)), objects(4000))
    regions = files()
    assert regions
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert files() == regions
    check(model()(objects(4000)), objects(4000))
    assert pool.statistics.total().retries == 0
"""


def test_a_forked_child_that_closes_leaves_its_parents_regions(
    wide_server: sonic.LocalServer,
) -> None:
    client = subprocess.Popen([sys.executable, "-c", _FORKS, wide_server.url])
    assert client.wait(100) == 0
    assert files(client.pid) == []
