"""dask: a pool on every present and future worker of a cluster."""

from __future__ import annotations

from sonic_coffea.dask._plugin import SonicPlugin, register

__all__ = ["SonicPlugin", "register"]
