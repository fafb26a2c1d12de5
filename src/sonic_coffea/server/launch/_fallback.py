"""One local server for all processes of a machine, as their fallback."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
from pathlib import Path

import dask.config

from sonic_coffea.server._folders import alone_on_machine, local_servers
from sonic_coffea.server._probe import is_ready
from sonic_coffea.server.in_process._onnx_server import InProcessServer, cores
from sonic_coffea.server.launch._local import LocalServer
from sonic_coffea.server.launch.runtimes import IN_PROCESS

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
    name = hashlib.sha256(path.encode()).hexdigest()[:16]
    with _lock, alone_on_machine(f"fallback-{name}"):
        for record in local_servers():
            if record.repository == path and is_ready(record.url):
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
