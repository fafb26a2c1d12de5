"""A transport without a server: this process runs the models of a repository itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from dask.system import cpu_count
from numpy.typing import NDArray

from sonic_coffea._files import FileState, read_text, state_of
from sonic_coffea.errors import ConfigError, ContractError, InferenceError, SonicError, expect
from sonic_coffea.server.repository import _config, _runner
from sonic_coffea.server.repository._sources import Served, naming, read_source
from sonic_coffea.transport import (
    Contract,
    ModelEntry,
    Response,
    Transport,
    configured_contract,
    not_found,
)

Tensors = Mapping[str, NDArray[Any]]


class Loaded(NamedTuple):
    """A version of a model, and the states of its files before they were read."""

    contract: Contract
    run: _runner.Runner
    files: Mapping[Path, FileState]


class InProcessTransport(Transport):
    """Runs the models of a repository in this process, with the contracts that a Triton gives.

    ONNX files are run by onnxruntime, trees by XGBoost or LightGBM, TorchScript by torch, and
    Python functions by themselves. Each model is loaded when it is first asked for, and again when
    it was built again, or when its file or its configuration was replaced.

    Parameters
    ----------
    url : str
        ``file:///path/of/the/repository``.

    Attributes
    ----------
    threads : int
        Requests that run at the same time, and threads of a model: one for each core that this
        process may use.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is no such folder.
    """

    def __init__(self, url: str) -> None:
        self.address = url
        path = unquote_to_bytes(os.fsencode(url.removeprefix("file://")))
        self.repository = Path(os.fsdecode(path))
        is_folder = self.repository.is_dir()
        expect(is_folder, "a model repository, a folder of this machine", str(self.repository))
        self.threads = cpu_count()
        self._loaded: dict[tuple[str, str], Loaded] = {}
        # The digests of contracts that were given.
        self._digests: set[str] = set()
        self._loading = threading.Lock()

    def close(self) -> None:
        """Forget the models."""
        self._loaded = {}

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Say that this process lives."""
        done(None)

    def index(self) -> list[ModelEntry]:
        """Return the models of the repository, in the versions that are served."""
        return [
            ModelEntry(name=folder.name, version=version, state="READY", reason="")
            for folder in sorted(self.repository.glob("[!.]*"))
            for version in _served_versions(folder)
        ]

    def metadata(self, model: str, version: str | None) -> Contract:
        """Return the contract of a model, which is loaded if need be.

        Raises
        ------
        sonic_coffea.errors.ModelNotFoundError
            If the repository lacks the model or the version.
        sonic_coffea.errors.ConfigError
            If the model cannot be loaded here.
        """
        return self._load(model, version).contract

    def labels(self, contract: Contract) -> dict[str, list[str]]:
        """Return the labels of outputs whose configuration names a file of them."""
        folder = self.repository / contract.model
        outputs = _config.read_config(folder).get("output", ())
        files = {o["name"]: folder / o["label_filename"] for o in outputs if "label_filename" in o}
        texts = {output: read_text(file, "the labels in") for output, file in files.items()}
        return {output: text.removesuffix("\n").split("\n") for output, text in texts.items()}

    def infer(
        self,
        contract: Contract,
        inputs: Tensors,
        outputs: Sequence[str],
        *,
        version: str | None,
        request_id: str,
        done: Callable[[Response | SonicError], None],
    ) -> Callable[[], None]:
        """Run the model, and call `done` before this returns: then there is nothing to cancel."""
        version = version or contract.version
        outcome: Response | SonicError
        try:
            outcome = self._run(contract, version, inputs, tuple(outputs))
        except SonicError as error:
            where = {"server": self.address, "request": request_id}
            outcome = error.at(**where, model=contract.model, version=version)
        done(outcome)
        return lambda: None

    def _run(
        self, expected: Contract, version: str, inputs: Tensors, outputs: tuple[str, ...]
    ) -> Response:
        contract, run, _ = self._load(expected.model, version)
        # A fallback without a digest may stand in for servers that have one.
        is_known = contract.digest or expected.digest in self._digests
        if expected.digest and is_known and expected.digest != contract.digest:
            raise ContractError(
                "the files of this version were replaced while they were in use; the next call is "
                "scored by the new ones"
            )
        try:
            tensors = run(dict(inputs), outputs)
        except (Exception, SystemExit) as error:  # a model may raise anything
            raise InferenceError(f"the model failed: {error!r}") from error
        return Response(
            outputs=contract.received(tensors),
            version=contract.version,
            sent_bytes=0,
            received_bytes=0,
        )

    def _load(self, model: str, version: str | None) -> Loaded:
        """Return a version that is loaded: once, and again when its files were replaced."""
        with self._loading:
            folder = self.repository / model
            if version is None or (model, version) not in self._loaded:
                served = _served_versions(folder)
                if not served or version not in (None, *served):
                    raise not_found(
                        model, version, self.index(), server=self.address, place="repository"
                    )
                version = version or served[-1]
            loaded = self._loaded.get((model, version))
            # Also if they were replaced while they were read.
            while loaded is None or _are_replaced(loaded.files):
                loaded = _open(folder, version, self.threads)
                self._loaded[model, version] = loaded
                self._digests.add(loaded.contract.digest)
            return loaded


def _are_replaced(files: Mapping[Path, FileState]) -> bool:
    # Files that cannot be read at the moment, or that were removed, are no others.
    states = ((state_of(path), before) for path, before in files.items())
    return any(now is not None and now != before for now, before in states)


def _served_versions(folder: Path) -> list[str]:
    """Return the versions that a Triton would serve, by number; the last one is the default."""
    versions = [str(number) for number in _config.version_numbers(folder)]
    policy = _config.read_config(folder).get("version_policy", {})
    if "all" in policy:
        return versions
    if "specific" in policy:
        specific = policy["specific"].get("versions", ())
        return [version for version in versions if version in specific]
    return versions[-int(policy.get("latest", {}).get("num_versions", 1)) :]


def _open(folder: Path, version: str, threads: int) -> Loaded:
    """Load a version of a model, by its manifest or by what its file describes."""
    place = folder / version
    present = filter(Path.is_file, place.rglob("*"))
    paths = (folder / _config.FILE, place / _runner.MANIFEST, *present)
    files = {path: state_of(path) for path in paths}
    config, manifest = _config.read_config(folder), _config.read_manifest(place)
    _config.check_agents(folder, config)
    # Else the configuration does not say which files the version is of.
    is_as_built = manifest is not None and not _config.changes(place, manifest)
    backend = config.get("backend") or config.get("platform", "onnxruntime")
    if backend == "ensemble":
        raise ConfigError(f"{folder} is an ensemble, which only a server runs: use LocalServer")
    if manifest is None:
        file = place / (config.get("default_model_filename") or "model.onnx")
        if not file.is_file() or not backend.startswith("onnxruntime"):
            raise ConfigError(
                f"expected a model that build_repository wrote, or {file} for the backend "
                f"onnxruntime, got neither in {place} (backend {backend})"
            )
        described, _ = read_source(Served(file))
        manifest = {**described, "file": file.name}
    path = place / manifest["file"]
    try:
        run = _runner.load(path, manifest, threads)
    except ImportError as error:
        raise ConfigError(
            f"to run {path} in this process, install {error.name}: pip install {error.name}"
        ) from None
    except (Exception, SystemExit) as error:  # each library has errors of its own
        raise ConfigError(f"cannot load {path}: {error!r}") from error
    rows = int(config.get("max_batch_size", 0))
    config = {**_config.tensor_config(manifest, rows), **config}
    # In the model's order; optional inputs of a file are in the configuration alone.
    inputs = [tensor["name"] for tensor in config["input"]]
    taken = {t["name"]: t["reshape"].get("shape", ()) for t in config["input"] if "reshape" in t}
    returned = {t["name"]: t["dims"] for t in config["output"] if "reshape" in t}

    def shaped(tensor: NDArray[Any], shape: Sequence[Any] | None) -> NDArray[Any]:
        if shape is None:
            return tensor
        return tensor.reshape(*tensor.shape[: bool(rows)], *map(int, shape))

    def run_rows(feed: dict[str, Any], requested: Sequence[str]) -> dict[str, Any]:
        feed = {name: shaped(feed[name], taken.get(name)) for name in inputs}
        outputs = run(feed, requested)
        return {name: shaped(tensor, returned.get(name)) for name, tensor in outputs.items()}

    contract = configured_contract(folder.name, version, config)
    return Loaded(contract if is_as_built else replace(contract, digest=""), run_rows, files)


def contract_of(file: Path, name: str) -> Contract:
    """Return the contract with which a model file would be served, without running the model.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If the file cannot be read, or does not describe its tensors.
    """
    with naming(name):
        described, _ = read_source(Served(file))
    contract = configured_contract(
        name, "1", _config.tensor_config(described, int(described["batched"]))
    )
    max_rows = None if described["batched"] else contract.max_rows
    features = tuple(described.get("features", ()))
    return replace(contract, max_rows=max_rows, stacks=False, features=features)
