"""Runs a processor on files by coffea's runner, in this process or on a dask cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_files(
    processor: Any, paths: Sequence[str], *, client: Any, chunksize: int, progress: bool
) -> Any:
    """Return what a processor makes of NanoAOD files, which may hold any part of NanoAOD."""
    from coffea.nanoevents import NanoAODSchema
    from coffea.processor import DaskExecutor, IterativeExecutor, Runner

    class Schema(NanoAODSchema):  # type: ignore[misc]
        warn_missing_crossrefs = False

    if client is None:
        executor: Any = IterativeExecutor(status=progress)
    else:
        executor = DaskExecutor(client=client, status=progress, retries=1)
    runner = Runner(executor=executor, schema=Schema, chunksize=chunksize)
    return runner({"files": {"treename": "Events", "files": list(paths)}}, processor.process)
