"""Provenance of scores, in arrays and in files: the models and servers that made them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import awkward as ak
import xxhash
from awkward.contents import Content

from sonic_coffea._extras import needed
from sonic_coffea._files import replacing
from sonic_coffea.errors import ConfigError

__all__ = ["attributes", "of_scores", "read", "to_parquet", "to_root", "versions"]

KEY = "sonic"
_PACKAGES = ("sonic-coffea", "coffea", "awkward", "numpy", "tritonclient")


def attributes(record: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the attributes of scores: their provenance as ``sonic``, and each model's by its hash.

    When arrays are combined, awkward keeps all keys, and of equal keys the first value.
    """
    each = {f"{KEY}:{xxhash.xxh3_64_hexdigest(repr(model).encode())}": model for model in models}
    return {KEY: record, **each}


def join_digests(digests: Iterable[str | None]) -> str | None:
    """Return digests side by side, ``"unknown"`` for None; None if all are."""
    each = dict.fromkeys(digests)
    if not any(each):
        return None
    return ", ".join(digest or "unknown" for digest in each)


def of_scores(*scores: ak.Array | Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of some scores, for a file or a log.

    Parameters
    ----------
    *scores : ak.Array or mapping
        Scores that a `Model` returned, or arrays made from them by slices, arithmetic, `ak.zip` or
        `ak.concatenate`; or what `read` returned for other files.

    Returns
    -------
    dict
        ``models``: for each, its name, version, digest, servers and hash of the declaration;
        ``packages``: their versions. A digest is None if it is not known: the servers name none,
        or it may have changed while rows were scored.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If an array carries no provenance.
    """
    models: list[dict[str, Any]] = []
    for number, source in enumerate(scores):
        records = source.get("models") if isinstance(source, Mapping) else None
        if isinstance(source, ak.Array):
            each = [dict(r) for key, r in source.attrs.items() if key.startswith(f"{KEY}:")]
            records = sorted(each, key=lambda record: record != source.attrs.get(KEY)) or None
        if not isinstance(records, list):
            raise ConfigError(
                f"array {number} does not say what made it; pass the scores as a model "
                "returned them: fields that are set in another array and NumPy arrays lose it"
            )
        for record in records:
            if record not in models:
                models.append(record)
    return {"models": models, "packages": versions()}


def to_parquet(
    array: ak.Array, path: str | os.PathLike[str], *scores: ak.Array | Mapping[str, Any]
) -> None:
    """Write an array to a Parquet file, with the provenance of scores; after an error, no file.

    Parameters
    ----------
    array : awkward array
        The array to write.
    path : path-like
        The file.
    *scores : ak.Array or mapping
        Scores in the array, as in `of_scores`; by default the array itself.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If the file cannot be written, is there and of another program, or an array carries no
        provenance.
    """
    write_parquet([array], path, *(scores or [array]))


def write_parquet(
    arrays: Iterable[ak.Array], path: str | os.PathLike[str], *scores: ak.Array | Mapping[str, Any]
) -> None:
    """Write arrays of one type, one after another, as `to_parquet` does; of each, a row group."""
    refuse_others(Path(path).expanduser())
    tables = (ak.to_arrow_table(ak.transform(_backed, a), extensionarray=False) for a in arrays)
    write_tables(tables, Path(path), of_scores(*scores))


def write_tables(tables: Iterable[Any], path: Path, record: Mapping[str, Any]) -> None:
    """Write Arrow tables to a Parquet file, with a provenance that is known."""
    with needed("score", "writing Parquet files"):
        import pyarrow.parquet as pq

    with replacing(path) as half, contextlib.ExitStack() as stack:
        writer = None
        for table in tables:
            if writer is None:
                known = {**(table.schema.metadata or {}), KEY: json.dumps(record)}
                schema = table.schema.with_metadata(known)
                opened = pq.ParquetWriter(half, schema, write_page_checksum=True)
                writer = stack.enter_context(opened)
            writer.write_table(table)


def _backed(content: Content, **_: Any) -> Content | None:
    """Give None a content of one element where it has none, which awkward cannot write."""
    is_empty = content.is_option and content.is_indexed and not len(content.content)
    if not is_empty or content.content.is_unknown:
        return None
    return content.copy(content=content.content.form.length_one_array(highlevel=False))


def to_root(
    file: Any, scores: ak.Array | Mapping[str, Any], *more: ak.Array | Mapping[str, Any]
) -> None:
    """Write the provenance of scores into a ROOT file that uproot has opened for writing.

    It is a string named ``sonic``, in JSON.
    """
    file[KEY] = json.dumps(of_scores(scores, *more))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the provenance that a Parquet or ROOT file holds.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If the file cannot be read, or holds no provenance.
    """
    try:
        with needed("score", f"reading {path}"):
            if Path(path).suffix == ".root":
                import uproot

                with uproot.open(path) as file:
                    text = file.get(KEY)
            else:
                import pyarrow.parquet as pq

                text = (pq.read_schema(path).metadata or {}).get(KEY.encode())
        record = None if text is None else dict(json.loads(text))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  uproot fails in many ways on broken files
        problem = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(f"cannot read {path}: {problem}") from None
    if record is None:
        raise ConfigError(f"{path} does not say what made its scores")
    return record


def is_own(path: Path) -> bool:
    """Whether this package has written a whole file."""
    with contextlib.suppress(ConfigError):
        read(path)
        if path.suffix != ".root":
            return True
        import uproot

        # Others write the provenance into files of theirs, too.
        with uproot.open(path) as file:
            return {*file.keys(cycle=False)} <= {"Scores", KEY}
    return False


def refuse_others(path: Path) -> None:
    """Raise a `ConfigError` where a file, or a folder, is that this package has not written."""
    if (path.is_file() or path.is_dir()) and not is_own(path):
        raise ConfigError(f"{path} exists, and was not written by this package; name another")


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of packages, by default those that scores depend on."""
    installed = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
