"""Candidates, secondary vertices and lost tracks of each jet, from NanoAOD and PFNano."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
from awkward.contents import Content, IndexedArray, ListOffsetArray, RecordArray
from awkward.index import Index64

from sonic_coffea.errors import ConfigError, FieldError, InputError, nearest
from sonic_coffea.layouts import is_lazy, is_tracer, over_partitions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

# Table of the association, its index into the candidates, and the candidates: NanoAODv15, and
# PFNano, whose releases differ in the names.
_CANDIDATES = (
    ("{jets}PFCand", "pfCandIdx", "PFCand"),
    ("{jets}PFCands", "pFCandsIdx", "PFCands"),
    ("{jets}PFCands", "candIdx", "PFCands"),
    ("JetPFCands{radius}", "pFCandsIdx", "PFCands"),
    ("JetPFCands{radius}", "candIdx", "PFCands"),
)
_VERTICES = (
    ("{jets}SVs", "sVIdx", "SV"),
    ("{jets}SVs", "svIdx", "SV"),
    ("JetSVs{radius}", "sVIdx", "SV"),
    ("JetSVs{radius}", "svIdx", "SV"),
)
_LOST_TRACKS = ("LostTrack", "LostTracks")

# The radius with which a collection was clustered.
_RADII = {"Jet": 0.4, "JetPuppi": 0.4, "JetCHS": 0.4, "FatJet": 0.8, "FatJetAK15": 1.5}
# How the names of tables say it.
_RADIUS_NAMES = {"FatJet": "AK8", "FatJetAK15": "AK15"}


def has_constituents(events: Any, jets: str = "FatJet") -> bool:
    """Return whether the file has the constituents of a jet collection."""
    return _association(events, jets, _CANDIDATES) is not None


def constituents(events: Any, jets: str = "FatJet") -> ak.Array:
    """Return the particle-flow candidates of each jet.

    Parameters
    ----------
    events : NanoEvents
        Events that have the jets, the candidates, and the table that links them:
        ``FatJetPFCand`` in NanoAODv15, ``FatJetPFCands`` or ``JetPFCandsAK8`` in PFNano.
    jets : str
        Name of the jet collection.

    Returns
    -------
    awkward array
        ``events * jets * var * candidate``. Jets are in the order of ``events[jets]``, and the
        candidates of a jet in the order of the file. What the table says of a candidate in its jet,
        such as PFNano's ``btagEtaRel``, are fields, too. A candidate that the file does not store,
        with the index -1, is left out. A field is read when it is used. The array is lazy if the
        events are.

    Raises
    ------
    FieldError
        If the events lack a collection; the message names the nearest one.
    InputError
        If the table links a jet to a candidate that the event does not have.
    """
    _check_known(events, jets)
    association = _association(events, jets, _CANDIDATES)
    if association is None:
        table = f"{jets}PFCand"
        raise FieldError(
            f"the events have no constituents of {jets!r}: no collection {table!r}; "
            f"{nearest(table, [k for k in events.fields if k != jets])} "
            "NanoAOD has them since v15; before that, PFNano files do"
        )
    if is_lazy(events):
        label = f"{jets}-constituents"
        return over_partitions(partial(constituents, jets=jets), events, label=label, token=label)
    return _linked(events, jets, *association)


def secondary_vertices(
    events: Any, jets: str = "FatJet", *, radius: float | None = None
) -> ak.Array:
    """Return the secondary vertices of each jet.

    Parameters
    ----------
    events : NanoEvents
        Events that have the jets and the vertices ``SV``.
    jets : str
        Name of the jet collection.
    radius : float, optional
        A jet gets the vertices within this ΔR. By default, the file's table decides (``JetSVs``,
        ``FatJetSVs`` or ``JetSVsAK15`` in PFNano); a file without such a table uses the jets' own
        radius.

    Returns
    -------
    awkward array
        ``events * jets * var * vertex``. Jets are in the order of ``events[jets]``, and the
        vertices of a jet in the order of the file; a vertex may belong to several jets. What the
        table says of a vertex in its jet, such as PFNano's ``costhetasvpv``, are fields, too. A
        vertex that the file does not store, with the index -1, is left out: PFNano's tables have
        those below 3 standard deviations, and ``SV`` does not. A field is read when it is used; a
        ΔR reads eta and phi. The array is lazy if the events are.

    Raises
    ------
    FieldError
        If the events lack a collection; the message names the nearest one.
    ConfigError
        If the file has no such table, and the jets' own radius is not known.
    """
    _check_known(events, jets)
    association = None if radius is not None else _association(events, jets, _VERTICES)
    if association is None:
        _check_known(events, "SV")
        return within_cone(events[jets], events["SV"], _radius(jets, radius))
    if is_lazy(events):
        label = f"{jets}-secondary-vertices"
        function = partial(secondary_vertices, jets=jets)
        return over_partitions(function, events, label=label, token=label)
    return _linked(events, jets, *association)


def lost_tracks(events: Any, jets: str = "Jet", *, radius: float | None = None) -> ak.Array:
    """Return the lost tracks of each jet: tracks that are not among the candidates.

    Parameters
    ----------
    events : NanoEvents
        Events that have the jets, and ``LostTrack`` or ``LostTracks``.
    jets : str
        Name of the jet collection.
    radius : float, optional
        A jet gets the tracks within this ΔR. By default, the jets' own radius.

    Returns
    -------
    awkward array
        ``events * jets * var * track``, in the same order as `secondary_vertices`.

    Raises
    ------
    FieldError
        If the events lack a collection; the message names the nearest one.
    ConfigError
        If the jets' own radius is not known.
    """
    _check_known(events, jets)
    tracks = next((name for name in _LOST_TRACKS if name in events.fields), _LOST_TRACKS[0])
    _check_known(events, tracks)
    return within_cone(events[jets], events[tracks], _radius(jets, radius))


def within_cone(jets: Any, others: Any, radius: float) -> ak.Array:
    """Return the objects within a ΔR of each jet.

    Parameters
    ----------
    jets : awkward array
        ``events * jets``, records with eta and phi.
    others : awkward array
        ``events * var * object``, records with eta and phi.
    radius : float
        ΔR below which an object belongs to a jet; an object may belong to several jets.

    Returns
    -------
    awkward array
        ``events * jets * var * object``, in the order of `others`; a jet that is None has an empty
        list. Only eta and phi are read. The result is lazy if the arrays are.

    Examples
    --------
    >>> jets = ak.Array([[{"eta": 0.0, "phi": 3.1}, {"eta": 1.0, "phi": 0.0}], []])
    >>> tracks = ak.Array([[{"pt": 5.0, "eta": 0.1, "phi": -3.1}], []])
    >>> within_cone(jets, tracks, 0.4).pt.tolist()
    [[[5.0], []], []]
    """
    both = {"jets": jets, "others": others}
    if is_lazy(both):
        label = "within-cone"
        function = partial(_within_cone, radius=radius)
        return over_partitions(function, both, label=label, token=f"{label}-{radius}")
    return _within_cone(both, radius=radius)


def _within_cone(both: Mapping[str, Any], radius: float) -> ak.Array:
    jets, others = both["jets"], both["others"]
    if is_tracer(both):
        for array in (jets, others):
            for name in ("eta", "phi"):
                ak.typetracer.touch_data(array[name])
        return _of_each(jets, others)
    counts, stored = _counts(jets), _lists(others)
    first = np.asarray(stored.starts.data, np.int64)
    there = np.asarray(stored.stops.data, np.int64) - first
    if len(counts) != len(there):
        raise InputError(
            f"expected jets and objects of the same events, got {len(counts)} and {len(there)}"
        )
    event, jet_eta, jet_phi = _directions(jets)
    _, eta, phi = _directions(others)
    # Every jet beside every object of its event.
    pairs = there[event]
    jet = np.repeat(np.arange(len(event)), pairs)
    starts = np.cumsum(there) - there
    other = np.arange(len(jet)) - np.repeat(np.cumsum(pairs) - pairs, pairs) + starts[event][jet]
    turn = np.abs(jet_phi[jet] - phi[other]) % (2 * np.pi)
    turn = np.minimum(turn, 2 * np.pi - turn)
    inside = (jet_eta[jet] - eta[other]) ** 2 + turn**2 < radius**2
    jet, other = jet[inside], other[inside]
    content = other - starts[event][jet] + first[event][jet]
    per_jet = np.bincount(jet, minlength=len(event))
    nested = _nested(counts, per_jet, _chosen(stored.content, content))
    return ak.Array(nested, behavior=others.behavior, attrs=others.attrs)


def _directions(collection: Any) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Return the event, eta and phi of each object; NaN of one that is None."""
    counts = _counts(collection)
    eta, phi = (
        np.asarray(ak.flatten(ak.fill_none(collection[name], np.nan, axis=1)), np.float64)
        for name in ("eta", "phi")
    )
    return np.repeat(np.arange(len(counts)), counts), eta, phi


def _radius(jets: str, radius: float | None) -> float:
    if radius is None and jets not in _RADII:
        raise ConfigError(f"the radius of {jets!r} is not known; give radius=")
    return _RADII[jets] if radius is None else radius


def _check_known(events: Any, collection: str) -> None:
    known = list(events.fields)
    if collection not in known:
        raise FieldError(
            f"the events have no collection {collection!r}; {nearest(collection, known)}"
        )


def _linked(events: Any, jets: str, table: str, index: str, objects: str) -> ak.Array:
    """Return what a table of the file links to each jet, with what the table says of it."""
    own = [
        name
        for name in events[table].fields
        # coffea adds indices that count over the whole file, which end with G.
        if name not in ("jetIdx", index, "jetIdxG", f"{index}G", *events[objects].fields)
    ]
    if is_tracer(events):
        ak.typetracer.touch_data(events[table]["jetIdx"])
        linked = events[objects][events[table][index]]
        for name in own:
            linked = ak.with_field(linked, events[table][name], name)
        return _of_each(events[jets], linked)
    counts = _counts(events[jets])
    event, jet = _flat(events[table]["jetIdx"])
    _, number = _flat(events[table][index])
    links = _lists(events[table])
    link = _positions(links)
    first_jet = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    owner = first_jet[event] + jet
    # Neither what belongs to a jet that was not stored, nor what was not stored itself.
    kept = (jet >= 0) & (jet < counts[event]) & (number != -1)
    owner, number, event, link = owner[kept], number[kept], event[kept], link[kept]
    if np.any(np.diff(owner) < 0):
        order = np.argsort(owner, kind="stable")
        owner, number, event, link = owner[order], number[order], event[order], link[order]
    stored = _lists(events[objects])
    first = np.asarray(stored.starts.data, np.int64)
    there = np.asarray(stored.stops.data, np.int64) - first
    wrong = np.flatnonzero((number < 0) | (number >= there[event]))
    if len(wrong):
        where = int(event[wrong[0]])
        raise InputError(
            f"the file links a jet to {index} {number[wrong[0]]} in event {where}, which has "
            f"{there[where]} of {objects!r}",
            events=(where, where + 1),
        )
    per_jet = np.bincount(owner, minlength=first_jet[-1])
    chosen = _chosen(stored.content, first[event] + number)
    if own:
        chosen = _beside(chosen, {name: _chosen(links.content[name], link) for name in own})
    nested = _nested(counts, per_jet, chosen)
    return ak.Array(nested, behavior=events.behavior, attrs=events.attrs)


def _chosen(content: Content, index: NDArray[np.int64]) -> Content:
    """Return the elements of a content at an index; nothing is read."""
    return IndexedArray.simplified(Index64(index), content)


def _beside(records: Content, columns: Mapping[str, Content]) -> Content:
    """Return records with more fields; nothing is read."""
    names = list(records.fields)
    inner = records
    while inner.is_indexed:
        inner = inner.content
    fields = [*(records[name] for name in names), *columns.values()]
    return RecordArray(fields, [*names, *columns], records.length, parameters=inner.parameters)


def _nested(jets: NDArray[np.int64], per_jet: NDArray[np.int64], elements: Content) -> Content:
    """Return elements as lists of jets."""
    outer, inner = (
        Index64(np.concatenate((np.zeros(1, np.int64), np.cumsum(n)))) for n in (jets, per_jet)
    )
    return ListOffsetArray(outer, ListOffsetArray(inner, elements))


def _of_each(jets: Any, elements: Any) -> ak.Array:
    """Return what stands for some elements of each jet, of arrays that have a type and no data."""
    _, nested = ak.unzip(ak.cartesian([ak.local_index(jets), elements], nested=True))
    return nested


def _association(
    events: Any, jets: str, patterns: Iterable[tuple[str, str, str]]
) -> tuple[str, str, str] | None:
    known = set(events.fields)
    for pattern, index, candidates in patterns:
        table = pattern.format(jets=jets, radius=_RADIUS_NAMES.get(jets, jets))
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


def _positions(lists: Content) -> NDArray[np.int64]:
    """Return where the elements of lists lie in their content."""
    starts = np.asarray(lists.starts.data, np.int64)
    counts = np.asarray(lists.stops.data, np.int64) - starts
    shift = starts - (np.cumsum(counts) - counts)
    positions: NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(shift, counts)
    return positions


def _flat(column: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the event that each element is in, and the elements."""
    counts = _counts(column)
    return np.repeat(np.arange(len(counts)), counts), np.asarray(ak.flatten(column), np.int64)
