"""The plan of a build: checks options, reads models, makes configurations; no writes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.server.repository import _config, _manifest
from sonic_coffea.server.repository._config import Config, Ensemble, Labels, Options
from sonic_coffea.server.repository._sources import ModelSource, read_source
from sonic_coffea.server.repository.formats import Served
from sonic_coffea.transport import read_model_config, write_model_config

CONFIG_FILE = "config.pbtxt"
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVersion:
    """A model, or another version (``beside`` the present ones), to write to the repository.

    ``copies`` maps names in the version's folder to files. ``texts`` maps the names of the files
    that versions share to their contents.
    """

    name: str
    version: int
    copies: Mapping[str, Path]
    texts: Mapping[str, str]
    manifest: Mapping[str, Any]
    beside: bool

    @property
    def place(self) -> str:
        """The folder that is written as a whole, relative to the repository."""
        return f"{self.name}/{self.version}" if self.beside else self.name


def plan_versions(root: Path, models: Mapping[str, Any], options: Options) -> list[PlannedVersion]:
    """Return the versions to write for `models`, without those that exist unchanged."""
    _check_names(models, options.labels)
    served = {
        name: model if isinstance(model, Served | Ensemble) else Served(model)
        for name, model in models.items()
    }
    versions = []
    known = _configs(root)
    # Ensembles last: their steps are other models.
    for name, model in sorted(served.items(), key=lambda item: isinstance(item[1], Ensemble)):
        beside = options.version is not None and (root / name).exists()
        plan = _plan_version if beside else _plan_new
        planned = plan(root / name, model, known, options)
        known[name] = read_model_config(planned.texts[CONFIG_FILE])
        if options.overwrite or not _exists(root / name, planned):
            versions.append(planned)
    present = [planned.name for planned in versions if (root / planned.name).exists()]
    if present and not options.overwrite and options.version is None:
        raise ConfigError(
            f"the repository {root} already has {', '.join(present)}, of other files or "
            "options; the option overwrite replaces it, the version 'next' adds one"
        )
    return versions


def _exists(folder: Path, planned: PlannedVersion) -> bool:
    """Return whether the repository has this version of the model, unchanged."""
    if planned.beside or _manifest.version_numbers(folder) != [planned.version]:
        return False
    version = folder / str(planned.version)
    try:
        manifest = _manifest.read(version) or {}
        keys = ("metadata", "files", "shared")
        same = all(manifest.get(key) == planned.manifest[key] for key in keys)
        return same and not _manifest.changes(version, manifest, shared=True)
    except (OSError, ConfigError):
        return False


def _plan_new(
    folder: Path, model: Served | Ensemble, known: Mapping[str, Config], options: Options
) -> PlannedVersion:
    """Plan a model as a whole, which takes the place of one of the same name."""
    config, source = _read(folder.name, model, known, options, options.platform)
    labels = _config.add_labels(config, source.outputs, options.labels.get(folder.name))
    config["version_policy"] = _config.version_policy(options.versions)
    number = 1 if options.version in (None, "next") else int(options.version)
    return _planned(folder, number, config, source, options, labels)


def _plan_version(
    folder: Path, model: Served | Ensemble, known: Mapping[str, Config], options: Options
) -> PlannedVersion:
    """Plan a version beside those that a model has, whose configuration it must fit."""
    present = _manifest.version_numbers(folder)
    number = max(present, default=0) + 1 if options.version == "next" else int(options.version or 1)
    if number in present and not options.overwrite:
        raise ConfigError(
            f"{folder} already has version {number}; the option overwrite replaces it, the version "
            "'next' is the one after the latest"
        )
    if folder.name in options.labels:
        raise ConfigError(
            f"labels are those of all versions of model {folder.name!r}, which is there already; "
            "the option overwrite without a version writes it anew"
        )
    backend = known.get(folder.name, {}).get("backend")
    new, source = _read(folder.name, model, known, options, options.platform or backend)
    config = _config_file(folder)
    ours, theirs = _contract(read_model_config(write_model_config(new))), _contract(config)
    differing = [
        f"{what} is {ours.get(what)}, there it is {theirs.get(what)}"
        for what in {**ours, **theirs}
        if ours.get(what) != theirs.get(what)
    ]
    if differing:
        raise ConfigError(
            f"version {number} of model {folder.name!r} does not go with those in {folder}: "
            f"{'; '.join(differing)}; serve it by another name"
        )
    if options.versions is not None:
        config["version_policy"] = _config.version_policy(options.versions)
    return _planned(folder, number, config, source, options, {}, beside=True)


def _read(
    name: str,
    model: Served | Ensemble,
    known: Mapping[str, Config],
    options: Options,
    platform: str | None,
) -> tuple[Config, ModelSource]:
    """Return the configuration of a model or an ensemble, and what it is made of."""
    if isinstance(model, Served):
        source = read_source(name, model, platform)
        return _config.model_config(name, model, source, options), source
    others = {other: config for other, config in known.items() if other != name}
    try:
        return _config.ensemble_config(name, model, others)
    except ConfigError as error:
        raise error.within(f"ensemble {name!r}") from None


def _planned(
    folder: Path,
    number: int,
    config: Config,
    source: ModelSource,
    options: Options,
    labels: Mapping[str, str],
    *,
    beside: bool = False,
) -> PlannedVersion:
    copies = {**source.files, **source.scripts}
    sums = {file: _manifest.checksum(path) for file, path in sorted(copies.items())}
    if source.file:
        # With the configuration the digest reaches clients, which can then say what made a score.
        digest = {"string_value": _digest(source, sums)}
        parameters = {**config.get("parameters", {}), f"sha256.{number}": digest}
        parameters.pop(f"features.{number}", None)
        if features := source.manifest.get("features"):
            parameters[f"features.{number}"] = {"string_value": json.dumps(features)}
        config["parameters"] = parameters
    texts = {**labels, CONFIG_FILE: write_model_config(config)}
    present = [path for path in folder.iterdir() if path.is_file()] if beside else []
    shared = {path.name: _manifest.checksum(path) for path in present}
    shared |= {file: hashlib.sha256(text.encode()).hexdigest() for file, text in texts.items()}
    manifest = {
        **_manifest.describe(folder.name, number, source, options),
        "files": sums,
        "shared": shared,
    }
    return PlannedVersion(
        name=folder.name,
        version=number,
        copies=copies,
        texts=texts,
        manifest=manifest,
        beside=beside,
    )


def _digest(source: ModelSource, sums: Mapping[str, str]) -> str:
    """Return the checksum of what decides a version's outputs.

    For an ONNX model, these are its files, as its tensors have names. For others, the declaration
    counts, too: backends take tensors by their order, and a file has many functions.
    """
    if source.kind == "onnx" and len(source.files) == 1:
        return sums[source.file]
    listed = "".join(f"{name} {sums[name]}\n" for name in sorted(source.files))
    if source.kind != "onnx":
        function = source.manifest.get("function")
        tensors = [source.inputs, source.outputs]
        more = [source.manifest["best_iteration"]] if "best_iteration" in source.manifest else []
        listed += json.dumps([source.file, function, source.platform, *tensors, *more]) + "\n"
    return hashlib.sha256(listed.encode()).hexdigest()


def _contract(config: Config) -> dict[str, Any]:
    """Return what all versions of a model have in common."""
    tensors = {
        f"{kind} {t['name']!r}": (t["data_type"], [int(n) for n in t["dims"]], t.get("reshape"))
        for kind in ("input", "output")
        for t in config.get(kind, ())
    }
    kinds = {what: config.get(what) for what in ("backend", "platform", "ensemble_scheduling")}
    return {**tensors, **kinds, "whether it is batched": config.get("max_batch_size", 0) > 0}


def _check_names(models: Mapping[str, object], labels: Labels) -> None:
    if not models:
        raise ConfigError("expected at least one model, got none")
    for name in models:
        if not _MODEL_NAME.fullmatch(name):
            raise ConfigError(
                "expected a model name of letters, digits, '_', '-' and '.' that does not begin "
                f"with '-' or '.', got {name!r}"
            )
    for name in labels:
        if name not in models:
            raise ConfigError(
                f"labels for a model {name!r} that is not built; {nearest(name, models)}"
            )


def _configs(root: Path) -> dict[str, Config]:
    """Return the configurations of the repository's models, but those that cannot be read."""
    configs = {}
    for file in root.glob(f"*/{CONFIG_FILE}"):
        with contextlib.suppress(ConfigError):
            configs[file.parent.name] = _config_file(file.parent)
    return configs


def _config_file(folder: Path) -> Config:
    path = folder / CONFIG_FILE
    try:
        return read_model_config(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"expected a model configuration in {path}: {error}") from None
