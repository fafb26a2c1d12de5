"""reporting: statistics of requests, as counts, tables, plots and advice."""

from sonic_coffea.reporting import _tables
from sonic_coffea.reporting._report import Report as Report
from sonic_coffea.reporting._report import report as report
from sonic_coffea.reporting._tally import STATISTICS_KEY as STATISTICS_KEY
from sonic_coffea.reporting._tally import Statistics as Statistics
from sonic_coffea.reporting._tally import Tally as Tally

tables = _tables
