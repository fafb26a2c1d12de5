"""reporting: statistics of requests, as counts, tables, plots and advice."""

from __future__ import annotations

from sonic_coffea.reporting import _tables as tables
from sonic_coffea.reporting._report import Report, report
from sonic_coffea.reporting._tally import STATISTICS_KEY, SUMS, Statistics, Tally, TallyKey

# What users import from here; the top of the package has the rest.
__all__ = ["Report", "Statistics"]
