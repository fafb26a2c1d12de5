"""scoring: from files of events to files of scores."""

from sonic_coffea.scoring._files import ScoredFiles as ScoredFiles
from sonic_coffea.scoring._files import export_files as export_files
from sonic_coffea.scoring._files import score_files as score_files
