"""What a version of a model is made of, written beside it, and whether it still is."""

from __future__ import annotations

import datetime as dt
import getpass
import hashlib
import json
from typing import TYPE_CHECKING, Any

from sonic_coffea._version import __version__
from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from sonic_coffea.server.repository._sources import ModelSource

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


def describe(
    model: str, version: int, source: ModelSource, metadata: Mapping[str, Any], *, user: bool
) -> dict[str, Any]:
    """Return what is known of a version before its files are there."""
    manifest: dict[str, Any] = {
        "model": model,
        "version": version,
        "kind": source.kind,
        "file": source.file,
        "inputs": [t.to_dict() for t in source.interface.inputs],
        "outputs": [t.to_dict() for t in source.interface.outputs],
        **source.manifest,
        "built": dt.datetime.now(dt.timezone.utc).isoformat(),
        "package": f"sonic-coffea {__version__}",
        "metadata": dict(metadata),
    }
    if source.file:
        # A full path often has its owner's name in it.
        file = source.files[source.file]
        manifest["source"] = str(file.absolute()) if user else file.name
    return {**manifest, "user": _user()} if user else manifest


def write(manifest: Mapping[str, Any], folder: Path, shared: Iterable[Path]) -> None:
    """Write the manifest of a version: the checksums of its files and of those shared by all."""
    files = {name: checksum(folder / name) for name in _names(folder)}
    complete = {**manifest, "files": files, "shared": {p.name: checksum(p) for p in shared}}
    (folder / FILE).write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")


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
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the manifest {path} cannot be read: {error}") from None
    lacking = [key for key in _NEEDED if not isinstance(manifest, dict) or key not in manifest]
    if lacking:
        raise ConfigError(f"expected a manifest in {path}, got one without {', '.join(lacking)}")
    return dict(manifest)


def changes(folder: Path, manifest: Mapping[str, Any], *, shared: bool) -> list[str]:
    """Say what is no longer as it was built; with `shared`, also of what all versions share."""
    differences = [f"{folder / n} is new" for n in _names(folder) if n not in manifest["files"]]
    expected = {folder / name: digest for name, digest in manifest["files"].items()}
    if shared:
        expected |= {folder.parent / n: digest for n, digest in manifest["shared"].items()}
    for path, digest in expected.items():
        if not path.is_file():
            differences.append(f"{path} is gone")
        elif checksum(path) != digest:
            differences.append(f"{path} was changed")
    return sorted(differences)


def metadata_or_raise(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return free metadata, if JSON can hold it."""
    try:
        json.dumps(dict(value or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected metadata that JSON can hold: {error}") from None
    return value or {}


def _names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != FILE and _IGNORED not in path.parts
    )


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None
