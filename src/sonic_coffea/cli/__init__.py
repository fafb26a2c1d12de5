"""The command line: ``sonic-coffea demo``, ``serve``, ``server install``."""

from __future__ import annotations

from sonic_coffea.cli._main import main

__all__ = ["main"]
