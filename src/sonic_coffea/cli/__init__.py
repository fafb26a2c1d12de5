"""The command line: ``sonic-coffea …``."""

from __future__ import annotations

from sonic_coffea.cli._main import main

__all__ = ["main"]
