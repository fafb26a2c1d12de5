"""A transport without a server: this process runs the models of a repository itself."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

from sonic_coffea._version import __version__
from sonic_coffea.errors import (
    ConfigError,
    InferenceError,
    ModelNotFoundError,
    SonicError,
    nearest,
)
from sonic_coffea.server.repository import _manifest as manifests
from sonic_coffea.server.repository import check_agents, formats
from sonic_coffea.server.repository._config import FILE, read_config
from sonic_coffea.server.repository._sources import read_source
from sonic_coffea.transport import (
    DATATYPES,
    STRINGS,
    Contract,
    ModelEntry,
    ModelStatistics,
    Response,
    ServerMetadata,
    TensorSpec,
    kserve_name,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


Tensors = Mapping[str, "NDArray[Any]"]

# onnxruntime takes and gives strings of type str, messages hold bytes.
_decoded = np.vectorize(bytes.decode, otypes=[STRINGS])
_encoded = np.vectorize(str.encode, otypes=[STRINGS])


# A request has ended before anybody could cancel it.
_DONE = SimpleNamespace(cancel=lambda: None)


class InProcessTransport:
    """Runs the models of a repository in this process, with the contracts that a Triton gives.

    ONNX files are run by onnxruntime, trees by XGBoost or LightGBM, TorchScript by torch, and
    Python functions by themselves. Each model is loaded when it is first asked for, and stays.

    Parameters
    ----------
    url : str
        ``file:///path/of/the/repository``.
    threads : int, optional
        Threads of a model; by default, one for each core that this process may use.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is no such folder.
    """

    round_trip_s = 0.0

    def __init__(self, url: str, threads: int | None = None) -> None:
        self.address = url
        self.repository = Path(unquote(urlsplit(url).path))
        if not self.repository.is_dir():
            raise ConfigError(
                f"expected a model repository, got {self.repository}, which is not "
                "a folder on this machine"
            )
        self._threads = threads or _cores()
        self._loaded: dict[tuple[str, str], tuple[Contract, formats.Runner]] = {}
        self._loading = threading.Lock()
        self._statistics: defaultdict[tuple[str, str], ModelStatistics]
        self._statistics = defaultdict(ModelStatistics)

    def __enter__(self) -> InProcessTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def another(self) -> InProcessTransport:
        """Return this transport, as there is no connection to be renewed."""
        return self

    def close(self) -> None:
        """Forget the models."""
        self._loaded = {}

    def live(self, done: Callable[[SonicError | None], None]) -> None:
        """Say that this process lives."""
        done(None)

    def ready(self) -> bool:
        """Return True."""
        return True

    def info(self) -> ServerMetadata:
        """Return the name that stands for this process."""
        return ServerMetadata(name="in-process", version=__version__, extensions=("statistics",))

    def models(self) -> list[ModelEntry]:
        """Return the models of the repository, in the versions that are served."""
        folders = sorted(path for path in self.repository.glob("[!.]*") if path.is_dir())
        return [
            ModelEntry(name=folder.name, version=version, state="READY", reason="")
            for folder in folders
            for version in _served_versions(folder, _config(folder))
        ]

    def contract(self, model: str, version: str | None) -> Contract:
        """Return the contract of a model, which is loaded if need be.

        Raises
        ------
        sonic_coffea.errors.ModelNotFoundError
            If the repository lacks the model or the version.
        sonic_coffea.errors.ConfigError
            If the model cannot be loaded here.
        """
        return self._load(model, version)[0]

    def digest(self, model: str, version: str) -> str:
        """Return the digest of the files that were loaded, which stay in memory."""
        return self.contract(model, version).digest

    def labels(self, contract: Contract, version: str | None) -> dict[str, list[str]]:
        """Return no labels."""
        del contract, version
        return {}

    def statistics(self, model: str, version: str | None) -> ModelStatistics:
        """Return what was run of a model in this process."""
        return self._statistics[model, self.contract(model, version).version]

    def infer(
        self,
        contract: Contract,
        pack: Callable[[Any], Tensors],
        outputs: Sequence[str],
        *,
        nbytes: int = 0,
        version: str | None,
        request_id: str,
        done: Callable[[Response | SonicError], None],
    ) -> SimpleNamespace:
        """Pack rows, run the model, and call `done` before this returns."""
        del nbytes
        key = contract.model, version or contract.version
        context = {
            "server": self.address,
            "model": contract.model,
            "version": key[1],
            "request": request_id,
        }
        inputs = pack(None)
        outcome: Response | SonicError
        try:
            outcome = self._run(*key, inputs, tuple(outputs), context)
        except SonicError as error:
            outcome = error.at(**context)
            self._statistics[key] += ModelStatistics(failures=1)
        done(outcome)
        return _DONE

    def ask(
        self,
        contract: Contract,
        version: str | None,
        tensors: Tensors,
        *,
        requests: int = 1,
        in_flight: int = 1,
    ) -> tuple[Response, float]:
        """Run some tensors a number of times; return the last response and the total time."""
        del in_flight
        names = tuple(spec.name for spec in contract.outputs)
        version, context = version or contract.version, {"server": self.address}
        begun = time.perf_counter()
        for _ in range(requests):
            response = self._run(contract.model, version, tensors, names, context)
        return response, time.perf_counter() - begun

    def _run(
        self,
        model: str,
        version: str,
        inputs: Tensors,
        outputs: tuple[str, ...],
        context: Mapping[str, Any],
    ) -> Response:
        contract, run = self._load(model, version)
        feed = {n: _decoded(t) if t.dtype == STRINGS else t for n, t in inputs.items()}
        begun = time.perf_counter()
        try:
            given = run(feed, outputs)
        except Exception as error:  # a model may raise anything
            raise InferenceError(f"the model failed: {error!r}", **context) from error
        compute_s = time.perf_counter() - begun
        rows = len(next(iter(inputs.values()), ()))
        self._statistics[model, version] += ModelStatistics(
            rows=rows, requests=1, executions=1, compute_s=compute_s
        )
        lacking = [name for name in outputs if name not in given]
        if lacking:
            returned = ", ".join(map(repr, given)) or "nothing"
            raise InferenceError(
                f"output {lacking[0]!r} is declared, but the model returned {returned}", **context
            )
        tensors = {name: np.asarray(given[name]) for name in outputs}
        tensors = {n: _encoded(t) if t.dtype.kind in "OU" else t for n, t in tensors.items()}
        return Response(
            outputs=contract.received(tensors, context),
            version=version,
            sent_bytes=0,
            received_bytes=0,
        )

    def _load(self, model: str, version: str | None) -> tuple[Contract, formats.Runner]:
        """Return the contract of a version, and what runs it; it is loaded once."""
        folder = self.repository / model
        if version is None or (model, version) not in self._loaded:
            config = _config(folder)
            served = _served_versions(folder, config)
            if not served or version not in (None, *served):
                raise self._not_found(model, version, served)
            version = version or served[-1]
        with self._loading:
            if (model, version) not in self._loaded:
                self._loaded[model, version] = _open(folder, version, config, self._threads)
            return self._loaded[model, version]

    def _not_found(
        self, model: str, version: str | None, served: Sequence[str]
    ) -> ModelNotFoundError:
        if served:
            what = f"version {version} of model {model!r}; it has version {', '.join(served)}"
        else:
            what = f"model {model!r}; {nearest(model, {m.name for m in self.models()})}"
        return ModelNotFoundError(
            f"the repository does not have {what}",
            server=self.address,
            model=model,
            version=version,
        )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration of a model; an empty one if there is none."""
    return read_config(folder) if (folder / FILE).is_file() else {}


def _served_versions(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the versions that a Triton would serve, by number; the last one is the default."""
    versions = [str(number) for number in manifests.version_numbers(folder)]
    policy = config.get("version_policy", {})
    if "all" in policy:
        return versions
    if "specific" in policy:
        return [version for version in versions if version in policy["specific"]["versions"]]
    return versions[-int(policy.get("latest", {}).get("num_versions", 1)) :]


def _open(
    folder: Path, version: str, config: Mapping[str, Any], threads: int
) -> tuple[Contract, formats.Runner]:
    """Load a version of a model, by its manifest or by what its file describes."""
    check_agents(folder, config)
    place = folder / version
    manifest = manifests.read(place)
    # The configuration says which files the version was built of.
    parameter = config.get("parameters", {}).get(f"sha256.{version}", {})
    digest = str(parameter.get("string_value", ""))
    if manifest is None:
        manifest = _described(place)
    elif manifests.changes(place, manifest, shared=False):
        digest = ""
    path = place / manifest["file"]
    try:
        run = formats.FORMATS[manifest["kind"]].load(path, dict(manifest), threads)
    except ImportError as error:
        raise ConfigError(
            f"to run {path} in this process, install {error.name}: pip install {error.name}"
        ) from None
    except Exception as error:  # each library has errors of its own
        raise ConfigError(f"cannot load {path}: {error}") from error
    rows = int(config.get("max_batch_size", 0))
    return _contract(folder.name, version, manifest, path, rows, digest), run


def contract_of(file: Path, name: str) -> Contract:
    """Return the contract with which a model file would be served, without running the model.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If the file cannot be read, or does not describe its tensors.
    """
    from sonic_coffea.server.repository import Served

    source = read_source(name, Served(file), None)
    described = {"inputs": source.inputs, "outputs": source.outputs, **source.manifest}
    return _contract(name, "1", described, file, 0, "")


def _contract(
    name: str, version: str, described: Mapping[str, Any], path: Path, rows: int, digest: str
) -> Contract:
    takes, gives = (_specs(described[key], path) for key in ("inputs", "outputs"))
    free = all(spec.rows < 0 for spec in takes)
    return Contract(
        model=name,
        version=version,
        inputs=takes,
        outputs=gives,
        max_rows=rows or (None if free else 1),
        digest=digest,
        features=tuple(described.get("features", ())),
        stacks=rows > 0,
    )


def _described(place: Path) -> dict[str, Any]:
    """Return the entries of a manifest for a version that this package did not build."""
    from sonic_coffea.server.repository import Served

    file = place / "model.onnx"
    if not file.is_file():
        raise ConfigError(
            f"expected a model that build_repository wrote, or {file}, got neither in {place}"
        )
    source = read_source(place.parent.name, Served(file), None)
    return {"kind": "onnx", "file": file.name, "inputs": source.inputs, "outputs": source.outputs}


def _specs(tensors: Sequence[Mapping[str, Any]], path: Path) -> tuple[TensorSpec, ...]:
    for tensor in tensors:
        if tensor["dtype"] not in (*DATATYPES.values(), "bytes"):
            raise ConfigError(f"{path} has a tensor {tensor['name']!r} of {tensor['dtype']}")
    return tuple(
        TensorSpec(
            name=tensor["name"],
            datatype=kserve_name(
                np.dtype(STRINGS if tensor["dtype"] == "bytes" else tensor["dtype"])
            ),
            shape=tuple(tensor["shape"][1:]),
            rows=tensor["shape"][0],
        )
        for tensor in tensors
    )
