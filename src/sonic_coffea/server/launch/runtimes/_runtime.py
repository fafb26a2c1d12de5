"""The interface of a runtime: whether this machine has it, and how it runs a Triton."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is to be served, and how.

    Parameters
    ----------
    arguments : sequence of str
        Those of ``tritonserver`` that do not depend on the runtime.
    folder : Path
        Where its socket is.
    shared_memory : str
        A name of this server alone: that of its folder in /dev/shm, which takes the place of
        /dev/shm for the server.
    threads : int or None
        Threads that a model may use for one request.
    env : mapping
        More environment variables.
    """

    arguments: Sequence[str]
    repository: Path
    folder: Path
    shared_memory: str
    threads: int | None
    env: Mapping[str, str] = dataclasses.field(repr=False)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the server and its models."""
        threads = {} if self.threads is None else dict.fromkeys(_THREADS, str(self.threads))
        return {**threads, **self.env}

    def shm_prefix(self, backend: str) -> str:
        """Return the argument by which a backend's files are told where /dev/shm is not its own."""
        return f"--backend-config={backend},shm-region-prefix-name={self.shared_memory}_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command line that serves, and the one that cleans up when it has ended.

    Attributes
    ----------
    mounts : bool
        Whether the supervisor has to mount the server's own /dev/shm.
    """

    argv: list[str]
    env: dict[str, str] = dataclasses.field(repr=False)
    cleanup: list[str] | None = None
    mounts: bool = False


class Runtime(Protocol):
    """A runtime, constructed with its name and `choose`'s options."""

    @property
    def python(self) -> Path:
        """An interpreter for the supervisor."""

    def reason_against(self) -> str | None:
        """Say why this machine cannot run it; None if it can."""

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Fetch what this machine lacks of it, and say each stage."""

    def launch(self, serving: Serving) -> Launch:
        """Return the command line that serves a repository."""
