"""The command line: ``sonic-coffea …``."""

from __future__ import annotations

import os

# gRPC's C++ library logs to the terminal what its calls raise; it reads this as it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from sonic_coffea.cli._main import main

__all__ = ["main"]
