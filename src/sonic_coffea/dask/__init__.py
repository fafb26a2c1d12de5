"""dask: a pool on every worker, and the worker's thread given back while servers infer."""

from __future__ import annotations

from sonic_coffea.dask._plugin import SonicPlugin, register

__all__ = ["SonicPlugin", "register"]
