"""The command line: ``sonic-coffea …``."""

from __future__ import annotations

import io
import os
import sys

# gRPC's C++ library would log to the terminal the errors that calls raise anyway. It reads the
# variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a log or a terminal may have only ASCII
    try:
        # Here, as Ctrl-C may also be pressed in the half second that this takes.
        from sonic_coffea.cli._main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
