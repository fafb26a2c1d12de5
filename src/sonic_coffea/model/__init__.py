"""model: the declaration of a served model, its call, and pending scores."""

from __future__ import annotations

from sonic_coffea.model._choice import Choice, Folds
from sonic_coffea.model._export import export
from sonic_coffea.model._model import Model
from sonic_coffea.model._nanoaod import (
    constituents,
    lost_tracks,
    secondary_vertices,
    within_cone,
)
from sonic_coffea.model._pending import Pending
from sonic_coffea.model._scaffold import scaffold
from sonic_coffea.model._submission import recorded
