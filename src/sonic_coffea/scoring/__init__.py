"""scoring: from files of events to files of scores."""

from __future__ import annotations

from sonic_coffea.scoring._files import ScoredFiles, check_output, export_files, score_files

__all__ = ["ScoredFiles", "check_output", "export_files", "score_files"]
