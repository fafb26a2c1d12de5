"""The client of a cluster: of a running scheduler, or of processes on this machine."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from distributed import Client, LocalCluster

from sonic_coffea.errors import ConfigError


@contextlib.contextmanager
def cluster(workers: int, scheduler: str | None = None) -> Iterator[Any]:
    """Yield a client of the scheduler at an address, or of processes of this machine.

    Those processes do not hear Ctrl-C: this process stops them in order.

    Raises
    ------
    ConfigError
        If no scheduler answers at the address.
    """
    if scheduler is not None:
        try:
            client = Client(scheduler, timeout=10)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no dask scheduler answers at {scheduler!r}: {error}; expected an address such as "
                "'tcp://host:8786'"
            ) from None
        with client:
            yield client
        return
    with (
        tempfile.TemporaryDirectory(prefix="sonic-dask-") as scratch,
        contextlib.ExitStack() as stack,
    ):
        with _ctrl_c_later():
            with _ctrl_c_blocked():
                local = LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    dashboard_address="127.0.0.1:0",
                    local_directory=scratch,
                    # What fails is raised here; a worker that is stopped in a heartbeat, or with
                    # work left, would log it.
                    silence_logs=logging.CRITICAL,
                )
            client = Client(local)
            stack.callback(_close, client, local)
        # coffea's progress bar asks the current client, which may be one of the caller's.
        stack.enter_context(client.as_current())
        yield client


def _close(client: Client, local: LocalCluster) -> None:
    with _ctrl_c_later(), local, client:
        pass


@contextlib.contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Raise a Ctrl-C that is pressed meanwhile when this is over.

    A cluster whose start or end is interrupted leaves tracebacks, or waits for its own timeouts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Leave Ctrl-C to this process; threads and processes that start meanwhile never hear of it.

    The terminal sends it to all processes, and each worker would end in a traceback of its own.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # Its start unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
