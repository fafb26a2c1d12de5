"""One local server for all processes of a machine, as their fallback."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import dask.config
import filelock

from sonic_coffea.server._probe import is_ready
from sonic_coffea.server.in_process._onnx_server import InProcessServer, cores
from sonic_coffea.server.launch._local import LocalServer
from sonic_coffea.server.launch.runtimes import IN_PROCESS
from sonic_coffea.transport import local_state

logger = logging.getLogger(__name__)

_own: dict[str, LocalServer | InProcessServer] = {}
_lock = threading.Lock()


def serve_for_machine(repository: str | os.PathLike[str]) -> str:
    """Return the URL of a local server for a repository, which is started if there is none.

    It ends with the process that started it; another then starts the next. Its models use as many
    threads as that process may have cores. On a machine that has no runtime for a Triton, the
    process that starts it serves the repository's ONNX files by itself.
    """
    path = str(Path(repository).expanduser().absolute())
    with _lock, _alone_on_machine(path, local_state.machine()):
        for record in local_state.records():
            if record.repository == path and is_ready(record.url, record.headers):
                return record.url
        server = _own.get(path)
        if server is None:
            server = _own[path] = _new(path)
            atexit.register(server.stop)
        server.start()
        logger.warning("started %s, as no other server has its models", server)
        return server.url


def _new(path: str) -> LocalServer | InProcessServer:
    if dask.config.get("sonic.local.runtime", None) == IN_PROCESS:
        return InProcessServer(path)
    server = LocalServer(path, threads=cores())
    against = server.reason_against()
    if against is None:
        return server
    logger.warning("onnxruntime takes the place of a Triton on this machine: %s", against)
    return InProcessServer(path)


@contextlib.contextmanager
def _alone_on_machine(repository: str, machine: str) -> Iterator[None]:
    """Hold a lock against other processes of this user.

    Machines that share the directory do not wait for each other. On a disk without locks nothing
    is held: then two servers may start where one would do.
    """
    folder = local_state.directory()
    name = f"{machine}-{hashlib.sha256(repository.encode()).hexdigest()[:16]}"
    with contextlib.ExitStack() as held:
        try:
            if folder is not None:
                held.enter_context(filelock.FileLock(folder / f"fallback-{name}.lock"))
        except OSError as error:
            logger.warning("cannot lock %s: %s", folder, error)
        yield
