"""The manifest of a version: checksums and origin of its files, written beside them."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, expect
from sonic_coffea.server.repository import _runner
from sonic_coffea.server.repository._config import read_config

_ENTRIES = {"kind": str, "file": str, "inputs": list, "outputs": list, "built": str, "files": dict}
# The folders that Triton takes for versions.
_VERSION = re.compile(r"[1-9][0-9]*")


def read(folder: Path) -> dict[str, Any] | None:
    """Return the manifest in a version's folder; None if the folder has none."""
    path = folder / _runner.MANIFEST
    if not path.exists():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key, kind in _ENTRIES.items():
            holds = isinstance(manifest[key], kind)
            expect(holds, f"a {kind.__name__} as {key} in {path}", manifest[key])
    except (KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"the manifest {path} cannot be read: {error!r}") from None
    for name in map(Path, (manifest["file"], *manifest["files"])):
        is_inside = ".." not in name.parts and not name.is_absolute()
        expect(is_inside, f"names of files in the folder of {path}", str(name))
    return manifest


def changes(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Say what has changed in a version since the build: its files, and its digest for clients."""
    parameters: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        parameters = read_config(folder.parent).get("parameters", {})
    told = parameters.get(f"sha256.{folder.name}", {}).get("string_value")
    return _runner.changes(folder, manifest, told)


def version_numbers(folder: Path) -> list[int]:
    """Return the versions in a model's folder, which need not exist, from the lowest."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(p.name) for p in paths if p.is_dir() and _VERSION.fullmatch(p.name))


def read_repository(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the versions of the models in a repository, each compared with its manifest.

    A version is a dict of ``model``, ``version``, ``changes``, a list of what is no longer as it
    was built, and what the manifest says: ``kind``, ``inputs``, ``outputs``, ``source``, ``built``,
    ``user``, ``metadata`` and more. A version that this package did not build has no manifest.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is no model, or a manifest that cannot be read.
    """
    root = Path(path)
    entries = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        for number in version_numbers(folder):
            manifest = read(folder / str(number))
            changed = [] if manifest is None else changes(folder / str(number), manifest)
            entry = {"model": folder.name, "version": number, "changes": changed}
            entries.append({**(manifest or {}), **entry})
    if not entries:
        built = {root.stem: str(root)} if root.is_file() else {"name": "model.onnx"}
        raise ConfigError(
            f"expected a model repository, got {root}, which has no models; "
            f"sonic.build_repository('repository', {built}) makes one"
        )
    return entries


def check_unchanged(root: Path) -> None:
    """Refuse a repository whose scores would be taken for those of other files."""
    for entry in read_repository(root):
        try:
            _runner.check_unchanged(entry["changes"])
        except ValueError as error:
            raise ConfigError(str(error)) from None
