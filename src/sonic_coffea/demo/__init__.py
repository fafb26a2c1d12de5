"""demo: a whole analysis, from NanoAOD to plots, on a Triton and a dask cluster of its own."""

from __future__ import annotations

from sonic_coffea.demo.workflow import DemoResult, run

__all__ = ["DemoResult", "run"]
