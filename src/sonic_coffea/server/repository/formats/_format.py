"""What a module of a format offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from pathlib import Path

    from sonic_coffea.server.repository._served import Served
    from sonic_coffea.server.repository._tensors import Declaration

__all__ = ["Contents", "Format", "Runner"]

# Input tensors by name, and which outputs are wanted, to output tensors by name.
Runner = Callable[[dict[str, Any], tuple[str, ...]], dict[str, Any]]


class Contents(TypedDict, total=False):
    """What a format reads from a model's source.

    ``files`` are names in the version's folder and what is copied there, first the one that
    `Format.load` opens; ``inputs`` and ``outputs`` the tensors, where the source says them;
    ``manifest`` is what else the manifest says.
    """

    files: Mapping[str, Path]
    inputs: Declaration
    outputs: Declaration
    manifest: Mapping[str, Any]


class Format(Protocol):
    """A module with these names.

    Attributes
    ----------
    SUFFIXES : tuple of str
        How the names of its files end.
    NATIVE : str
        The native backend of NVIDIA's container that runs it, or nothing.
    PREFERS_NATIVE : bool
        Whether that one is used where nobody says.
    """

    @property
    def SUFFIXES(self) -> tuple[str, ...]: ...  # noqa: N802
    @property
    def NATIVE(self) -> str: ...  # noqa: N802
    @property
    def PREFERS_NATIVE(self) -> bool: ...  # noqa: N802

    def read(self, served: Served) -> Contents:
        """Return what is in a source; a ValueError says what is wrong with it."""

    def load(self, path: Path, manifest: dict[str, Any], threads: int) -> Runner:
        """Return what runs the model in the server; of 0 threads, it may use any number."""
