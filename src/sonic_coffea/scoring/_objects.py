"""The objects of an event that are sent: a collection, with the model's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import awkward as ak

from sonic_coffea.demo.features import CONSTITUENT_FEATURES, constituent_features
from sonic_coffea.errors import FieldError, nearest
from sonic_coffea.model import constituents, has_constituents

if TYPE_CHECKING:
    from sonic_coffea.model import Model

CONSTITUENTS = "constituents"


def collection_of(events: Any, name: str) -> Any:
    """Return a collection; if there is none, raise an error that names the nearest."""
    if name not in events.fields:
        raise FieldError(f"there is no collection {name!r}; {nearest(name, events.fields)}")
    return events[name]


def objects_of(events: Any, collection: str | None, model: Model) -> Any:
    """Return what a model reads: events, their objects, or the constituents of their jets.

    Constituents come where the model reads what the objects do not have: under ``constituents``,
    if it reads that; else with the features that the demo's network has, if it reads these; else as
    the file has them. Where they lack it, too, the objects come, whose fields an error then names.
    """
    if collection is None:
        return events
    objects = collection_of(events, collection)
    columns = {column for layout in model.inputs.values() for column in layout.columns}
    roots = {column.partition(".")[0].partition("[")[0] for column in columns}
    elsewhere = roots - set(objects.fields)
    if not elsewhere or not has_constituents(events, collection):
        return objects
    inner = constituents(events, collection)
    if CONSTITUENTS in roots:
        return ak.with_field(objects, inner, CONSTITUENTS)
    if not columns & set(CONSTITUENT_FEATURES):
        return inner if elsewhere & set(inner.fields) else objects
    # NanoAOD keeps no constituents of the softest jets: these have no score.
    return ak.mask(constituent_features(objects, inner), ak.num(inner, axis=2) > 0)
