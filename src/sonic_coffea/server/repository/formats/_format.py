"""The interface of a format's module: `read` here, and `load` in the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from sonic_coffea.server.repository._served import Declaration, Served

# Input tensors by name, and which outputs are wanted, to output tensors by name.
Runner = Callable[[dict[str, Any], tuple[str, ...]], dict[str, Any]]


class Contents(TypedDict, total=False):
    """What a format reads from a model's source.

    ``files`` are names in the version's folder and what is copied there, first the one that
    ``load`` opens; ``inputs`` and ``outputs`` the tensors, where the source says them;
    ``manifest`` is what else the manifest says.
    """

    files: Mapping[str, Path]
    inputs: Declaration
    outputs: Declaration
    manifest: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A kind of file: the endings of its names, and its native backend in NVIDIA's container.

    ``read`` takes what is to be served; a ValueError of it says what is wrong with the file. The
    native backend is used where nobody says which, if ``prefers_native``.
    """

    read: Callable[[Served], Contents]
    suffixes: tuple[str, ...]
    native: str | None = None
    prefers_native: bool = False
