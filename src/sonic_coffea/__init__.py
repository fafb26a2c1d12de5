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
    "connect": "sonic_coffea._connect",
    "Bucketed": "sonic_coffea.layouts",
    "Dense": "sonic_coffea.layouts",
    "Feature": "sonic_coffea.layouts",
    "Flat": "sonic_coffea.layouts",
    "Layout": "sonic_coffea.layouts",
    "Mask": "sonic_coffea.layouts",
    "OneHot": "sonic_coffea.layouts",
    "Padded": "sonic_coffea.layouts",
    "Pairwise": "sonic_coffea.layouts",
    "Row": "sonic_coffea.layouts",
    "Tokens": "sonic_coffea.layouts",
    "Folds": "sonic_coffea.model",
    "Model": "sonic_coffea.model",
    "Output": "sonic_coffea.layouts",
    "Pending": "sonic_coffea.model",
    "constituents": "sonic_coffea.model",
    "lost_tracks": "sonic_coffea.model",
    "secondary_vertices": "sonic_coffea.model",
    "within_cone": "sonic_coffea.model",
    "Pool": "sonic_coffea.pool",
    "share": "sonic_coffea.pool",
    "SonicProcessor": "sonic_coffea.processor",
    "Report": "sonic_coffea.reporting",
    "report": "sonic_coffea.reporting",
    "score_files": "sonic_coffea.scoring",
    "SonicFilter": "sonic_coffea.processor",
    "Variations": "sonic_coffea.reuse",
    "LocalServer": "sonic_coffea.server",
    "build_repository": "sonic_coffea.server",
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
    if name not in _HOMES:
        raise AttributeError(
            f"module 'sonic_coffea' has no attribute {name!r}; {errors.nearest(name, __all__)}"
        )
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
