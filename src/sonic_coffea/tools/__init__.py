"""tools: the command line's measurements, plans and scaffolds, as functions."""

from __future__ import annotations

from sonic_coffea.tools._bench import Curve, measure
from sonic_coffea.tools._formats import Format, Formats, compare_formats
from sonic_coffea.tools._plan import plan, plot
from sonic_coffea.tools._scaffold import Scaffold, scaffold

__all__ = [
    "Curve",
    "Format",
    "Formats",
    "Scaffold",
    "compare_formats",
    "measure",
    "plan",
    "plot",
    "scaffold",
]
