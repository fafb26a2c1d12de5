"""The networks of a model repository, served by this process where no Triton can run."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError, ServerStartError
from sonic_coffea.server._probe import ServerMetadata, fetch_metadata
from sonic_coffea.server.repository import _manifest
from sonic_coffea.transport import local_state, read_model_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

    from sonic_coffea.server.in_process import KServeModel

__all__ = ["InProcessServer", "cores"]

logger = logging.getLogger(__name__)

_HEADER = "sonic-secret"
_FILE = "model.onnx"
# What onnxruntime calls types, and numpy.
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{f"tensor({sign}int{n})": f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)},
}


class InProcessServer:
    """A server on loopback, in this process, for the ONNX files of a model repository.

    onnxruntime runs them; there is no Triton, so that it starts on any machine: old ones, laptops
    of other makes, containers without a compiler. It serves the latest version of each model, of
    those that are pinned if some are, one request after another, and does not put requests
    together. As with `LocalServer`, its URL is all that other processes of the same user need.

    Parameters
    ----------
    repository : path-like
        The model repository.
    threads : int, optional
        Threads of the networks; by default one for each core that this process may use.
    port : int, optional
        Where it listens; by default at a free one.

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
        from sonic_coffea.server.in_process import KServeServer

        threads = threads or cores()
        turn = threading.Lock()
        models, others = {}, []
        for folder in sorted(self.repository.iterdir()) if self.repository.is_dir() else ():
            config = _config(folder)
            path = _network(folder, config)
            if path is not None:
                models[folder.name] = _load(path, config, threads, turn)
            elif folder.is_dir() and not folder.name.startswith("."):
                others.append(folder.name)
        if not models:
            raise ConfigError(
                f"expected a model repository with ONNX files, got {self.repository}, which has "
                f"{'others: ' + ', '.join(others) if others else 'none'}"
            )
        if others:
            logger.warning("without Triton, these are not served: %s", ", ".join(others))
        secret = secrets.token_hex(32)
        self._server = KServeServer(
            models, name="onnxruntime", headers={_HEADER: secret}, port=port
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._server.url

    @property
    def metadata(self) -> ServerMetadata:
        """Name, version, extensions and models."""
        return fetch_metadata(self.url, self._server.headers)

    def start(self) -> Self:
        """Listen; harmless when it does."""
        self._server.start()
        pid = os.getpid()
        local_state.register(
            local_state.ServerRecord(
                url=self.url,
                pid=pid,
                start_ticks=local_state.process_start_ticks(pid),
                guard_pid=None,
                header=_HEADER,
                secret=self._server.headers[_HEADER],
                repository=str(self.repository),
                log="",
                started=time.time(),
                shm_prefix="",
            )
        )
        return self

    def stop(self) -> None:
        """Listen no more; harmless when it does not."""
        local_state.remove(self.url)
        self._server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<InProcessServer repository={str(self.repository)!r}>"


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.pbtxt"
    return read_model_config(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _network(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Return the ONNX file of the version that is served."""
    pinned = config.get("version_policy", {}).get("specific", {}).get("versions")
    versions = sorted(
        (p for p in folder.glob("*") if p.is_dir() and p.name.isdigit()), key=lambda p: int(p.name)
    )
    versions = [p for p in versions if pinned is None or p.name in pinned]
    if not versions:
        return None
    about = _manifest.read(versions[-1])
    if about is not None and about["kind"] != "onnx":
        return None
    path = versions[-1] / (_FILE if about is None else about["file"])
    return path if path.is_file() else None


def _load(path: Path, config: Mapping[str, Any], threads: int, turn: threading.Lock) -> KServeModel:
    from sonic_coffea.server.in_process import KServeModel

    try:
        import onnxruntime
    except ImportError:
        raise ServerStartError(
            "to serve ONNX files without a Triton, this process needs onnxruntime: "
            "pip install onnxruntime"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            str(path), sess_options=options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # noqa: BLE001  onnxruntime has many
        raise ConfigError(f"onnxruntime cannot load {path}: {error}") from None
    rows = int(config.get("max_batch_size", 0))

    def run(inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        names = [tensor.name for tensor in session.get_outputs()]
        with turn:
            return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    return KServeModel(
        inputs=_tensors(session.get_inputs(), rows, path),
        outputs=_tensors(session.get_outputs(), rows, path),
        function=run,
        max_rows=rows,
        versions=(path.parent.name,),
        digest=_digest(config, path.parent.name),
    )


def _digest(config: Mapping[str, Any], version: str) -> str:
    """Return what the configuration says of the version's files, as a Triton passes it on."""
    parameter = config.get("parameters", {}).get(f"sha256.{version}", {})
    return str(parameter.get("string_value", ""))


def _tensors(tensors: Any, rows: int, path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for tensor in tensors:
        if tensor.type not in _DTYPES:
            raise ConfigError(f"{path} has a tensor {tensor.name!r} of {tensor.type}")
        shape = tuple(n if isinstance(n, int) else -1 for n in tensor.shape)
        found[tensor.name] = (_DTYPES[tensor.type], shape[1:] if rows else shape)
    return found
