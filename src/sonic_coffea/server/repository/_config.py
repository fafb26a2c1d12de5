"""What describes models in a repository: configurations in Triton's format, and manifests.

A version's manifest has the checksums and the origin of its files, and is written beside them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from sonic_coffea.errors import ConfigError, expect, require
from sonic_coffea.server.repository import _runner
from sonic_coffea.server.repository._sources import TRITON_TYPES, Manifest, Served, Tensor, is_list
from sonic_coffea.transport import read_model_config, write_model_config

FILE = "config.pbtxt"
_AGENTS = "model_repository_agents"
Config = dict[str, Any]
Labels = Mapping[str, Mapping[str, Sequence[str]] | Sequence[str]]
Versions = Literal["all", "latest"] | Sequence[int]
# The default of `max_batch_size`: as many rows as have these bytes, within these limits.
_ROWS, _MOST_ROWS, _REQUEST_BYTES = 1024, 65_536, 1_000_000
# The entries that each manifest has.
_ENTRIES = {"kind": str, "file": str, "inputs": list, "outputs": list, "built": str, "files": dict}
# The folders that Triton takes for versions.
_VERSION = re.compile(r"[1-9][0-9]*")
_NUMPY_TYPES = {triton: numpy for numpy, triton in TRITON_TYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Models that a server runs one after another, called as one.

    Parameters
    ----------
    steps : sequence of tuple
        Each step is ``(model, {model's input: tensor}, {model's output: tensor})``; the names of
        the tensors are the ensemble's own. A model is built by the same call as the ensemble, or
        is in the repository already.
    inputs, outputs : sequence of str, optional
        Inputs and outputs of the ensemble. By default, the inputs are the tensors that no step
        returns, and the outputs those that no step takes. A name that no step has is an error.
    """

    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]
    inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None


def read_config(folder: Path) -> Config:
    """Return the configuration in a model's folder; an empty one if there is none."""
    path = folder / FILE
    try:
        return read_model_config(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"expected a model configuration in {path}: {error}") from None


def check_agents(folder: Path, config: Mapping[str, Any]) -> None:
    """Compare the checksums of a model's files, as its repository agent would.

    Raise if a checksum differs, or the agent is not ``checksum``.
    """
    for agent in config.get(_AGENTS, {}).get("agents", ()):
        name = agent.get("name")
        for key, expected in agent.get("parameters", {"": ""}).items():
            method, _, file = key.partition(":")
            if name != "checksum" or method != "MD5" or not (folder / file).is_file():
                raise ConfigError(
                    f"model {folder.name!r} asks for repository agent {name!r} with {key!r}; "
                    "without NVIDIA's container there is only 'checksum', with 'MD5:' and the "
                    "name of a file of the model: choose a container as the runtime"
                )
            content = (folder / file).read_bytes()
            got = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if got != expected:
                raise ConfigError(
                    f"expected {folder / file} to have the MD5 checksum {expected} of its "
                    f"config.pbtxt, got {got}: the file is damaged, or of another version"
                )


def link_models(repository: Path, link: Path, arguments: Sequence[str]) -> None:
    """Make a link to a repository, or a folder of links if models ask for agents.

    The server from PyPI has none. The models are checked here, and served without.
    """
    files = repository.glob(f"*/{FILE}")
    asking = [file.parent for file in files if _AGENTS.encode() in file.read_bytes()]
    if not asking:
        link.symlink_to(repository)
        return
    if "--model-control-mode=poll" in arguments:
        raise ConfigError(
            "models that ask for repository agents are checked when the server starts, which "
            "poll=True cannot do; leave it out"
        )
    shutil.copytree(repository, link, copy_function=os.symlink)
    for folder in asking:
        config = read_config(folder)
        check_agents(folder, config)
        config.pop(_AGENTS, None)  # it may be in a comment
        file = link / folder.name / FILE
        file.unlink()
        file.write_text(write_model_config(config), encoding="utf-8")


def shared_config(
    instances: int, threads: int | None, *, dynamic_batching: bool | Mapping[str, Any] | None
) -> Config:
    """Return what the configurations of all models have in common."""
    is_known = isinstance(dynamic_batching, bool | Mapping | None)
    expect(is_known, "dynamic_batching as True, False or a dict of options", dynamic_batching)
    check_integer("instances", instances, 1)
    check_integer("threads", threads, 1)
    batching = {} if dynamic_batching is True else dynamic_batching
    config: Config = {"dynamic_batching": batching} if isinstance(batching, Mapping) else {}
    if threads is not None:
        # Each backend knows one of them.
        config["parameters"] = {key: {"string_value": str(threads)} for key in _runner.THREADS}
    return {**config, "instance_group": [{"count": instances}]}


def model_config(
    name: str, served: Served, manifest: Manifest, shared: Config, *, warmup: bool
) -> Config:
    """Return the configuration of a model, without its labels and versions."""
    limit = served.max_batch_size
    if limit is None:
        limit = _rows_of_request([*manifest["inputs"], *manifest["outputs"]])
    check_integer("max_batch_size", limit, 0)
    if limit and manifest["kind"] == "onnx":
        _check_first_axes(manifest)
    tensors = tensor_config(manifest, limit if manifest["batched"] else 0)
    config = {"name": name, "backend": manifest["platform"], **tensors, **copy.deepcopy(shared)}
    if not config["max_batch_size"]:
        config.pop("dynamic_batching", None)
    if manifest["platform"] == "python":
        # The native backends use a GPU where there is one.
        config["instance_group"][0]["kind"] = "KIND_CPU"
    sample = {
        t["name"]: {"data_type": t["data_type"], "dims": t["dims"], "zero_data": True}
        for t in config["input"]
    }
    for tensor, shape in (served.warmup or {}).items():
        expect(isinstance(shape, (list, tuple)), f"a shape as warmup of {tensor!r}", shape)
        _member(sample, tensor, "input")["dims"] = list(shape) or [1]
    # Not every length of a free axis need be one that the model can run.
    if warmup and not any(-1 in tensor["dims"] for tensor in sample.values()):
        config["model_warmup"] = [{"name": "zeros", "batch_size": 1, "inputs": sample}]
    return config


def _rows_of_request(tensors: list[Tensor]) -> int:
    """Return the default of `max_batch_size`."""
    lengths = [length for tensor in tensors for length in tensor["shape"][1:]]
    if -1 in lengths or any(tensor["dtype"] == "bytes" for tensor in tensors):
        return _ROWS
    row: int = sum(np.dtype(t["dtype"]).itemsize * math.prod(t["shape"][1:]) for t in tensors)
    return min(max(_ROWS, _REQUEST_BYTES // max(row, 1)), _MOST_ROWS)


def ensemble_config(
    name: str, ensemble: Ensemble, configs: Mapping[str, Config]
) -> tuple[Config, Manifest]:
    """Return the configuration of an ensemble of models with these configurations.

    Triton checks, as it loads an ensemble, whether its tensors connect.
    """
    consumed: dict[str, Tensor] = {}
    produced: dict[str, Tensor] = {}
    limits, steps = [], []
    try:
        for model, inputs, outputs in ensemble.steps:
            config = _member(configs, model, "model")
            limits.append(int(config.get("max_batch_size", 0)))
            rows = [-1] if limits[-1] else []
            for kind, names, known in (("input", inputs, consumed), ("output", outputs, produced)):
                specs = {t["name"]: t for t in config.get(kind, ())}
                for key, tensor in names.items():
                    spec = _member(specs, key, f"{kind} of {model!r}")
                    dtype, dims = _NUMPY_TYPES[spec["data_type"]], map(int, spec["dims"])
                    described = {"name": tensor, "dtype": dtype, "shape": [*rows, *dims]}
                    known.setdefault(tensor, described)
            step = {"model_name": model, "model_version": -1}
            steps.append({**step, "input_map": dict(inputs), "output_map": dict(outputs)})
    except (AttributeError, TypeError, ValueError):
        form = "steps as (model, {its input: tensor}, {its output: tensor})"
        raise ConfigError(f"expected {form}, got {ensemble.steps!r}") from None
    begins, ends = ensemble.inputs, ensemble.outputs
    if begins is None:
        begins = [tensor for tensor in consumed if tensor not in produced]
    if ends is None:
        ends = [tensor for tensor in produced if tensor not in consumed]
    expect(begins and ends, "steps with a tensor to begin and one to end at", ensemble.steps)
    # An ensemble is batched only if all its steps are.
    batch = min(limits)
    manifest = {
        "kind": "ensemble",
        "file": "",
        "platform": "ensemble",
        "batched": batch > 0,
        "inputs": [_member(consumed, tensor, "input of the steps") for tensor in begins],
        "outputs": [_member(produced, tensor, "output of the steps") for tensor in ends],
    }
    scheduling = {"platform": "ensemble", "ensemble_scheduling": {"step": steps}}
    return {"name": name, **tensor_config(manifest, batch), **scheduling}, manifest


def _check_first_axes(manifest: Manifest) -> None:
    """Refuse a network that was exported for one number of rows: others would fail one by one."""
    axes = {t["name"]: {0: "rows"} for t in (*manifest["inputs"], *manifest["outputs"])}
    for tensor in manifest["inputs"]:
        if tensor["shape"][0] > 0:
            raise ConfigError(
                f"input {tensor['name']!r} has a first axis of fixed length, {tensor['shape'][0]}, "
                "and takes no other number of rows; export it with an axis of any length: "
                f"torch.onnx.export(..., dynamic_axes={axes}). If this axis does not count rows, "
                "say so by Served(file, max_batch_size=0), and declare Model(one_request_per=...)"
            )


def version_policy(versions: Versions | None) -> Config:
    if versions is None or versions == "all":
        return {"all": {}}
    if versions == "latest":
        return {"latest": {"num_versions": 1}}
    expect(is_list(versions) and versions, "versions as 'all', 'latest' or their numbers", versions)
    for number in versions:
        check_integer("each of versions", number, 1)
    return {"specific": {"versions": list(versions)}}


def add_labels(
    config: Config, manifest: Manifest, labels: Mapping[str, Sequence[str]] | Sequence[str] | None
) -> dict[str, str]:
    """Add the labels of outputs to a configuration; return the files that hold them, by name."""
    lengths = {t["name"]: [1, *t["shape"]][-1] for t in manifest["outputs"]}
    outputs = {t["name"]: t for t in config["output"]}
    by_output: Any = {} if labels is None else labels
    if len(lengths) == 1 and is_list(by_output):
        by_output = dict.fromkeys(lengths, by_output)
    expected = f"labels as a mapping of output name to labels ({', '.join(lengths)})"
    expect(isinstance(by_output, Mapping), expected, labels)
    files = {}
    for output, names in by_output.items():
        length = _member(lengths, output, "output")
        are_names = is_list(names) and all(
            isinstance(n, str) and not {"\n", "\r"} & set(n) for n in names
        )
        of = f"for output {output!r}"
        expect(are_names, f"labels {of} as a list of names without line breaks", names)
        expect(length in (-1, len(names)), f"{length} labels {of}", names)
        file = outputs[output]["label_filename"] = f"{quote(output, safe='')}_labels.txt"
        files[file] = "".join(f"{label}\n" for label in names)
    return files


def tensor_config(manifest: Manifest, batch: int) -> Config:
    """Return the tensors of a configuration, for batches of up to `batch` rows; 0: no batches."""

    def spec(tensor: Tensor) -> Config:
        dims = tensor["shape"][1:] if batch else tensor["shape"]
        # Triton has no tensors without axes: one number a row travels as an axis of one.
        shape = {"dims": dims} if dims else {"dims": [1], "reshape": {"shape": []}}
        return {"name": tensor["name"], "data_type": TRITON_TYPES[tensor["dtype"]], **shape}

    return {
        "max_batch_size": batch,
        "input": [spec(tensor) for tensor in manifest["inputs"]],
        "output": [spec(tensor) for tensor in manifest["outputs"]],
    }


def check_integer(option: str, value: object, minimum: int) -> None:
    is_valid = value is None or (type(value) is int and value >= minimum)
    expect(is_valid, f"{option} to be an integer >= {minimum}", value)


def _member(members: Mapping[str, Any], name: str, what: str) -> Any:
    require([name], members, f"no {what} is called")
    return members[name]


def read_manifest(folder: Path) -> dict[str, Any] | None:
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
    served_digest = parameters.get(f"sha256.{folder.name}", {}).get("string_value")
    return _runner.changes(folder, manifest, served_digest)


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
    root = Path(path).expanduser()
    entries = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        for number in version_numbers(folder):
            manifest = read_manifest(folder / str(number))
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
        _runner.check_unchanged(entry["changes"], ConfigError)
