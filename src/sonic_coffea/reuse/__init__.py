"""reuse: rows that are not sent, because an equal row is, or because scores are on disk."""

from __future__ import annotations

from sonic_coffea.reuse._cache import ScoreCache
from sonic_coffea.reuse._part import Part
from sonic_coffea.reuse._variations import OBJECTS, Variations, follows_index
