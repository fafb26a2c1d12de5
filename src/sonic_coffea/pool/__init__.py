"""pool: the servers of a process, the requests in flight to them, and what failures do."""

from __future__ import annotations

from sonic_coffea.pool._batching import rows_per_request
from sonic_coffea.pool._call import MASKABLE, Call
from sonic_coffea.pool._check import Checks, HostCheck, Step, check, check_here
from sonic_coffea.pool._deadline import NEVER, Deadline
from sonic_coffea.pool._endpoint import ServerState, Telemetry
from sonic_coffea.pool._limits import Quota, min_in_flight
from sonic_coffea.pool._models import TRANSIENT
from sonic_coffea.pool._pool import Pool, declarations_of
from sonic_coffea.pool._process import hooks
from sonic_coffea.pool._registry import (
    WithPool,
    current,
    entered_elsewhere,
    forget,
    in_turn,
    install,
    of_workers,
    shared,
    uninstall,
    using,
)
from sonic_coffea.pool._request import ModelKey
from sonic_coffea.pool._servers import open_transport
from sonic_coffea.pool._settings import Settings, is_in_process
from sonic_coffea.pool._tuning import MAX_MISSES, MAX_RTT_RATIO, QUIET_S

# What users import from here; the top of the package has the rest.
__all__ = ["Checks", "HostCheck", "ServerState", "Settings", "Step", "current"]
