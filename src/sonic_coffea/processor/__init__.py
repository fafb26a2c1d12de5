"""processor: scoring inside coffea's processors."""

from __future__ import annotations

from sonic_coffea.processor._mixin import Request, Scores, SonicFilter, SonicProcessor
from sonic_coffea.processor._run import located, run_files
