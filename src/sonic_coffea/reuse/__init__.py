"""reuse: rows that are not sent, because an equal row is, or because scores are on disk."""

from sonic_coffea.reuse._cache import ScoreCache as ScoreCache
from sonic_coffea.reuse._part import Part as Part
from sonic_coffea.reuse._variations import Variations as Variations
