"""scoring: from files of events to files of scores."""

from __future__ import annotations

from sonic_coffea.scoring._files import ScoredFiles, export_files, score_files, write_files
from sonic_coffea.scoring._processor import Scoring

# What users import from here; the top of the package has the rest.
__all__ = ["ScoredFiles"]
