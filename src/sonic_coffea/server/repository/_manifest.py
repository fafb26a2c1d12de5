"""What a version of a model is made of, written beside it, and whether it still is."""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import hashlib
import json
from typing import TYPE_CHECKING, Any

from sonic_coffea._version import __version__
from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sonic_coffea.server.repository._sources import ModelSource

__all__ = ["FILE", "changes", "checksum", "checksums", "describe", "read", "version_numbers"]

FILE = "sonic-manifest.json"
# Python keeps what it has compiled there.
_IGNORED = "__pycache__"
_NEEDED = ("kind", "inputs", "outputs", "built", "files", "shared")


def checksum(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of the files of a version, by their names in its folder."""
    return {
        path.relative_to(folder).as_posix(): checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE and _IGNORED not in path.parts
    }


def describe(
    model: str, version: int, source: ModelSource, metadata: Mapping[str, Any], *, user: bool
) -> dict[str, Any]:
    """Return what is known of a version before its files are there."""
    manifest: dict[str, Any] = {
        "model": model,
        "version": version,
        "kind": source.kind,
        "file": source.file,
        "inputs": source.inputs,
        "outputs": source.outputs,
        **source.manifest,
        "built": dt.datetime.now(dt.timezone.utc).isoformat(),
        "package": f"sonic-coffea {__version__}",
        "metadata": dict(metadata),
    }
    if source.file:
        # A full path often has its owner's name in it.
        file = source.files[source.file]
        manifest["source"] = str(file.absolute()) if user else file.name
    if user:
        with contextlib.suppress(KeyError, OSError):
            manifest["user"] = getpass.getuser()
    return manifest


def read(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a version, None where there is none.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is one that cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        manifest = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"the manifest {path} cannot be read: {error}") from None
    lacking = [key for key in _NEEDED if key not in manifest]
    if lacking:
        raise ConfigError(f"expected a manifest in {path}, got one without {', '.join(lacking)}")
    return manifest


def changes(folder: Path, manifest: Mapping[str, Any], *, shared: bool) -> list[str]:
    """Say what is no longer as it was built; with `shared`, also of what all versions share."""
    present = {folder / name: digest for name, digest in checksums(folder).items()}
    expected = {folder / name: digest for name, digest in manifest["files"].items()}
    if shared:
        both = {folder.parent / name: digest for name, digest in manifest["shared"].items()}
        present |= {path: checksum(path) for path in both if path.is_file()}
        expected |= both
    new = [f"{path} is new" for path in present.keys() - expected.keys()]
    gone = [f"{path} is gone" for path in expected.keys() - present.keys()]
    both_sides = present.keys() & expected.keys()
    changed = [f"{path} was changed" for path in both_sides if present[path] != expected[path]]
    return sorted([*new, *gone, *changed])


def version_numbers(folder: Path) -> list[int]:
    """Return the versions that a model's folder has."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(p.name) for p in paths if p.is_dir() and p.name.isdigit())
