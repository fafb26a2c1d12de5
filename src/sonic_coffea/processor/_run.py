"""Runs a processor on files by coffea's runner, in this process or on a dask cluster."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import SonicError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run_files(
    processor: Any, paths: Sequence[str], *, client: Any, chunksize: int, progress: bool
) -> Any:
    """Return a processor's result over NanoAOD files, which may hold any part of NanoAOD."""
    from coffea.nanoevents import NanoAODSchema
    from coffea.processor import DaskExecutor, IterativeExecutor, Runner

    class Schema(NanoAODSchema):  # type: ignore[misc]
        warn_missing_crossrefs = False

    if client is None:
        executor: Any = IterativeExecutor(status=progress)
    else:
        executor = DaskExecutor(client=client, status=progress, retries=1)
    runner = Runner(executor=executor, schema=Schema, chunksize=chunksize)
    fileset = {"files": {"treename": "Events", "files": list(paths)}}
    if client is not None:  # through which only an `Exception` comes
        return runner(fileset, processor.process)
    try:
        return runner(fileset, partial(_once, processor.process))
    except _FinalError as final:
        raise final.error from None


class _FinalError(BaseException):
    """An error that another attempt would not mend.

    coffea's runner repeats a chunk after any `Exception`, since reading a remote file may fail by
    chance. The pool has retried a request already, as its options say; wrong names stay wrong.
    """

    def __init__(self, error: SonicError) -> None:
        super().__init__(error)
        self.error = error


def _once(process: Callable[[Any], Any], events: Any) -> Any:
    try:
        return process(events)
    except SonicError as error:
        raise _FinalError(error) from None
