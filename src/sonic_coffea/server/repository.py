"""Model repositories for Triton, built from ONNX files."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sonic_coffea.errors import ConfigError, nearest
from sonic_coffea.server import _onnx_file

if TYPE_CHECKING:
    import os

    from sonic_coffea.server._onnx_file import OnnxFile, TensorInfo

__all__ = ["build_repository"]

logger = logging.getLogger(__name__)

Platform = Literal["python", "onnxruntime"]
Labels = Mapping[str, Mapping[str, Sequence[str]] | Sequence[str]]

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_BATCHING_KEYS = ("max_queue_delay_microseconds", "preferred_batch_size", "preserve_ordering")
_TEMPLATE = Path(__file__).with_name("_onnx_backend.py")


def build_repository(
    path: str | os.PathLike[str],
    models: Mapping[str, str | os.PathLike[str]],
    *,
    max_batch_size: int = 1024,
    dynamic_batching: bool | Mapping[str, Any] | None = True,
    instances: int = 1,
    threads: int | None = None,
    labels: Labels | None = None,
    platform: Platform = "python",
    overwrite: bool = False,
) -> Path:
    """Write a Triton model repository that serves ONNX files.

    Names, shapes and types are read from the files. A model whose tensors all have a first axis
    of any length is served in batches; of others every request is run as it is. Models that are
    there already stay. Either all models are written or, after an error, none.

    Parameters
    ----------
    path : path-like
        The repository; made if need be.
    models : mapping of str to path-like
        Model name to ONNX file.
    max_batch_size : int
        Most rows that the server takes in a request or puts together; 0 serves without batching.
    dynamic_batching : bool or mapping, optional
        Whether the server puts requests together. A mapping sets Triton's own options:
        ``preferred_batch_size``, ``max_queue_delay_microseconds``, ``preserve_ordering``.
    instances : int
        Copies of each model that run at the same time.
    threads : int, optional
        Threads of one copy; by default what the server was given, or every core.
    labels : mapping, optional
        Model name to the labels of its output, or to a mapping of output name to labels.
    platform : {"python", "onnxruntime"}
        The backend that runs the model: Python with onnxruntime, which `LocalServer` has, or the
        native one of NVIDIA's container.
    overwrite : bool
        Whether to replace models of the same name.

    Returns
    -------
    Path
        The repository.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If a file, a name or an option cannot be used.
    ImportError
        If the onnx package is not there.
    """
    root = Path(path)
    _check_options(models, max_batch_size, instances, threads, platform)
    batching = _batching_options(dynamic_batching)
    wanted_labels = _check_names(models, labels)
    _check_target(root, models, overwrite=overwrite)
    plans = []
    for name, file in models.items():
        source = Path(file)
        onnx = _onnx_file.read(source)
        plans.append((name, source, onnx, _check_labels(name, onnx, wanted_labels.get(name))))

    # Built where a server that watches the repository does not look, and renamed into it.
    root.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=root.parent, prefix=f".{root.name}-"))
    try:
        for name, source, onnx, output_labels in plans:
            config = _config(
                name,
                onnx,
                max_batch_size=max_batch_size if onnx.batched else 0,
                batching=batching,
                instances=instances,
                platform=platform,
                labels=output_labels,
                parameters=_parameters(source, threads, platform),
            )
            _write_model(stage / "new" / name, source, onnx, config, output_labels, platform)
        root.mkdir(exist_ok=True)
        for name in models:
            _move_in(stage, root, name)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    logger.info("wrote %s to %s", ", ".join(models), root)
    return root


def _check_options(
    models: Mapping[str, object],
    max_batch_size: int,
    instances: int,
    threads: int | None,
    platform: str,
) -> None:
    if not models:
        raise ConfigError("expected at least one model, got none")
    if platform not in ("python", "onnxruntime"):
        raise ConfigError(f"expected platform 'python' or 'onnxruntime', got {platform!r}")
    for option, value, least in (
        ("max_batch_size", max_batch_size, 0),
        ("instances", instances, 1),
        ("threads", 1 if threads is None else threads, 1),
    ):
        if type(value) is not int or value < least:
            raise ConfigError(f"expected {option} to be an integer >= {least}, got {value!r}")


def _batching_options(
    value: bool | Mapping[str, Any] | None,  # noqa: FBT001
) -> dict[str, Any] | None:
    if value is None or value is False:
        return None
    options: dict[str, Any] = {} if value is True else dict(value)
    for key in options:
        if key not in _BATCHING_KEYS:
            raise ConfigError(
                f"expected an option of dynamic_batching, got {key!r}; "
                f"{nearest(key, _BATCHING_KEYS)}"
            )
    return options


def _check_names(
    models: Mapping[str, object], labels: Labels | None
) -> Mapping[str, Mapping[str, Sequence[str]] | Sequence[str]]:
    for name in models:
        if not _MODEL_NAME.fullmatch(name):
            raise ConfigError(
                "expected a model name of letters, digits, '_', '-' and '.' that does not begin "
                f"with '-' or '.', got {name!r}"
            )
    for name in labels or {}:
        if name not in models:
            raise ConfigError(
                f"labels for a model {name!r} that is not built; {nearest(name, models)}"
            )
    return labels or {}


def _check_target(root: Path, models: Mapping[str, object], *, overwrite: bool) -> None:
    if root.exists() and not root.is_dir():
        raise ConfigError(f"expected a directory for the repository, got the file {root}")
    present = [name for name in models if (root / name).exists()]
    if present and not overwrite:
        raise ConfigError(
            f"the repository {root} already has {', '.join(present)}; overwrite=True replaces it"
        )


def _check_labels(
    name: str, onnx: OnnxFile, given: Mapping[str, Sequence[str]] | Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    if given is None:
        return {}
    outputs = {output.name: output for output in onnx.outputs}
    if not isinstance(given, Mapping):
        if isinstance(given, str) or len(outputs) != 1:
            raise ConfigError(
                f"expected labels of model {name!r} as a mapping of output name to labels, "
                f"got {given!r}; its outputs are {', '.join(outputs)}"
            )
        given = {next(iter(outputs)): given}
    checked = {}
    for output, labels in given.items():
        if output not in outputs:
            raise ConfigError(
                f"labels for an output {output!r} that model {name!r} does not have; "
                f"{nearest(output, outputs)}"
            )
        shape = outputs[output].shape
        length = shape[-1] if shape else 1
        if length not in (-1, len(labels)):
            raise ConfigError(
                f"expected {length} labels for output {output!r} of model {name!r}, "
                f"got {len(labels)}: {', '.join(labels)}"
            )
        checked[output] = tuple(labels)
    return checked


def _parameters(source: Path, threads: int | None, platform: Platform) -> dict[str, str]:
    with source.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    # With the configuration the hash reaches clients, which can then say what made a score.
    parameters = {"sha256": digest.hexdigest()}
    if threads is not None:
        parameters["intra_op_threads" if platform == "python" else "intra_op_thread_count"] = str(
            threads
        )
    return parameters


def _config(
    name: str,
    onnx: OnnxFile,
    *,
    max_batch_size: int,
    batching: Mapping[str, Any] | None,
    instances: int,
    platform: Platform,
    labels: Mapping[str, Sequence[str]],
    parameters: Mapping[str, str],
) -> str:
    lines = [f"name: {_quoted(name)}", f"backend: {_quoted(platform)}"]
    lines.append(f"max_batch_size: {max_batch_size}")
    for field, tensors in (("input", onnx.inputs), ("output", onnx.outputs)):
        for tensor in tensors:
            lines += [f"{field} {{", *_tensor_lines(tensor, batched=max_batch_size > 0)]
            if field == "output" and tensor.name in labels:
                lines.append(f"  label_filename: {_quoted(_label_file(tensor.name))}")
            lines.append("}")
    if batching is not None and max_batch_size > 0:
        lines += ["dynamic_batching {", *_batching_lines(batching), "}"]
    # Only the Python backend is held to the CPU: the native one uses a GPU where there is one.
    kind = " kind: KIND_CPU" if platform == "python" else ""
    lines.append(f"instance_group {{ count: {instances}{kind} }}")
    for key, value in parameters.items():
        lines.append(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
        )
    return "\n".join(lines) + "\n"


def _tensor_lines(tensor: TensorInfo, *, batched: bool) -> Iterator[str]:
    dims = tensor.shape[1:] if batched else tensor.shape
    yield f"  name: {_quoted(tensor.name)}"
    yield f"  data_type: {tensor.dtype}"
    # Triton has no tensors without axes: one number a row travels as an axis of one.
    yield f"  dims: [ {', '.join(map(str, dims or (1,)))} ]"
    if not dims:
        yield "  reshape { shape: [ ] }"


def _batching_lines(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, bool):
            yield f"  {key}: {str(value).lower()}"
        elif isinstance(value, Sequence):
            yield f"  {key}: [ {', '.join(str(int(item)) for item in value)} ]"
        else:
            yield f"  {key}: {int(value)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _label_file(output: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', output)}_labels.txt"


def _write_model(
    folder: Path,
    source: Path,
    onnx: OnnxFile,
    config: str,
    labels: Mapping[str, Sequence[str]],
    platform: Platform,
) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    shutil.copyfile(source, version / "model.onnx")
    for name in onnx.external:
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, version / name)
    if platform == "python":
        shutil.copyfile(_TEMPLATE, version / "model.py")
    for output, names in labels.items():
        text = "".join(f"{name}\n" for name in names)
        (folder / _label_file(output)).write_text(text, encoding="utf-8")


def _move_in(stage: Path, root: Path, name: str) -> None:
    target = root / name
    if target.exists():
        (stage / "old").mkdir(exist_ok=True)
        target.rename(stage / "old" / name)
    (stage / "new" / name).rename(target)
