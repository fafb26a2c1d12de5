"""The constituents of a jet as one expression, for the ways in which NanoAOD stores them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from awkward.contents import Content, IndexedArray, ListOffsetArray
from awkward.index import Index64

from sonic_coffea.errors import FieldError, InputError, nearest
from sonic_coffea.layouts import is_lazy, is_tracer, over_partitions

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Table of the association, its index into the candidates, and the candidates: NanoAODv15, PFNano.
_ASSOCIATIONS = (
    ("{jets}PFCand", "pfCandIdx", "PFCand"),
    ("{jets}PFCands", "pFCandsIdx", "PFCands"),
)


def has_constituents(events: Any, jets: str = "FatJet") -> bool:
    """Whether the file has the constituents of a jet collection."""
    return _association(events, jets) is not None


def constituents(events: Any, jets: str = "FatJet") -> ak.Array:
    """Return the particle-flow candidates of each jet.

    Parameters
    ----------
    events : NanoEvents
        With a jet collection, the table that associates candidates with its jets
        (``FatJetPFCand`` in NanoAODv15, ``FatJetPFCands`` in PFNano), and the candidates.
    jets : str
        The jet collection.

    Returns
    -------
    awkward array
        ``events * jets * var * candidate``, in the order of the file, jet by jet as in
        ``events[jets]``. No field of a candidate is read before it is used. Lazy, if the events
        are.

    Raises
    ------
    FieldError
        If a collection is not there, naming the nearest that is.
    InputError
        If a jet is linked to a candidate that its event does not have.
    """
    known = list(events.fields)
    if jets not in known:
        raise FieldError(f"the events have no collection {jets!r}; {nearest(jets, known)}")
    association = _association(events, jets)
    if association is None:
        table = f"{jets}PFCand"
        raise FieldError(
            f"the events have no constituents of {jets!r}: no collection {table!r}; "
            f"{nearest(table, [k for k in known if k != jets])} "
            "NanoAOD has them since v15; before that, PFNano files do"
        )
    if is_lazy(events):
        label = f"{jets}-constituents"
        return over_partitions(partial(constituents, jets=jets), events, label=label, token=label)
    if is_tracer(events):
        return _traced(events, jets, *association)
    table, index, candidates = association
    counts = _counts(events[jets])
    event_of_link, jet = _flat(events[table]["jetIdx"])
    _, candidate = _flat(events[table][index])
    first_jet = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    owner = first_jet[event_of_link] + jet
    # A candidate of a jet that was not stored belongs to none.
    kept = (jet >= 0) & (jet < counts[event_of_link])
    owner, candidate, event_of_link = owner[kept], candidate[kept], event_of_link[kept]
    if np.any(np.diff(owner) < 0):
        order = np.argsort(owner, kind="stable")
        owner, candidate, event_of_link = owner[order], candidate[order], event_of_link[order]
    stored = _lists(events[candidates])
    first_candidate = np.asarray(stored.starts.data, np.int64)
    there = np.asarray(stored.stops.data, np.int64) - first_candidate
    wrong = np.flatnonzero((candidate < 0) | (candidate >= there[event_of_link]))
    if len(wrong):
        event = int(event_of_link[wrong[0]])
        raise InputError(
            f"the file links a jet to {index} {candidate[wrong[0]]} in event {event}, which has "
            f"{there[event]} of {candidates!r}",
            events=(event, event + 1),
        )
    per_jet = np.bincount(owner, minlength=first_jet[-1]).astype(np.int64)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(per_jet)))
    links = IndexedArray(Index64(first_candidate[event_of_link] + candidate), stored.content)
    nested = ListOffsetArray(Index64(first_jet), ListOffsetArray(Index64(offsets), links))
    return ak.Array(nested, behavior=events.behavior, attrs=events.attrs)


def _traced(events: Any, jets: str, table: str, index: str, candidates: str) -> ak.Array:
    """Read what constituents read, of events that have a type and no data."""
    ak.typetracer.touch_data(events[table]["jetIdx"])
    linked = events[candidates][events[table][index]]
    _, nested = ak.unzip(ak.cartesian([ak.local_index(events[jets]), linked], nested=True))
    return nested


def _association(events: Any, jets: str) -> tuple[str, str, str] | None:
    known = set(events.fields)
    for pattern, index, candidates in _ASSOCIATIONS:
        table = pattern.format(jets=jets)
        if {table, candidates} <= known and index in events[table].fields:
            return table, index, candidates
    return None


def _counts(collection: Any) -> NDArray[np.int64]:
    return np.asarray(ak.num(collection, axis=1), np.int64)


def _lists(collection: Any) -> Content:
    """Return a collection as lists, whatever selects its events; its fields are not read."""
    layout = ak.to_layout(collection)
    while layout.is_indexed:
        layout = layout.project()
    return layout.to_ListOffsetArray64() if layout.is_regular else layout


def _flat(column: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the event that each element is in, and the elements."""
    counts = _counts(column)
    return np.repeat(np.arange(len(counts)), counts), np.asarray(ak.flatten(column), np.int64)
