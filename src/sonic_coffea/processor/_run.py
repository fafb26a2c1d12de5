"""Runs a processor on files by coffea's runner, in this process or on a dask cluster."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

from sonic_coffea._extras import needed
from sonic_coffea.errors import ConfigError, FieldError, SonicError, expect, find, nearest, require
from sonic_coffea.layouts import EVENT_ID

# coffea's progress bars go to standard output, which is for results. Threads have one standard
# output, so the runs that are under way redirect it together: it is back when the last one ends.
_bars: list[Any] = []
_lock = threading.Lock()


def run_files(
    processor: Any,
    datasets: Mapping[str, Sequence[str | Path]],
    *,
    client: Any,
    chunksize: int,
    progress: bool,
) -> Any:
    """Return a processor's result over datasets, whose files may hold any part of NanoAOD.

    An error of this package, and one of where workers run, is raised without coffea's around it.
    """
    from coffea.nanoevents import NanoAODSchema

    is_size = isinstance(chunksize, Real) and chunksize >= 1
    expect(is_size, "at least 1 event", chunksize, "chunksize")
    try:
        from coffea.processor import DaskExecutor, IterativeExecutor, Runner
    except ImportError:
        raise ConfigError(
            f"files are processed by coffea's Runner, which coffea {version('coffea')} lacks; "
            "install coffea 2025.7 or later"
        ) from None

    class Schema(NanoAODSchema):  # type: ignore[misc]
        warn_missing_crossrefs = False
        error_missing_event_ids = False  # a processor that needs them says so

    is_here = client is None
    if is_here:
        executor: Any = IterativeExecutor(status=progress)
    else:
        executor = DaskExecutor(client=client, status=progress, retries=1)
    runner = Runner(
        executor=executor,
        schema=Schema,
        chunksize=chunksize,
        # coffea keeps what it has read of a path's file, which may have been replaced since.
        metadata_cache={},
        # It would pickle the processor, which need not be sent.
        processor_compression=None if is_here else 1,
    )
    fileset = {
        name: {"treename": "Events", "files": [str(path) for path in paths]}
        for name, paths in datasets.items()
    }
    file = sys.stderr if progress else io.StringIO()
    with _lock:
        _bars.append(_bars[0] if _bars else contextlib.redirect_stdout(file))
    try:
        with _bars[0]:
            return runner(fileset, _held(processor, is_here=is_here))
    except _FinalError as final:
        raise final.args[0] from None
    except Exception as error:
        # coffea wraps what a processor raises in an Exception that names the chunk.
        cause = find(error) or _of_place(error, "this process has" if is_here else "workers have")
        if cause is None:
            raise
        raise cause from None
    finally:
        with _lock:
            _bars.pop()


def _held(processor: Any, *, is_here: bool) -> Any:
    """Return a processor of coffea's that calls another; before 2025.12, it takes no function."""
    from coffea.processor import ProcessorABC

    class Held(ProcessorABC):  # type: ignore[misc]
        def process(self, events: Any) -> Any:
            try:
                return processor.process(events)
            except SonicError as error:
                if is_here:  # through a client, only an `Exception` comes
                    raise _FinalError(error) from None
                raise

        __call__ = process  # older coffea unpickles what cannot be called

        def postprocess(self, accumulator: Any) -> Any:
            return accumulator

    return Held()


def located(files: Iterable[str | os.PathLike[str]]) -> dict[str, set[str]]:
    """Return the branches of each file by its absolute path; of URLs, which are not opened, none.

    Raises
    ------
    ConfigError
        If a file is not there, cannot be read whole or is named twice, or if there is none.
    FieldError
        If a file has no events.
    """
    branches: dict[str, set[str]] = {}
    for file in files:
        path = str(file).removeprefix("file://")
        is_url = "://" in path
        path = path if is_url else str(Path(path).expanduser().resolve())
        if not path.isascii():
            raise ConfigError(f"coffea reads only files whose path is ASCII, got {path}")
        if path in branches:
            raise ConfigError(f"expected each file once, got more than once: {path}")
        branches[path] = set() if is_url else _branches(Path(path))
    if not branches:
        raise ConfigError("expected files, got none")
    return branches


def _branches(path: Path) -> set[str]:
    """Return the branches of a file's events, refusing a file that cannot be read."""
    with needed("score", "reading ROOT files"):
        import uproot

    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.root")]
        remedy = nearest(path.name, beside) if beside else "its folder has no .root file"
        raise ConfigError(f"no file {str(path)!r}; {remedy}")
    try:
        with uproot.open(path) as file:
            trees = file.keys(recursive=False, cycle=False)
            branches = set(file["Events"].keys()) if "Events" in trees else set()
            end, size = file.file.fEND, path.stat().st_size
    except Exception as error:  # noqa: BLE001 - uproot fails in many ways on what is not ROOT
        problem = f"cannot read {path.name} as a ROOT file: {str(error).strip().splitlines()[0]}"
        raise ConfigError(problem) from None
    if size < end:
        raise ConfigError(f"{path.name} is truncated: it has {size:,} of {end:,} bytes")
    require(["Events"], trees, f"{path.name} has no tree", FieldError)
    if missing := [name for name in EVENT_ID if name not in branches]:
        raise FieldError(f"{path.name} has no {', '.join(missing)}, which number the events")
    return branches


def _of_place(error: BaseException | None, place_has: str) -> ConfigError | None:
    """Return what is wrong with the place where chunks are read, if an exception says that."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            package = str(error.name).replace("_", "-")
            return ConfigError(f"{place_has} no module {error.name!r}: pip install {package}")
        if isinstance(error, OSError):
            reason = " ".join(str(error).split()).partition(" Files may be")[0]
            return ConfigError(f"a file cannot be read where it is scored: {reason}")
        error = error.__cause__
    return None


class _FinalError(BaseException):
    """Carries an error after which the runner must not repeat the chunk.

    coffea's runner repeats a chunk after any `Exception`, because reading a remote file may fail by
    chance. The pool has already retried the requests, and a wrong name stays wrong.
    """
