"""demo: an analysis from NanoAOD to plots, with a Triton and a dask cluster it starts."""

from __future__ import annotations

from sonic_coffea.demo.workflow import run
