"""tools: the command line's checks, measurements, plans and scaffolds, as functions."""

from __future__ import annotations

from sonic_coffea.model import Scaffold, scaffold
from sonic_coffea.pool import Checks, HostCheck, Step, check
from sonic_coffea.tools._bench import Curve, measure
from sonic_coffea.tools._plan import plan

__all__ = [
    "Checks",
    "Curve",
    "HostCheck",
    "Scaffold",
    "Step",
    "check",
    "measure",
    "plan",
    "scaffold",
]
