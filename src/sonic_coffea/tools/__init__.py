"""tools: the command line's checks, measurements, plans and scaffolds, as functions."""

from __future__ import annotations

from sonic_coffea.model import scaffold
from sonic_coffea.pool import Checks, HostCheck, Step, check
from sonic_coffea.tools._bench import Curve, measure, plan

__all__ = ["Checks", "Curve", "HostCheck", "Step", "check", "measure", "plan", "scaffold"]
