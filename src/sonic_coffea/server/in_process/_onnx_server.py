"""Serves the networks of a model repository in this process, where no Triton can run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server._folders import ServerFolder, ServerRecord
from sonic_coffea.server._probe import fetch_metadata
from sonic_coffea.server.in_process._grpc_server import KServeModel, KServeServer
from sonic_coffea.server.repository import Served, _manifest, check_agents
from sonic_coffea.server.repository._sources import read_source
from sonic_coffea.server.repository.formats import _onnx
from sonic_coffea.transport import (
    DATATYPES,
    STRINGS,
    ServerMetadata,
    read_model_config,
)

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

# onnxruntime takes strings of type str.
_decoded = np.vectorize(bytes.decode, otypes=[STRINGS])


class InProcessServer(KServeServer):
    """A server in this process, for the ONNX files of a model repository.

    onnxruntime runs them without a Triton, so the server starts on any machine, such as an old one,
    or a laptop with another processor. It serves the latest version of each model, or the latest
    pinned version. It runs one request after another, without batching. As a `LocalServer`, it
    listens at a Unix socket that only processes of this user on this machine reach.

    Parameters
    ----------
    repository : path-like
        The model repository.
    threads : int, optional
        Threads of the networks; by default, one for each core that this process may use.
    port : int, optional
        A port of loopback, which all users of this machine can reach, instead of the socket.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If there is no ONNX file in the repository, or one that onnxruntime cannot load.
    sonic_coffea.errors.ServerStartError
        If there is no onnxruntime.
    """

    def __init__(
        self,
        repository: str | os.PathLike[str],
        *,
        threads: int | None = None,
        port: int | None = None,
    ) -> None:
        self.repository = Path(repository).absolute()
        lock = threading.Lock()
        folders = sorted(path for path in self.repository.glob("[!.]*") if path.is_dir())
        networks = {path.name: _model(path, threads or cores(), lock) for path in folders}
        models = {name: model for name, model in networks.items() if model is not None}
        others = [name for name in networks if name not in models]
        if not models:
            raise ConfigError(
                f"expected a model repository with ONNX files, got {self.repository}, which has "
                f"{'others: ' + ', '.join(others) if others else 'none'}"
            )
        if others:
            logger.warning("without Triton, these are not served: %s", ", ".join(others))
        super().__init__(models, name="onnxruntime", port=port)
        # Windows has no Unix sockets.
        sockets = port is None and hasattr(os, "getuid")
        self._folder = ServerFolder() if sockets else None

    @property
    def metadata(self) -> ServerMetadata:
        """Name, version, extensions and models."""
        return fetch_metadata(self.url)

    @property
    def url(self) -> str:
        """Where it listens: ``unix:PATH``, or ``grpc://127.0.0.1:PORT`` if it has a port."""
        return f"unix:{self._folder.path}/grpc" if self._folder else super().url

    def start(self) -> Self:
        """Listen; harmless when it does."""
        super().start()
        if self._folder is not None:
            repository = str(self.repository)
            self._folder.record(ServerRecord(url=self.url, pid=os.getpid(), repository=repository))
        return self

    def stop(self) -> None:
        """Listen no more; harmless when it does not."""
        super().stop()
        if self._folder is not None:
            self._folder.close()

    def _listen(self, server: Any) -> None:
        if self._folder is None:
            super()._listen(server)
        else:
            self._folder.open()
            server.add_insecure_port(self.url)

    def __repr__(self) -> str:
        return f"<InProcessServer repository={str(self.repository)!r}>"


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _model(folder: Path, threads: int, lock: threading.Lock) -> KServeModel | None:
    """Return the network of a folder, in the version that is served; None without a network."""
    file = folder / "config.pbtxt"
    config = read_model_config(file.read_text(encoding="utf-8")) if file.is_file() else {}
    pinned = config.get("version_policy", {}).get("specific", {}).get("versions")
    versions = [str(number) for number in _manifest.version_numbers(folder)]
    versions = [version for version in versions if pinned is None or version in pinned]
    manifest = _described(folder / versions[-1]) if versions else None
    if manifest is None:
        return None
    check_agents(folder, config)
    path = folder / versions[-1] / manifest["file"]
    names = tuple(tensor["name"] for tensor in manifest["outputs"])
    try:
        network = _onnx.load(path, dict(manifest), threads)
    except ImportError:
        raise ServerStartError(
            "to serve ONNX files without a Triton, this process needs onnxruntime: "
            "pip install onnxruntime"
        ) from None
    except Exception as error:  # noqa: BLE001  onnxruntime has many
        raise ConfigError(f"onnxruntime cannot load {path}: {error}") from None

    def run(inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        readable = {n: _decoded(t) if t.dtype == STRINGS else t for n, t in inputs.items()}
        with lock:
            return network(readable, names)

    rows = int(config.get("max_batch_size", 0))
    # A Triton passes on what the configuration says of the version's files.
    digest = config.get("parameters", {}).get(f"sha256.{versions[-1]}", {})
    return KServeModel(
        inputs=_tensors(manifest["inputs"], rows, path),
        outputs=_tensors(manifest["outputs"], rows, path),
        function=run,
        max_rows=rows,
        versions=(versions[-1],),
        digest=str(digest.get("string_value", "")),
    )


def _described(version: Path) -> Mapping[str, Any] | None:
    """Return the manifest of a network, or what its file describes; None without a network."""
    manifest = _manifest.read(version)
    if manifest is not None:
        return manifest if manifest["kind"] == "onnx" else None
    if not (version / "model.onnx").is_file():
        return None
    source = read_source(version.parent.name, Served(version / "model.onnx"), None)
    return {"file": "model.onnx", "inputs": source.inputs, "outputs": source.outputs}


def _tensors(
    tensors: Sequence[Mapping[str, Any]], rows: int, path: Path
) -> dict[str, tuple[str, tuple[int, ...]]]:
    for tensor in tensors:
        if tensor["dtype"] not in (*DATATYPES.values(), "bytes"):
            raise ConfigError(f"{path} has a tensor {tensor['name']!r} of {tensor['dtype']}")
    return {t["name"]: (t["dtype"], tuple(t["shape"][1 if rows else 0 :])) for t in tensors}
