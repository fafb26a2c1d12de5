"""Scores on disk, by hashes of rows and the digest of the model's version."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import stat
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from sonic_coffea._files import others_write
from sonic_coffea.errors import ConfigError
from sonic_coffea.transport import STRINGS

logger = logging.getLogger(__name__)

Kept = tuple[Sequence[bytes], Mapping[str, NDArray[Any]]]

# They mark a file as ours, and its format. SQLite writes the first at a fixed offset.
_APPLICATION, _FORM = 0x50434143, 3
_MAGIC, _MARKED = b"SQLite format 3\0", slice(68, 72)
_TABLE = "CREATE TABLE scores (key BLOB PRIMARY KEY, scores BLOB NOT NULL)"

# By process, as a forked child may begin with a lock that is never released. Whoever closes a file
# that SQLite has open in another thread, as `_check_ours` does, takes its locks away, and other
# processes break the file.
_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)


class ScoreCache:
    """Scores of rows in an SQLite file, which processes of one machine may share.

    If the file is broken, it is deleted; if it is busy, it is not used. Both log a warning, and the
    rows are sent. A file that this class has not written is never touched, and one that others
    could have written is not read.

    Parameters
    ----------
    path : path-like
        The file; created if missing, readable and writable by its user only.
    max_bytes : int
        Approximate size limit; the oldest scores are removed first.

    Raises
    ------
    ConfigError
        On first use, if the path is not a cache of this class, or the file belongs to another user
        or may be written by others.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int) -> None:
        self.path = Path(path).expanduser()
        self.max_bytes = max_bytes

    def get(self, keys: Sequence[bytes]) -> list[Kept]:
        """Return the scores of cache hits: keys, with outputs that have one row for each key.

        If the file turns out to be broken, there are none: it is deleted, so that its hits would
        be missing in the next file.
        """
        with self._failures_logged(), self._open() as database:
            alike: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
            for key, scores in _selected(database, keys):
                # A checksum of 8 bytes, types and shapes as one line, and the numbers.
                if type(scores) is not bytes or _checksum(key, scores[8:]) != scores[:8]:
                    raise sqlite3.DatabaseError("it has damaged scores")
                form, _, numbers = scores[8:].partition(b"\n")
                alike[form].append((key, numbers))
            return [_decoded(form, rows) for form, rows in alike.items()]
        return []

    def put(self, answers: Iterable[Kept]) -> None:
        """Keep scores: keys, with outputs that have one row for each key."""
        rows = (row for each in answers for row in _encoded(*each))
        with self._failures_logged(), self._open() as database:
            database.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)
            self._shrink(database)

    def _files(self) -> list[Path]:
        """Return the file, and those beside it, where SQLite keeps what was written last."""
        suffixes = ("", "-wal", "-shm", "-journal")
        return [self.path.with_name(self.path.name + suffix) for suffix in suffixes]

    @contextlib.contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Go on without the file where it cannot be used; delete it if it is broken."""
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            logger.warning("the cache %s is not used: %s", self.path, error)
        except (sqlite3.DatabaseError, ValueError) as error:  # one of its own messages, at times
            logger.warning("the cache %s is broken (%s), and is deleted", self.path, error)
            for file in self._files():
                with contextlib.suppress(OSError):
                    file.unlink()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Yield the database in a transaction; other threads wait meanwhile."""
        with _locks[os.getpid()]:
            if not self.path.exists():
                self._make()
            self._check_ours()
            uri = f"{self.path.absolute().as_uri()}?mode=rw"  # makes no file
            with contextlib.closing(sqlite3.connect(uri, timeout=30.0, uri=True)) as database:
                (form,) = database.execute("PRAGMA user_version").fetchone()
                query = "SELECT count(*) FROM sqlite_master WHERE sql = ?"
                (tables,) = database.execute(query, (_TABLE,)).fetchone()
                if form != _FORM or not tables:
                    raise sqlite3.DatabaseError("its header or its table is damaged")
                with database:
                    yield database

    def _check_ours(self) -> None:
        """Refuse a file that this class has not written, or that others could have written."""
        status = self.path.stat()
        header = b""
        if stat.S_ISREG(status.st_mode):  # reading a device or a pipe may change it, or block
            with self.path.open("rb") as opened:
                header = opened.read(_MARKED.stop)
        if header[_MARKED] != _APPLICATION.to_bytes(4, "big") or not header.startswith(_MAGIC):
            raise ConfigError(
                f"expected a file of scores, or none, at {self.path}, got something else, which is "
                "left as it is; name another path as cache"
            )
        for file in self._files():
            if others_write(file):
                raise ConfigError(
                    f"expected a cache that only you can write, got {file}, which others own or "
                    "can write; name another path as cache, or make the file yours and chmod 600 "
                    "it if you trust it"
                )

    def _make(self) -> None:
        """Make the file, whole, unless another process is first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{self.path.name}-"
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=prefix) as folder:
            part = Path(folder, "scores")
            part.touch(0o600)  # private from its first moment on
            with contextlib.closing(sqlite3.connect(part)) as database:
                database.executescript(
                    "PRAGMA auto_vacuum = FULL;"
                    "PRAGMA journal_mode = WAL;"
                    f"{_TABLE};"
                    f"PRAGMA application_id = {_APPLICATION};"
                    f"PRAGMA user_version = {_FORM};"
                )
            with contextlib.suppress(FileExistsError):
                os.link(part, self.path)

    def _shrink(self, database: sqlite3.Connection) -> None:
        """Remove the oldest scores from a full file, a fifth more than has to go."""
        query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        (used,) = database.execute(query).fetchone()
        if used > self.max_bytes:
            (count,) = database.execute("SELECT count(*) FROM scores").fetchone()
            oldest = count - int(count * self.max_bytes / used * 0.8)
            query = "SELECT rowid FROM scores ORDER BY rowid LIMIT ?"
            database.execute(f"DELETE FROM scores WHERE rowid IN ({query})", (oldest,))  # noqa: S608


def _selected(database: sqlite3.Connection, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Any]]:
    """Yield the keys that the file has, each with its scores."""
    for start in range(0, len(keys), 500):  # SQLite takes 999 parameters, or more
        some = keys[start : start + 500]
        marks = ", ".join("?" * len(some))
        yield from database.execute(f"SELECT key, scores FROM scores WHERE key IN ({marks})", some)  # noqa: S608


def _checksum(key: bytes, body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(key + body)


def _encoded(
    keys: Sequence[bytes], outputs: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield each row's key and scores: a checksum, types and shapes, and the bytes."""
    columns = {name: _of_one_length(array) for name, array in outputs.items()}
    form = [(name, c.dtype.str, c.shape[1:]) for name, c in columns.items()]
    rows = np.empty(len(keys), form)
    for name, column in columns.items():
        rows[name] = column
    head = json.dumps(form).encode() + b"\n"
    for key, row in zip(keys, rows, strict=True):
        body = head + row.tobytes()
        yield key, _checksum(key, body) + body


def _decoded(form: bytes, rows: Sequence[tuple[bytes, bytes]]) -> Kept:
    """Return the keys and scores of rows, whose types and shapes are the same."""
    columns = [(name, kind, tuple(shape)) for name, kind, shape in json.loads(form)]
    scores = np.frombuffer(b"".join(numbers for _, numbers in rows), columns)
    return [key for key, _ in rows], {name: _as_sent(scores[name]) for name, _, _ in columns}


def _of_one_length(array: NDArray[Any]) -> NDArray[Any]:
    """Return strings as an array of one length; NumPy would cut zeros off at the end of each."""
    if array.dtype != STRINGS:
        return array
    return np.asarray([text + b"." for text in array.reshape(-1)]).reshape(array.shape)


def _as_sent(column: NDArray[Any]) -> NDArray[Any]:
    if column.dtype.kind != "S":
        return column
    strings = np.asarray([text[:-1] for text in column.reshape(-1).tolist()], STRINGS)
    return strings.reshape(column.shape)
