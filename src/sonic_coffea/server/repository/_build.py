"""Model repositories for Triton, built from model files and Python functions."""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from sonic_coffea._version import __version__
from sonic_coffea.errors import ConfigError, expect, require
from sonic_coffea.server._folders import local_servers
from sonic_coffea.server.repository import _config, _runner
from sonic_coffea.server.repository._config import Config, Ensemble, Labels, Versions
from sonic_coffea.server.repository._sources import Manifest, Served, naming, read_source
from sonic_coffea.transport import read_model_config, write_model_config

logger = logging.getLogger(__name__)

Platform = Literal["python", "onnxruntime", "pytorch"]
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def build_repository(  # noqa: PLR0913  independent options, each with a default
    path: str | os.PathLike[str],
    models: Mapping[str, str | os.PathLike[str] | Callable[..., Any] | Served | Ensemble],
    *,
    max_batch_size: int | None = None,
    dynamic_batching: bool | Mapping[str, Any] | None = True,
    instances: int = 1,
    threads: int | None = None,
    labels: Labels | None = None,
    platform: Platform | None = None,
    version: int | Literal["next"] | None = None,
    versions: Versions | None = None,
    warmup: bool = True,
    metadata: Mapping[str, Any] | None = None,
    record_user: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write a Triton model repository that serves model files and Python functions.

    Names, shapes and types are read from the files; for functions and TorchScript, `Served` has
    them. If the first axis of all tensors has any length, the server batches requests to the model;
    otherwise each request runs by itself. Models that are in the repository already stay. Either
    all models are written or, after an error, none. Each version has a manifest,
    ``sonic-manifest.json``, with checksums, origin and metadata.

    Parameters
    ----------
    path : path-like
        The repository; created if it does not exist.
    models : mapping of str to path-like, callable, Served or Ensemble
        Model name to an ONNX (``.onnx``), TorchScript (``.pt``), XGBoost (``.json``, ``.ubj``) or
        LightGBM (``.txt``) file, to a `Served` that says more, or to an `Ensemble` of models.
    max_batch_size : int, optional
        Greatest number of rows of a request and of a batch; 0 serves without batching. By default
        1,024, or as many as have 1 MB of inputs and outputs, up to 65,536: requests of a few small
        rows take longer to be made than to be run.
    dynamic_batching : bool or mapping, optional
        Whether the server makes batches of several requests. A mapping sets Triton's options:
        ``preferred_batch_size``, ``max_queue_delay_microseconds``, ``preserve_ordering``.
    instances : int
        Copies of each model that run at the same time.
    threads : int, optional
        Threads of one copy; by default, the server's ``threads``, or one for each core.
    labels : mapping, optional
        Model name to the labels of its output, or to a mapping of output name to labels.
    platform : {"python", "onnxruntime", "pytorch"}, optional
        The backend that runs the models; by default, onnxruntime for ONNX files, and the Python
        backend for all others. NVIDIA's container has the native backends, and `LocalServer` has
        replacements that give the same outputs.
    version : int or "next", optional
        Number of the version, 1 by default; ``"next"`` is the one after the latest. If the model
        exists, only this version is written, and the options above do not change.
    versions : {"all", "latest"} or sequence of int, optional
        The versions that the server loads; by default all, or the earlier choice.
    warmup : bool
        Whether the server runs each model on a row of zeros before it is ready. If tensors have
        axes of any length, `Served` must give a length for this.
    metadata : mapping, optional
        Further entries of the manifest, such as the training.
    record_user : bool
        Whether the manifest names the user and the full path of the source.
    overwrite : bool
        Whether to replace models of the same name, or versions of the same number. An existing
        model with the same files and options does not change.

    Returns
    -------
    Path
        The repository.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If a file, a name or an option cannot be used, the repository cannot be written, or the onnx
        package is needed and not there.
    """
    root, labels = Path(path).expanduser(), labels or {}
    metadata = _checked(models, labels, metadata, version)
    shared = _config.shared_config(instances, threads, dynamic_batching=dynamic_batching)
    # What is written: by its path in the repository, a file to copy, or a text.
    files: dict[str, Path | str] = {}
    # The folders that are replaced as a whole, and files beside versions that stay.
    moves: list[str] = []
    try:
        known = _configs(root)
        # Ensembles last: their steps are other models.
        for name, model in sorted(models.items(), key=lambda item: isinstance(item[1], Ensemble)):
            folder = root / name
            beside = folder.exists() and version is not None
            following = max(_config.version_numbers(folder), default=0) + 1
            number = following if version == "next" else version or 1
            with naming(name):
                if isinstance(model, Ensemble):
                    config, described = _config.ensemble_config(name, model, known)
                    sources = dict[str, Path]()
                else:
                    served = model if isinstance(model, Served) else Served(model)
                    if served.max_batch_size is None:
                        served = replace(served, max_batch_size=max_batch_size)
                    backend = known.get(name, {}).get("backend") if beside else None
                    described, sources = read_source(served, platform or backend)
                    config = _config.model_config(name, served, described, shared, warmup=warmup)
                if beside:
                    texts = {}
                    config = _shared_config(folder, number, config, labels, overwrite=overwrite)
                else:
                    texts = _config.add_labels(config, described, labels.get(name))
            if versions is not None or not beside:
                config["version_policy"] = _config.version_policy(versions)
            script = {"model.py": _runner.SCRIPT} if described["platform"] == "python" else {}
            copies = {**sources, **script}
            sums = {file: _runner.checksum(path) for file, path in sorted(copies.items())}
            of_sources = {file: sums[file] for file in sorted(sources)}
            digest = _add_digest(config, number, described, of_sources)
            texts[_config.FILE] = write_model_config(config)
            known[name] = read_model_config(texts[_config.FILE])
            manifest = {
                "model": name,
                "version": number,
                **described,
                "built": dt.datetime.now(dt.timezone.utc).isoformat(),
                "package": f"sonic-coffea {__version__}",
                **_origin(sources, record_user=record_user),
                "metadata": metadata,
                "digest": digest,
                "files": sums,
            }
            if folder.exists() and not beside and not overwrite:
                _check_unchanged(folder, number, manifest, texts)
                continue
            moves += [f"{name}/{number}", f"{name}/{_config.FILE}"] if beside else [name]
            files |= {f"{name}/{number}/{file}": path for file, path in copies.items()}
            files |= {f"{name}/{file}": text for file, text in texts.items()}
            files[f"{name}/{number}/{_runner.MANIFEST}"] = json.dumps(manifest, indent=2) + "\n"
        if files:
            _write(root, files, moves, overwrite=overwrite)
    except OSError as error:
        raise ConfigError(f"cannot write the model repository {root}: {error}") from None
    logger.info("wrote %s to %s", ", ".join(moves) or "nothing new", root)
    return root


def _checked(
    models: Mapping[Any, object],
    labels: Labels,
    metadata: Mapping[str, Any] | None,
    version: object,
) -> dict[str, Any]:
    """Check the options that need no model; return the metadata as what JSON holds of them."""
    if not isinstance(models, Mapping):
        name = Path(models).stem if isinstance(models, (str, os.PathLike)) else "name"
        raise ConfigError(f"expected models as a dict, such as {{{name!r}: {models!r}}}")
    expect(models, "at least one model", models)
    characters = "letters, digits, '_', '-' and '.' that does not begin with '-' or '.'"
    for name in models:
        is_name = isinstance(name, str) and _MODEL_NAME.fullmatch(name)
        expect(is_name, f"a model name of {characters}", name)
    is_mapping = isinstance(labels, Mapping)
    expect(is_mapping, "labels as a mapping of model name to labels", labels)
    require(labels, models, "labels for a model that is not built:")
    if version != "next":
        _config.check_integer("version, unless 'next',", version, 1)
    try:
        held: dict[str, Any] = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected metadata that JSON can hold: {error}") from None
    return held


def _configs(root: Path) -> dict[str, Config]:
    """Return the configurations of the repository's models, except any that cannot be read."""
    configs = {}
    for file in root.glob(f"*/{_config.FILE}"):
        with contextlib.suppress(ConfigError):
            configs[file.parent.name] = _config.read_config(file.parent)
    return configs


def _origin(sources: Mapping[str, Path], *, record_user: bool) -> dict[str, str]:
    """Return the user and the file that a version comes from, as far as they may be recorded."""
    origin = {}
    for file in list(sources.values())[:1]:
        # A full path often contains the name of its owner.
        origin["source"] = str(file.absolute()) if record_user else file.name
    if record_user:
        with contextlib.suppress(KeyError, OSError):
            origin["user"] = getpass.getuser()
    return origin


def _shared_config(
    folder: Path, number: int, new: Config, labels: Labels, *, overwrite: bool
) -> Config:
    """Return the configuration of the versions that a model has, which another one must fit."""
    if number in _config.version_numbers(folder) and not overwrite:
        raise ConfigError(
            f"{folder} already has version {number}; the option overwrite replaces it, the version "
            "'next' is the one after the latest"
        )
    if folder.name in labels:
        raise ConfigError(
            "labels are those of all versions of the model, which is there already; the option "
            "overwrite without a version writes it anew"
        )
    config = _config.read_config(folder)
    expect(config, f"a model configuration in {folder / _config.FILE}", config)
    ours, theirs = _contract(read_model_config(write_model_config(new))), _contract(config)
    differing = [
        f"{what} is {ours.get(what)}, there it is {theirs.get(what)}"
        for what in sorted({*ours, *theirs})
        if ours.get(what) != theirs.get(what)
    ]
    if differing:
        raise ConfigError(
            f"version {number} does not go with those in {folder}: {'; '.join(differing)}; serve "
            "it by another name"
        )
    return config


def _contract(config: Config) -> dict[str, Any]:
    """Return what all versions of a model have in common."""
    contract = {what: config.get(what) for what in ("backend", "platform", "ensemble_scheduling")}
    contract["batching"] = config.get("max_batch_size", 0) > 0
    tensors = [(kind, tensor) for kind in ("input", "output") for tensor in config.get(kind, ())]
    for kind, tensor in tensors:
        dims = [int(n) for n in tensor["dims"]]
        contract[f"{kind} {tensor['name']!r}"] = tensor["data_type"], dims, tensor.get("reshape")
    return contract


def _add_digest(config: Config, number: int, described: Manifest, sums: Mapping[str, str]) -> str:
    """Let the digest reach clients with the configuration: they can then say what made a score.

    Return it; it is empty for a model without files.

    The digest is the checksum of what decides a version's outputs. For an ONNX model, these are its
    files, as its tensors have names. For others, the declaration counts, too: backends take tensors
    by their order, and a file has many functions.
    """
    if not sums:
        return ""
    digest = sums[described["file"]]
    if described["kind"] != "onnx" or len(sums) > 1:
        listed = [sums, {} if described["kind"] == "onnx" else described]
        digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    parameters = config.setdefault("parameters", {})
    parameters[f"sha256.{number}"] = {"string_value": digest}
    parameters.pop(f"features.{number}", None)
    if features := described.get("features"):
        parameters[f"features.{number}"] = {"string_value": json.dumps(features)}
    return digest


def _check_unchanged(
    folder: Path, number: int, manifest: Mapping[str, Any], texts: Mapping[str, str]
) -> None:
    """Raise unless a model has this version alone, as it would be written."""
    version = folder / str(number)
    there = [name for name in texts if (folder / name).is_file()]
    same = (
        _config.version_numbers(folder) == [number]
        and not _config.changes(version, manifest)
        and (_config.read_manifest(version) or {}).get("metadata") == manifest["metadata"]
        and {name: (folder / name).read_text("utf-8") for name in there} == texts
    )
    if not same:
        raise ConfigError(
            f"the repository {folder.parent} already has {folder.name}, of other files or options; "
            "the option overwrite replaces it, the version 'next' adds one"
        )


def _write(
    root: Path, files: Mapping[str, Path | str], moves: Sequence[str], *, overwrite: bool
) -> None:
    """Build all files beside their places, and move them there."""
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    # On the repository's file system, and where no server looks: Triton takes every folder of a
    # repository for a model, even a hidden one, but in a model's folder only reads numbered ones.
    # Hidden folders are those of other builds, which remove them as they end.
    folders = (p for p in sorted(root.glob("[!.]*")) if p.is_dir() and not p.is_symlink())
    usable = (p for p in folders if p.name not in moves and os.access(p, os.W_OK))
    stage = Path(tempfile.mkdtemp(dir=next(usable, root), prefix=".sonic-build-"))
    try:
        for name, content in files.items():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, stage / name)
            else:
                (stage / name).write_bytes(content.encode())
        for manifest in stage.glob(f"*/*/{_runner.MANIFEST}"):
            version = manifest.parent
            if _config.changes(version, _config.read_manifest(version) or {}):
                raise ConfigError(
                    f"files of model {version.parent.name!r} were replaced while they were copied; "
                    "build it again when nothing writes them"
                )
        _move(stage, root, moves, overwrite=overwrite)
        for server in local_servers() if overwrite else ():
            if server["repository"] == str(root.absolute()):
                what = "%s has the models in memory that it loaded; unless it polls, start it anew"
                logger.warning(what, server["url"])
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # it has models, which may be another process's
                root.rmdir()


def _move(stage: Path, root: Path, moves: Sequence[str], *, overwrite: bool) -> None:
    """Move files and folders to their places; an error leaves all places as they were."""
    with contextlib.ExitStack() as undo:
        for number, place in enumerate(moves):
            new, target, old = stage / place, root / place, stage / f"old-{number}"
            is_file = new.is_file()  # the configuration of other versions, too
            if target.exists() and not (overwrite or is_file):
                raise FileExistsError(f"another process has just written {target}")
            if is_file:
                shutil.copyfile(target, old)
            # First: on a slow file system, Ctrl-C comes while a folder is moved.
            undo.callback(_move_back, new, target, old)
            if target.exists() and not is_file:
                target.rename(old)
            new.replace(target)
        undo.pop_all()


def _move_back(new: Path, target: Path, old: Path) -> None:
    """Move what was in a place back, as far as it and what is new were moved."""
    if not new.exists():
        shutil.rmtree(target, ignore_errors=True)
    if old.exists():
        old.replace(target)
