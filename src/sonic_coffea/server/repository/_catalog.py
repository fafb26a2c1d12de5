"""What is in a model repository, and whether it is still what was built."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.server.repository import _manifest

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["ModelVersion", "read_repository"]


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
        raise ConfigError(
            f"expected a model repository, got {root}, which has no models; build_repository "
            "makes one"
        )
    return entries


def _versions(folder: Path) -> list[ModelVersion]:
    manifests = {n: _manifest.read(folder / str(n)) for n in _manifest.version_numbers(folder)}
    # What versions share was last written with the one that was built last.
    built = {number: m["built"] for number, m in manifests.items() if m is not None}
    last = max(built, key=lambda number: built[number], default=None)
    entries = []
    for number, manifest in manifests.items():
        changes: list[str] = []
        if manifest is not None:
            changes = _manifest.changes(folder / str(number), manifest, shared=number == last)
        entry = ModelVersion(
            model=folder.name, version=number, manifest=manifest, changes=tuple(changes)
        )
        entries.append(entry)
    return entries
