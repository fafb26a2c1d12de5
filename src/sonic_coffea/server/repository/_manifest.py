"""The manifest of a version: checksums and origin of its files, written beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import getpass
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea._version import __version__
from sonic_coffea.errors import ConfigError

if TYPE_CHECKING:
    from sonic_coffea.server.repository._sources import ModelSource

FILE = "sonic-manifest.json"
# The folder of Python's compiled modules.
_IGNORED = "__pycache__"
_NEEDED = ("kind", "inputs", "outputs", "built", "files", "shared")


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def describe(model: str, version: int, source: ModelSource, *, record_user: bool) -> dict[str, Any]:
    """Return what a version is, and where it comes from."""
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
    }
    if source.file:
        # A full path often contains the name of its owner.
        file = source.files[source.file]
        manifest["source"] = str(file.absolute()) if record_user else file.name
    if record_user:
        with contextlib.suppress(KeyError, OSError):
            manifest["user"] = getpass.getuser()
    return manifest


def read(folder: Path) -> dict[str, Any] | None:
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
    """Say which files have changed since the build; with `shared`, also those of all versions."""
    expected = {folder / name: digest for name, digest in manifest["files"].items()}
    if shared:
        expected |= {folder.parent / name: digest for name, digest in manifest["shared"].items()}
    present = {path for path in folder.rglob("*") if path.is_file() and path.name != FILE}
    messages = []
    for path in sorted(present | expected.keys()):
        if path not in expected:
            if _IGNORED not in path.parts:
                messages.append(f"{path} is new")
        elif not path.is_file():
            messages.append(f"{path} is gone")
        elif checksum(path) != expected[path]:
            messages.append(f"{path} was changed")
    return messages


def version_numbers(folder: Path) -> list[int]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(p.name) for p in paths if p.is_dir() and p.name.isdigit())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A version of a model in a repository.

    Attributes
    ----------
    manifest : mapping or None
        What its ``sonic-manifest.json`` says: kind, inputs, outputs, source, built, user, metadata.
        None of a version that this package did not build.
    changes : tuple of str
        What is no longer as it was built.
    """

    model: str
    version: int
    manifest: Mapping[str, Any] | None
    changes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON knows."""
        manifest = dict(self.manifest or {})
        return {**manifest, "model": self.model, "version": self.version, "changes": self.changes}


def read_repository(path: str | os.PathLike[str]) -> list[ModelVersion]:
    """Return the versions of the models in a repository, each compared with its manifest.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is no model, or a manifest that cannot be read.
    """
    root = Path(path)
    folders = sorted(root.iterdir()) if root.is_dir() else []
    entries = [entry for folder in folders for entry in _versions(folder)]
    if not entries:
        raise no_models(root)
    return entries


def no_models(root: Path) -> ConfigError:
    if root.is_file():
        build = f"sonic.build_repository('repository', {{{root.stem!r}: {str(root)!r}}})"
        return ConfigError(f"{root} is a file; expected a model repository, which {build} makes")
    return ConfigError(
        f"expected a model repository, got {root}, which has no models; build_repository, or "
        "`sonic-coffea repository build`, makes one"
    )


def _versions(folder: Path) -> list[ModelVersion]:
    manifests = {n: read(folder / str(n)) for n in version_numbers(folder)}
    # The shared files are those of the version that was built last.
    built = {number: m["built"] for number, m in manifests.items() if m is not None}
    last = max(built, key=lambda number: built[number], default=None)
    return [
        ModelVersion(
            model=folder.name,
            version=number,
            manifest=manifest,
            changes=tuple(
                changes(folder / str(number), manifest, shared=number == last) if manifest else ()
            ),
        )
        for number, manifest in manifests.items()
    ]
