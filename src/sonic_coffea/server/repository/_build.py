"""Model repositories for Triton, built from model files and Python functions."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sonic_coffea.errors import ConfigError
from sonic_coffea.server.repository import _manifest
from sonic_coffea.server.repository._config import Ensemble, Labels, Options, Versions
from sonic_coffea.server.repository._planning import CONFIG_FILE, PlannedVersion, plan_versions

if TYPE_CHECKING:
    from sonic_coffea.server.repository.formats import Served

logger = logging.getLogger(__name__)

Platform = Literal["python", "onnxruntime", "pytorch"]


def build_repository(  # noqa: PLR0913  independent options, each with a default
    path: str | os.PathLike[str],
    models: Mapping[str, str | os.PathLike[str] | Callable[..., Any] | Served | Ensemble],
    *,
    max_batch_size: int = 1024,
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
    max_batch_size : int
        Greatest number of rows of a request and of a batch; 0 serves without batching.
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
    root = Path(path)
    try:
        metadata = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected metadata that JSON can hold: {error}") from None
    options = Options(
        max_batch_size=max_batch_size,
        dynamic_batching=dynamic_batching,
        instances=instances,
        threads=threads,
        labels=labels or {},
        platform=platform,
        version=version,
        versions=versions,
        warmup=warmup,
        metadata=metadata,
        record_user=record_user,
        overwrite=overwrite,
    )
    try:
        planned = plan_versions(root, models, options)
        if planned:
            _write(root, planned)
    except OSError as error:
        raise ConfigError(f"cannot write the model repository {root}: {error}") from None
    places = ", ".join(version.place for version in planned)
    logger.info("wrote %s to %s", places or "nothing new", root)
    return root


def _write(root: Path, versions: Sequence[PlannedVersion]) -> None:
    is_new = not root.exists()
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=_home(root, versions), prefix=".sonic-build-"))
    try:
        moves = []
        for planned in versions:
            folder = stage / planned.name / str(planned.version)
            folder.mkdir(parents=True)
            for name, source in planned.copies.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, folder / name)
            manifest = json.dumps(planned.manifest, indent=2) + "\n"
            (folder / _manifest.FILE).write_text(manifest, encoding="utf-8")
            for name, text in planned.texts.items():
                (folder.parent / name).write_bytes(text.encode())
            moves.append(planned.place)
            if planned.beside:
                moves.append(f"{planned.name}/{CONFIG_FILE}")
        _move(stage, root, moves)
    except BaseException:
        if is_new:
            shutil.rmtree(root, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _home(root: Path, versions: Sequence[PlannedVersion]) -> Path:
    """Return where to build: on the repository's file system, and where no server looks.

    Triton takes each folder of a repository for a model, a hidden one, too; in a model's folder, it
    looks at the numbered ones only.
    """
    replaced = {planned.name for planned in versions if not planned.beside}
    models = (p for p in sorted(root.iterdir()) if p.is_dir() and not p.is_symlink())
    usable = (p for p in models if p.name not in replaced and os.access(p, os.W_OK))
    return next(usable, root)


def _move(stage: Path, root: Path, moves: Sequence[str]) -> None:
    """Move what was built to its places, and after an error all that was there back to them."""
    undo = contextlib.ExitStack()
    with undo:
        for number, place in enumerate(moves):
            target, kept = root / place, stage / f"old-{number}"
            if target.is_file():
                shutil.copyfile(target, kept)
                undo.callback(kept.replace, target)
            else:
                if target.exists():
                    target.rename(kept)
                    undo.callback(kept.rename, target)
                undo.callback(_take_back, target, stage / f"new-{number}")
            (stage / place).replace(target)
        undo.pop_all()


def _take_back(target: Path, to: Path) -> None:
    if target.exists():
        target.rename(to)
