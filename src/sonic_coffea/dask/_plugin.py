"""The worker plugin: every present and future worker of a cluster gets its pool."""

from __future__ import annotations

from typing import Any

from distributed import Client, Worker, WorkerPlugin

from sonic_coffea.pool import Pool, Settings, forget, install


class SonicPlugin(WorkerPlugin):  # type: ignore[misc]
    """Opens the pool of a worker process when it starts, and closes it when it ends.

    Parameters
    ----------
    settings : Settings
        The servers and limits; they travel by dask's own channel to the workers.
    """

    name = "sonic-coffea"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pool: Pool | None = None

    def setup(self, worker: Worker) -> None:
        """Open the pool; nothing is contacted yet."""
        del worker
        self._pool = install(self.settings)

    def teardown(self, worker: Worker) -> None:
        """Close the pool, unless the worker shares a process with others or with the client."""
        if worker.nanny is not None:
            forget(self._pool)

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "_pool": None}


def register(client: Client, settings: Settings) -> None:
    """Give every present and future worker of a cluster its pool."""
    client.register_plugin(SonicPlugin(settings))
