"""`score_files` and `export_files`: from files of events to one file."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path
from typing import Any

from sonic_coffea import provenance
from sonic_coffea._extras import needed
from sonic_coffea._files import FileState, others_write, replacing, state_of
from sonic_coffea.errors import ConfigError, expect
from sonic_coffea.layouts import EVENT_ID
from sonic_coffea.model import Choice, Model
from sonic_coffea.pool import declarations_of
from sonic_coffea.processor import located, run_files
from sonic_coffea.reporting import STATISTICS_KEY, Report, Statistics, report
from sonic_coffea.scoring._processor import INDEX, Exporting, Scoring

logger = logging.getLogger(__name__)

_ANEW = "to score all of it anew, use --restart (resume=False)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredFiles:
    """The result of `score_files`.

    Attributes
    ----------
    path : Path
        The file with the scores.
    events, rows, scored : int
        Events that were read, their objects, and those that have scores; a ROOT file has only
        these.
    resumed : int
        Events that an earlier run had scored.
    report : Report
        Report on the requests of this run.
    """

    path: Path
    events: int
    rows: int
    scored: int
    resumed: int
    report: Report

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "path": str(self.path), "report": self.report.to_dict()}


def score_files(  # noqa: PLR0913  independent options, each with a default
    model: Model | Choice,
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    collection: str | None = None,
    features: Callable[[Any], Any] | None = None,
    keep: Sequence[str] = (),
    client: Any = None,
    chunksize: int = 20_000,
    on_error: str = "raise",
    resume: bool = True,
    progress: bool = False,
) -> ScoredFiles:
    """Score the objects of NanoAOD files, and write a row for each into one file.

    A row has ``run``, ``luminosityBlock``, ``event``, the ``index`` of the object in its
    collection, and a column for each score. The first four join the scores to other files. Rows are
    in the order of the files. Scored chunks are kept in a folder beside the output until the output
    is complete, so an interrupted run can resume.

    Parameters
    ----------
    model : Model, Folds or Choice
        The declaration. Folds and choices look their field up in the objects, then in the events.
    files : path or sequence of path
        NanoAOD files; URLs that uproot reads, too.
    output : path
        A ``.parquet`` or a ``.root`` file. A ROOT file has a tree ``Scores``, without rows for
        objects that have no score: ROOT knows no None, and a column that is None for other objects
        is an error. It has plain numbers only. A file that is there is replaced if this package has
        written it, and refused otherwise.
    collection : str, optional
        The collection to score, such as ``"FatJet"``; by default, the events. Of jets, the model
        may read the constituents: ``"constituents.pt"``.
    features : callable, optional
        A function of the events that returns the model's inputs, or a `Request` of them: one for
        each object of the collection, in their order.
    keep : sequence of str
        Fields of the objects that are written beside the scores.
    client : distributed.Client, optional
        A cluster that is connected (`sonic_coffea.connect`) and sees the folder of the output; by
        default, this process does the work.
    chunksize : int
        Events of a chunk.
    on_error : {"raise", "mask"}
        Whether rows that no server scores raise an error, or become None.
    resume : bool
        Whether to use the chunks of an interrupted run with the same declaration, function (with
        the values that it uses), and options.
    progress : bool
        Whether to show progress on standard error.

    Returns
    -------
    ScoredFiles

    Raises
    ------
    ConfigError
        If no server is named, a package is missing, a file cannot be read or written, a file
        changes while it is read, a column is no plain number in a ROOT file, or the server has had
        another version of the model since a run was interrupted.
    FieldError
        If a collection or a field is not there.
    InputError
        If `features` does not return a row for each object.
    SonicError
        If rows could not be scored; the next run resumes with the chunks that were scored.
    """
    with needed("score", "writing files of scores"):
        import pyarrow.parquet  # noqa: F401
        import uproot  # noqa: F401
    target = Path(output).expanduser().absolute()
    is_format = target.suffix in (".parquet", ".root")
    expect(is_format, "an output that ends in .parquet or .root", target.name)
    expect(isinstance(model, (Model, Choice)), "a Model, Folds or Choice", model)
    for each in declarations_of(model):
        each.pool_of(None)  # raises if no server is named
    parts = target.with_name(f".{target.name}.parts")
    if not resume:
        shutil.rmtree(parts, ignore_errors=True)
    # What stayed, such as a link, would be taken for chunks of this run.
    is_removable = not parts.is_symlink() and (resume or not parts.exists())
    expect(is_removable, "no chunks, or a folder of them that can be removed", str(parts))
    flat = target.suffix == ".root"
    scoring = Scoring(model, parts, collection, features, keep, on_error=on_error, flat=flat)
    paths = [files] if isinstance(files, (str, os.PathLike)) else files
    how = {"client": client, "chunksize": chunksize, "progress": progress}
    try:
        done = write_files(scoring, {"files": paths}, target, **how)
    except BaseException:
        if kept := len(list(parts.glob("*.parquet"))):
            logger.warning("scored chunks are kept (%d); the same call scores the rest", kept)
        with contextlib.suppress(OSError):  # where there is something to resume
            parts.rmdir()
        raise
    shutil.rmtree(parts, ignore_errors=True)
    return done


def write_files(
    scoring: Scoring,
    datasets: Mapping[str, Iterable[str | os.PathLike[str]]],
    target: Path,
    **how: Any,
) -> ScoredFiles:
    """Write the rows of datasets into one file, in the order of their files.

    The chunks' folder is left to the caller; `how` are the options of `run_files`.
    """
    is_function = scoring.features is None or callable(scoring.features)
    expect(is_function, "a function", scoring.features, "features")
    each = {name: list(located(files)) for name, files in datasets.items()}
    paths = [path for files in each.values() for path in files]
    if str(target.resolve()) in paths:
        raise ConfigError(f"the output {target.name} is a file that is read; name another")
    provenance.refuse_others(target)
    try:
        scoring.parts.mkdir(mode=0o755, parents=True)
    except FileExistsError:
        if others_write(scoring.parts):
            raise ConfigError(
                f"the chunks in {scoring.parts} may be of other users, who own the folder or can "
                "write it; use --restart (resume=False), or name another output"
            ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
    began = time.monotonic()
    scoring.files = {path: _written(path) for path in paths}
    with _unchanged(scoring.files, scoring.parts):
        out = run_files(scoring, each, **how)
    wall_s = time.monotonic() - began
    provenance.refuse_others(target)  # which may have come meanwhile
    order = {path: place for place, path in enumerate(paths)}
    out["parts"].sort(key=lambda part: (order[part["file"]], part["start"]))
    chunks = [Path(part["path"]) for part in out["parts"]]
    try:
        made_by = provenance.of_scores(*map(provenance.read, chunks))
    except ConfigError as error:  # as after a machine has lost its power
        raise error.because(_ANEW) from None
    if out["resumed"] and (named := _several_versions(scoring.model, made_by["models"])):
        raise ConfigError(f"an interrupted run was scored by {named}; {_ANEW}")
    rows, scored = _join(chunks, target, made_by, (*EVENT_ID, INDEX, *scoring.keep))
    return ScoredFiles(
        path=target,
        events=out["events"],
        rows=rows,
        scored=scored,
        resumed=out["resumed"],
        report=report(out if STATISTICS_KEY in out else Statistics(), wall_s=wall_s),
    )


@contextlib.contextmanager
def _unchanged(before: Mapping[str, FileState], parts: Path) -> Iterator[None]:
    """Refuse files that change meanwhile, and remove their chunks.

    The chunks are named after the file before, which may come back, and may be of the other one.
    """
    changed: list[str] = []
    try:
        try:
            yield
        finally:
            changed += [path for path in before if _written(path) not in (None, before[path])]
            if changed:
                shutil.rmtree(parts, ignore_errors=True)
    except Exception:
        # Files of which a part was replaced cannot be read, in many ways.
        if not changed:
            raise
    if changed:
        raise ConfigError(
            "files changed while they were read, so that events may be missing or there twice; run "
            f"again when nothing writes them: {', '.join(changed)}"
        )


def _written(path: str) -> FileState:
    """Return when a file was written, and its size; None for URLs.

    Some file systems, such as sshfs, give a file another inode once they have forgotten it.
    """
    state = state_of(Path(path))
    return state and (state[0], state[2])


def _join(
    parts: Sequence[Path], target: Path, made_by: dict[str, Any], beside: Sequence[str]
) -> tuple[int, int]:
    """Write the chunks' rows into one file, whole or not at all; return rows, and those scored.

    A row is scored if any column has a value, but for those `beside` the scores.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = scored = 0

    def tables() -> Iterator[Any]:
        nonlocal rows, scored
        schema = _schema(parts)
        for part in parts:
            table = _table(part, schema)
            scores = [table[name] for name in schema.names if name not in beside]
            is_scored = reduce(pc.or_, map(pc.is_valid, scores), pa.scalar(value=False))
            scored += pc.sum(is_scored, min_count=0).as_py()
            rows += len(table)
            yield table

    write = _write_root if target.suffix == ".root" else provenance.write_tables
    try:
        write(tables(), target, made_by)
    except pa.ArrowException as error:
        raise ConfigError(
            f"the columns of the files do not fit into one file: {error}; score each into its own"
        ) from None
    return rows, scored


def _write_root(tables: Iterable[Any], path: Path, made_by: Mapping[str, Any]) -> None:
    """Write tables to a ROOT file, which has no None, and so no rows that have one."""
    import uproot

    with replacing(path) as half, uproot.recreate(half) as file:
        tree = None
        for table in tables:
            columns = {field.name: field.type.to_pandas_dtype() for field in table.schema}
            tree = file.mktree("Scores", columns) if tree is None else tree
            whole = table.drop_null()
            tree.extend({name: whole[name].to_numpy() for name in columns})
        provenance.to_root(file, made_by)


def _several_versions(model: Model | Choice, records: Sequence[dict[str, Any]]) -> str:
    """Return the versions, or files, of the first model that has several; empty if none has.

    Versions that the declaration pins, as those of folds may be, are models of their own.
    """
    pinned = {(each.name, each.version) for each in declarations_of(model)}
    served: defaultdict[tuple[str, str | None], set[tuple[str, str | None]]] = defaultdict(set)
    for record in records:
        name, version = record["model"], record.get("version")
        if version is not None:  # without one, there was nothing to score, or it is an export
            own = version if (name, version) in pinned else None
            served[name, own].add((version, record["digest"]))
    for (name, _), versions in served.items():
        numbers, digests = map(set, zip(*versions, strict=True))
        if len(numbers) > 1 or len(digests - {None}) > 1:
            each = (f"version {n}" + (f" ({d[:12]})" if d else "") for n, d in versions)
            return f"{' and '.join(sorted(each))} of model {name}"
    return ""


def _schema(parts: Sequence[Path]) -> Any:
    """Return the columns of all chunks; in some chunks, a column may have None."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = [pq.read_schema(part) for part in parts]
    columns = []
    for name in schemas[0].names:
        fields = [schema.field(name) for schema in schemas]
        # If all scores of a chunk are None, it may not be known there that they are lists.
        lists = [field for field in fields if field.type.num_fields]
        known = [pa.schema([field]) for field in lists or fields]
        column = pa.unify_schemas(known, promote_options="permissive").field(0)
        if 0 < len(lists) < len(fields):
            column = pa.field(name, _of_none(column.type))
        columns.append(column)
    return pa.schema(columns)


def _of_none(kind: Any) -> Any:
    """Return the type of lists that may be None: Arrow fills one of a fixed length with None."""
    import pyarrow as pa

    is_fixed = pa.types.is_fixed_size_list(kind)
    return pa.list_(_of_none(kind.value_type), kind.list_size) if is_fixed else kind


def _table(part: Path, schema: Any) -> Any:
    """Return the rows of a chunk, with the columns of all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(part, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"cannot read {part}: {error} ({_ANEW})") from None
    without = [name for name in schema.names if table[name].null_count == len(table)]
    known = [schema.empty_table(), table.drop_columns(without)]
    return pa.concat_tables(known, promote_options="permissive")


def export_files(  # noqa: PLR0913  independent options, each with a default
    model: Model,
    files: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    collection: str | None = None,
    features: Callable[[Any], Any] | None = None,
    labels: Mapping[str, str] | None = None,
    weights: str | None = None,
    client: Any = None,
    chunksize: int = 20_000,
    progress: bool = False,
) -> int:
    """Write the tensors of NanoAOD files to one Parquet file, as `Model.export` does; return rows.

    Parameters
    ----------
    model : Model
        The declaration.
    files, collection, features, client, chunksize, progress
        As for `score_files`.
    output : path
        The ``.parquet`` file.
    labels, weights
        As for `Model.export`: fields or expressions of the objects, or of the events.

    Raises
    ------
    ConfigError
        If a file cannot be read or written, or changes while it is read, or a package is missing.
    FieldError, InputError
        If the arrays do not fit the layouts.
    """
    target = Path(output).expanduser().absolute()
    expect(isinstance(model, Model), "a Model", model)
    expect(target.suffix == ".parquet", "an output that ends in .parquet", target.name)
    # Not the folder of an interrupted run of scores with this output.
    parts = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    chosen = labels or {}
    exporting = Exporting(model, parts, collection, features, labels=chosen, weights=weights)
    how = {"client": client, "chunksize": chunksize, "progress": progress}
    try:
        return write_files(exporting, {"files": files}, target, **how).rows
    finally:
        shutil.rmtree(parts, ignore_errors=True)
