"""What a build is to write: options checked, models read, configurations made; nothing written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.server.repository import _config, _manifest
from sonic_coffea.server.repository._ensemble import ensemble_config
from sonic_coffea.server.repository._served import Ensemble, Served
from sonic_coffea.server.repository._sources import ModelSource, read_source
from sonic_coffea.server.repository.formats import PLATFORMS
from sonic_coffea.transport import read_model_config, write_model_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sonic_coffea.server.repository._config import Config, Labels, Versions

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.pbtxt"
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `build_repository` by which models are planned."""

    max_batch_size: int
    dynamic_batching: bool | Mapping[str, Any] | None
    instances: int
    threads: int | None
    labels: Labels
    platform: str | None
    version: int | None
    add_version: bool
    versions: Versions | None
    warmup: bool
    overwrite: bool

    def __post_init__(self) -> None:
        _check_integer("max_batch_size", self.max_batch_size, 0)
        _check_integer("instances", self.instances, 1)
        for option in ("threads", "version"):
            value = getattr(self, option)
            if value is not None:
                _check_integer(option, value, 1)
        if self.platform not in (None, *PLATFORMS):
            *first, last = map(repr, PLATFORMS)
            raise ConfigError(
                f"expected platform {', '.join(first)} or {last}, got {self.platform!r}"
            )
        if self.add_version and self.version is not None:
            raise ConfigError("version and add_version exclude each other: both say which number")

    @property
    def one_version(self) -> bool:
        """Whether of a model that is there already only one version is written."""
        return self.add_version or self.version is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVersion:
    """A model, or, ``beside`` others of it, a version, on its way into the repository."""

    name: str
    version: int
    source: ModelSource
    config: Config
    labels: Mapping[str, Sequence[str]]
    beside: bool

    @property
    def copies(self) -> dict[str, Path]:
        """What is copied into the version's folder, by the names there."""
        return {**self.source.files, **self.source.scripts}

    @property
    def place(self) -> str:
        """What is written as a whole, relative to the repository."""
        return f"{self.name}/{self.version}" if self.beside else self.name


def plan_versions(
    root: Path, models: Mapping[str, Any], options: Options, metadata: Mapping[str, Any]
) -> list[PlannedVersion]:
    """Return what to write for `models`: those that are there as they would be written are not.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If a file, a name or an option cannot be used.
    """
    served = {
        name: model if isinstance(model, Served | Ensemble) else Served(model)
        for name, model in models.items()
    }
    _check_names(served, options.labels)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"expected a directory for the repository, got the file {root}")
    versions = []
    known = _configs(root)
    # Ensembles last: they are made of the others.
    for name, model in sorted(served.items(), key=lambda item: isinstance(item[1], Ensemble)):
        planned = _plan(root, name, model, known, options)
        known[name] = planned.config
        if options.overwrite or not _is_there(root / name, planned, metadata):
            versions.append(planned)
    present = [planned.name for planned in versions if (root / planned.name).exists()]
    if present and not options.overwrite and not options.one_version:
        raise ConfigError(
            f"the repository {root} already has {', '.join(present)}, of other files or "
            "options; overwrite=True (--overwrite) replaces it, add_version=True (--add-version) "
            "adds a version"
        )
    return versions


def _is_there(folder: Path, planned: PlannedVersion, metadata: Mapping[str, Any]) -> bool:
    """Return whether a model, of this one version, is there as it would be written."""
    version = folder / str(planned.version)
    if planned.beside or [p.name for p in folder.glob("[0-9]*") if p.is_dir()] != [version.name]:
        return False
    texts = {CONFIG_FILE: write_model_config(planned.config), **label_texts(planned)}
    try:
        manifest = _manifest.read(version)
        if manifest is None or manifest.get("metadata") != dict(metadata):
            return False
        if _manifest.changes(version, manifest, shared=True):
            return False
        files = {name: _manifest.checksum(path) for name, path in planned.copies.items()}
        present = {name: (folder / name).read_text(encoding="utf-8") for name in manifest["shared"]}
    except (OSError, ConfigError):
        return False
    return files == manifest["files"] and texts == present


def _plan(
    root: Path,
    name: str,
    model: Served | Ensemble,
    known: Mapping[str, Config],
    options: Options,
) -> PlannedVersion:
    if isinstance(model, Ensemble):
        others = {other: config for other, config in known.items() if other != name}
        config, interface = ensemble_config(name, model, others)
        source = ModelSource(kind="ensemble", interface=interface)
    else:
        backend = known.get(name, {}).get("backend") if options.one_version else None
        source = read_source(name, model, options.platform or backend)
        config = _model_config(name, model, source, options)
    number = options.version or (_latest(root / name) if options.add_version else 0) + 1
    labels = _config.check_labels(name, source.interface, options.labels.get(name))
    for output in config["output"]:
        if output["name"] in labels:
            output["label_filename"] = _config.label_file(output["name"])
    beside = options.one_version and (root / name).exists()
    if beside:
        config = _joined(root / name, number, config, options)
    if options.versions is not None or not beside:
        versions = "all" if options.versions is None else options.versions
        config["version_policy"] = _config.version_policy(versions)
    if source.file:
        # With the configuration the digest reaches clients, which can then say what made a score.
        digest = {"string_value": _digest(source)}
        config["parameters"] = {**config.get("parameters", {}), f"sha256.{number}": digest}
    return PlannedVersion(
        name=name, version=number, source=source, config=config, labels=labels, beside=beside
    )


def label_texts(planned: PlannedVersion) -> dict[str, str]:
    """Return the names and contents of a model's files of labels."""
    return {
        _config.label_file(output): "".join(f"{name}\n" for name in names)
        for output, names in planned.labels.items()
    }


def _digest(source: ModelSource) -> str:
    """Return the checksum of what decides a version's outputs: of an ONNX model, its files.

    There tensors go by their names. Elsewhere the declaration is as much a part of the model:
    tensors go by their order, which backends take differently, and a file has many functions.
    """
    if source.kind == "onnx" and len(source.files) == 1:
        return _manifest.checksum(source.files[source.file])
    listed = "".join(
        f"{n} {_manifest.checksum(path)}\n" for n, path in sorted(source.files.items())
    )
    if source.kind != "onnx":
        interface, function = source.interface, source.manifest.get("function")
        tensors = [[t.to_dict() for t in side] for side in (interface.inputs, interface.outputs)]
        listed += json.dumps([source.file, function, source.platform, *tensors]) + "\n"
    return hashlib.sha256(listed.encode()).hexdigest()


def _model_config(name: str, served: Served, source: ModelSource, options: Options) -> Config:
    limit = options.max_batch_size if served.max_batch_size is None else served.max_batch_size
    _check_integer(f"max_batch_size of model {name!r}", limit, 0)
    return _config.model_config(
        name,
        source.interface,
        backend=source.platform,
        max_batch_size=limit if source.interface.batched else 0,
        batching=_config.batching_options(options.dynamic_batching),
        instances=options.instances,
        threads=options.threads,
        warmup=served.warmup,
        zeros=options.warmup,
    )


def _joined(folder: Path, number: int, new: Config, options: Options) -> Config:
    """Return the configuration of a model that is there already, for one more version."""
    if (folder / str(number)).exists() and not options.overwrite:
        raise ConfigError(
            f"{folder} already has version {number}; overwrite=True replaces it, add_version=True "
            "adds the next"
        )
    if folder.name in options.labels:
        raise ConfigError(
            f"labels are those of all versions of model {folder.name!r}, which is there already; "
            "overwrite=True without a version writes it anew"
        )
    old = _config_file(folder)
    differing = [
        f"{what} is {ours}, there it is {theirs}"
        for what, ours, theirs in _compared(new, old)
        if ours != theirs
    ]
    if differing:
        raise ConfigError(
            f"version {number} of model {folder.name!r} does not go with those in {folder}: "
            f"{'; '.join(differing)}; serve it by another name"
        )
    return old


def _compared(new: Config, old: Config) -> list[tuple[str, Any, Any]]:
    ours, theirs = (_config.interface_of(config) for config in (new, old))
    pairs: list[tuple[str, Any, Any]] = [
        (f"{kind} {name!r}", ours.get((kind, name)), theirs.get((kind, name)))
        for kind, name in {**ours, **theirs}
    ]
    kinds = ("backend", "platform", "ensemble_scheduling")
    pairs += [(what, new.get(what, ""), old.get(what, "")) for what in kinds]
    stacked = [int(config.get("max_batch_size", 0)) > 0 for config in (new, old)]
    return [*pairs, ("whether it is batched", stacked[0], stacked[1])]


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


def _check_integer(option: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"expected {option} to be an integer >= {least}, got {value!r}")


def _configs(root: Path) -> dict[str, Config]:
    """Return the configurations of the models that are there, as far as they can be read."""
    configs = {}
    for file in root.glob(f"*/{CONFIG_FILE}"):
        try:
            configs[file.parent.name] = _config_file(file.parent)
        except ConfigError as error:
            logger.info("no ensemble can use %s: %s", file.parent.name, error)
    return configs


def _config_file(folder: Path) -> Config:
    path = folder / CONFIG_FILE
    try:
        return read_model_config(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected a model configuration in {path}: {error}") from None
    except ConfigError as error:
        raise error.within(str(path)) from None


def _latest(folder: Path) -> int:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)
