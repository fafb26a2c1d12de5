"""Score jagged awkward arrays on shared inference servers from coffea and dask.

``import sonic_coffea as sonic`` is light: coffea, distributed, numba and grpc load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sonic_coffea import errors
from sonic_coffea._version import __version__

if TYPE_CHECKING:
    from sonic_coffea._connect import connect
    from sonic_coffea.layouts import (
        Bucketed,
        Dense,
        Feature,
        Flat,
        Layout,
        Mask,
        OneHot,
        Output,
        Padded,
        Pairwise,
        Row,
        Tokens,
    )
    from sonic_coffea.model import (
        Folds,
        Model,
        Pending,
        constituents,
        lost_tracks,
        secondary_vertices,
        within_cone,
    )
    from sonic_coffea.pool import Pool, share
    from sonic_coffea.processor import SonicFilter, SonicProcessor
    from sonic_coffea.reporting import Report, report
    from sonic_coffea.reuse import Variations
    from sonic_coffea.scoring import score_files
    from sonic_coffea.server import LocalServer, build_repository

_HOMES = {
    "_connect": ("connect",),
    "layouts": (
        *("Bucketed", "Dense", "Feature", "Flat", "Layout", "Mask", "OneHot", "Output", "Padded"),
        *("Pairwise", "Row", "Tokens"),
    ),
    "model": (
        *("Folds", "Model", "Pending", "constituents", "lost_tracks", "secondary_vertices"),
        "within_cone",
    ),
    "pool": ("Pool", "share"),
    "processor": ("SonicFilter", "SonicProcessor"),
    "reporting": ("Report", "report"),
    "reuse": ("Variations",),
    "scoring": ("score_files",),
    "server": ("LocalServer", "build_repository"),
}

__all__ = [
    "Bucketed",
    "Dense",
    "Feature",
    "Flat",
    "Folds",
    "Layout",
    "LocalServer",
    "Mask",
    "Model",
    "OneHot",
    "Output",
    "Padded",
    "Pairwise",
    "Pending",
    "Pool",
    "Report",
    "Row",
    "SonicFilter",
    "SonicProcessor",
    "Tokens",
    "Variations",
    "__version__",
    "build_repository",
    "connect",
    "constituents",
    "errors",
    "lost_tracks",
    "report",
    "score_files",
    "secondary_vertices",
    "share",
    "within_cone",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(
        f"module 'sonic_coffea' has no attribute {name!r}; {errors.nearest(name, __all__)}"
    )


def __dir__() -> list[str]:
    return sorted(__all__)
