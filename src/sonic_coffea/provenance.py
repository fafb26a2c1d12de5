"""What made scores: on the arrays, and in the files that they are written to."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import awkward as ak

from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

__all__ = ["attributes", "of_scores", "read", "to_parquet", "to_root"]

KEY = "sonic"
_PACKAGES = ("sonic-coffea", "coffea", "awkward", "numpy", "tritonclient")


def attributes(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of scores that say what made them.

    Parameters
    ----------
    made : mapping
        Model, version and so on.

    Returns
    -------
    dict
        It, by two keys: ``sonic``, and one that nothing else has.
    """
    # Of arrays that are put together, awkward keeps all keys, but of equal ones the first value.
    text = json.dumps(made, sort_keys=True)
    return {KEY: made, f"{KEY}:{hashlib.sha256(text.encode()).hexdigest()[:16]}": made}


def of_scores(*scores: ak.Array | Mapping[str, Any]) -> dict[str, Any]:
    """Return what made some scores, for a file or a log.

    Parameters
    ----------
    *scores : awkward array or mapping
        As `Model` returned them, or what was made of them: by slices, arithmetic, `ak.zip`,
        `ak.concatenate`; or what `read` has found in other files.

    Returns
    -------
    dict
        ``models``: for each, model, version, its digest, servers and hash of the
        declaration; ``packages``: their versions.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If an array does not say what made it.
    """
    made: list[dict[str, Any]] = []
    for number, one in enumerate(scores):
        models = _made(one) if isinstance(one, ak.Array) else one["models"]
        if isinstance(one, ak.Array) and not models:
            raise ConfigError(
                f"array {number} does not say what made it; pass the scores as a model returned "
                "them, as fields that are set in another array, and NumPy arrays, forget it"
            )
        for model in models:
            if model not in made:
                made.append(model)
    return {"models": made, "packages": _versions()}


def to_parquet(
    array: ak.Array, path: str | os.PathLike[str], *scores: ak.Array | Mapping[str, Any]
) -> None:
    """Write an array with the provenance of scores in it to a Parquet file, whole or not at all.

    Parameters
    ----------
    array : awkward array
        What is written.
    path : path-like
        The file.
    *scores : awkward array or mapping
        Scores that are in it, as for `of_scores`.
    """
    import pyarrow.parquet as pq

    table = ak.to_arrow_table(array, extensionarray=False)
    about = json.dumps(of_scores(*scores)).encode()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: about})
    target = Path(path)
    # Others may write the same file at the same time. tempfile would hide it from the group.
    half = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        pq.write_table(table, half)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


def to_root(file: Any, *scores: ak.Array | Mapping[str, Any]) -> None:
    """Write the provenance of scores into a ROOT file that uproot has opened for writing.

    It is a string named ``sonic``, in JSON.
    """
    file[KEY] = json.dumps(of_scores(*scores))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the provenance that a Parquet or ROOT file holds.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If it holds none.
    """
    text: Any = None
    if Path(path).suffix == ".root":
        import uproot

        with uproot.open(path) as file:
            text = str(file[KEY]) if KEY in file else None
    else:
        import pyarrow.parquet as pq

        text = (pq.read_schema(path).metadata or {}).get(KEY.encode())
    if text is None:
        raise ConfigError(f"{path} does not say what made its scores")
    about: dict[str, Any] = json.loads(text)
    return about


def _made(scores: ak.Array) -> list[dict[str, Any]]:
    """Return all that an array says of what made it."""
    return [dict(made) for key, made in scores.attrs.items() if key.split(":")[0] == KEY]


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **dict(_installed(_PACKAGES))}


def _installed(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
