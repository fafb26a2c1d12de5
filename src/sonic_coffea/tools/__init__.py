"""tools: what the command line does beside scoring: check a server, measure it, plan a facility."""

from __future__ import annotations

from sonic_coffea.tools._bench import Curve, measure
from sonic_coffea.tools._check import Step, check
from sonic_coffea.tools._plan import plan, plot

__all__ = ["Curve", "Step", "check", "measure", "plan", "plot"]
