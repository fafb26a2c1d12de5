"""The client of a cluster: of a running scheduler, or of processes on this machine."""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING, Any

from distributed import Client, LocalCluster

from sonic_coffea.errors import ServerLostError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def cluster(workers: int, scheduler: str | None = None) -> Iterator[Any]:
    """Yield a client of the scheduler at an address, or of processes of this machine.

    Raises
    ------
    ServerLostError
        If there is no scheduler.
    """
    if scheduler is not None:
        try:
            client = Client(scheduler, timeout=10)
        except (OSError, ValueError) as error:
            raise ServerLostError(f"no dask scheduler answers at {scheduler}: {error}") from None
        with client:
            yield client
        return
    with (
        tempfile.TemporaryDirectory(prefix="sonic-dask-") as scratch,
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            local_directory=scratch,
        ) as local,
        Client(local) as client,
    ):
        yield client
