"""Candidates, secondary vertices and lost tracks of each jet, from NanoAOD and PFNano."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import awkward as ak
import numpy as np

from sonic_coffea.errors import (
    ConfigError,
    FieldError,
    InputError,
    expect,
    nearest,
    require,
    shortened,
)
from sonic_coffea.layouts import (
    FilePositions,
    Int64,
    checked,
    file_of,
    file_positions,
    find_rows,
    is_lazy,
    is_tracer,
    lazy_file,
    over_partitions,
    ranges,
    touch_position,
)

Association = tuple[str, str, str]
"""A table, its index into a collection, and the collection."""

# How names of tables end in NanoAODv15, and in releases of PFNano, and what they lead to.
_CANDIDATES = {"PFCand": "PFCand", "PFCands": "PFCands"}
_VERTICES = {"SVs": "SV"}
_INDICES = ("pfCandIdx", "pFCandsIdx", "candIdx", "sVIdx", "svIdx")
_LOST_TRACKS = ("LostTrack", "LostTracks")

# The radius with which a collection was clustered.
_RADII = {"Jet": 0.4, "JetPuppi": 0.4, "JetCHS": 0.4, "FatJet": 0.8, "FatJetAK15": 1.5}
# How the names of tables say it.
_RADIUS_NAMES = {"FatJet": "AK8", "FatJetAK15": "AK15"}


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
        ``events * jets * var * candidate``. Jets are those of ``events[jets]``, calibrated, cut or
        sorted as they may be, and the candidates of a jet in the order of the table. A jet that is
        None has an empty list. A candidate that was cut from the events is left out. What the table
        says of a candidate in its jet, such as PFNano's ``btagEtaRel``, are fields, too. A
        candidate that the file does not store, with the index -1, is left out. A field is read when
        it is used. The array is lazy if the events are.

    Raises
    ------
    FieldError
        If the events lack a collection; the message names the nearest one.
    InputError
        If the table links a jet to a candidate that the event does not have, or if the position of
        a jet or candidate in the file's own lists is not known.

    Notes
    -----
    The table counts jets as the file has them. NanoEvents know their file: a jet is found in it by
    awkward's own indexes, or by its eta and phi in the event with the same run, luminosity block
    and number. Arrays that know no file, such as those of uproot, must have their jets as the table
    counts them. Where neither holds, note the positions before the jets change::

        events["FatJet", "file_position"] = ak.local_index(events.FatJet, axis=1)
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
    return _linked(events, jets, association)


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
        ``events * jets * var * vertex``. Jets are those of ``events[jets]``, and the vertices of a
        jet in the order of the table; a vertex may belong to several jets. What the
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
    InputError
        As `constituents`, which also tells how jets are found in the file's table.
    """
    _check_known(events, jets)
    association = None if radius is not None else _association(events, jets, _VERTICES)
    if association is None:
        _check_known(events, "SV")
        return within_cone(events[jets], events["SV"], _radius(jets, radius))
    return _linked(events, jets, association)


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
    radius = checked("float", radius, "within_cone: expected radius to be")
    expect(radius > 0, "a radius above 0", radius, "within_cone")
    function, label = partial(_within_cone, radius=radius), "within-cone"
    return over_partitions(function, both, label=label, token=f"{label}-{radius}")


def _within_cone(both: Mapping[str, Any], radius: float) -> ak.Array:
    jets, others = both["jets"], both["others"]
    directions = [_directions(jets), _directions(others)]
    if is_tracer(both):
        return _of_each(jets, others)
    if len(jets) != len(others):
        raise InputError(
            f"expected jets and objects of the same events, got {len(jets)} and {len(others)}"
        )
    jet, other = ak.unzip(ak.cartesian(directions, nested=True))
    turn = (jet.phi - other.phi + np.pi) % (2 * np.pi) - np.pi
    inside = (jet.eta - other.eta) ** 2 + turn**2 < radius**2
    inside = ak.from_regular(inside, axis=None)
    number = ak.local_index(inside, axis=2)[inside]
    chosen = others[ak.flatten(number, axis=2)]
    return _nested(chosen, ak.flatten(ak.num(number, axis=2)), ak.num(jets))


def _directions(collection: Any) -> ak.Array:
    """Return eta and phi of each object; NaN of one that is None."""
    if not {"eta", "phi"} <= {*getattr(collection, "fields", ())} or collection.ndim != 2:
        got = getattr(collection, "type", type(collection).__name__)
        raise InputError(f"expected lists of records with eta and phi, got {shortened(got)}")
    columns = {name: ak.fill_none(collection[name], np.nan, axis=1) for name in ("eta", "phi")}
    return ak.values_astype(ak.zip(columns), np.float64)


def _radius(jets: str, radius: float | None) -> float:
    if radius is None and jets not in _RADII:
        raise ConfigError(f"the radius of {jets!r} is not known; give radius=")
    return _RADII[jets] if radius is None else radius


def _check_known(events: Any, collection: str) -> None:
    require([collection], events.fields, "the events have no collection", FieldError)


def _linked(events: Any, jets: str, association: Association) -> ak.Array:
    """Return the objects that a table links to each jet, with the table's other columns."""
    names = jets, association[0], association[2]
    file = lazy_file(events) if is_lazy(events) else file_of(events, *names)
    both = {"events": events} if file is None else {"events": events, "file": file}
    linked = partial(_of_links, jets=jets, association=association)
    label = "-".join((jets, *association))
    return over_partitions(linked, both, label=label, token=label)


def _of_links(both: Mapping[str, Any], jets: str, association: Association) -> ak.Array:
    """Return the linked objects of each jet, of arrays or of types without data."""
    events, file = both["events"], both.get("file")
    table, index, objects = association
    links, stored, per_jet = events[table], events[objects], None
    if is_tracer(events):
        touch_position(events, jets, file)
        touch_position(events, objects, file)
        ak.typetracer.touch_data(links.jetIdx)
        linked = stored[links[index]]
    else:
        links, linked, per_jet = _followed(events, file, jets, association)
    # coffea adds indices that count over the whole file, which end with G.
    known = ("jetIdx", index, "jetIdxG", f"{index}G", *stored.fields)
    for name in links.fields:
        if name not in known:
            linked = ak.with_field(linked, links[name], name)
    if per_jet is None:
        return _of_each(events[jets], linked)
    return _nested(linked, per_jet, ak.num(events[jets]))


def _followed(
    events: Any, file: Any, jets: str, association: Association
) -> tuple[ak.Array, ak.Array, Int64]:
    """Return the links of each event and their objects, jet by jet; and how many each jet has."""
    table, index, objects = association
    for name in (jets, table, objects):
        for event in np.flatnonzero(ak.is_none(events[name]))[:1].tolist():
            message = f"{name!r} is None; leave such events out, as with ak.drop_none"
            raise InputError(message, events=(event, event + 1))
    # Read once: an array with a cache of its own may forget them. A link that is None is none.
    linked_jets, numbers = (
        ak.fill_none(ak.from_regular(events[table][column] + 0), -1, axis=1)
        for column in ("jetIdx", index)
    )
    # Neither the links of jets that are not stored, nor links to objects that are not stored.
    used = (linked_jets >= 0) & (numbers != -1)
    jets_at, stored_at = (file_positions(events, name, file) for name in (jets, objects))
    owner, chosen = _chosen(jets_at, linked_jets[used])
    n_jets = ak.to_numpy(ak.num(events[jets]))
    event = np.repeat(np.arange(len(n_jets)), n_jets)[owner]
    number = ak.to_numpy(ak.flatten(numbers[used]))[chosen]
    is_known = (jets_at.rows >= 0) & (stored_at.rows >= 0)
    for mixed in np.flatnonzero(is_known & (jets_at.rows != stored_at.rows))[:1].tolist():
        raise InputError(
            f"{jets!r} and {objects!r} of event {mixed} are of different events of the file; "
            "find the constituents before you mix events",
            events=(mixed, mixed + 1),
        )
    place, wrong = stored_at.places(event, number)
    for link in np.flatnonzero(wrong)[:1].tolist():
        raise InputError(
            f"the file links a jet to {index} {number[link]} in event {event[link]}, which has "
            f"{stored_at.sizes[event[link]]} of {objects!r}",
            events=(int(event[link]), int(event[link]) + 1),
        )
    is_there = place >= 0
    per_event = np.bincount(event[is_there], minlength=len(n_jets))
    links = ak.unflatten(ak.flatten(events[table][used])[chosen[is_there]], per_event)
    linked = events[objects][ak.unflatten(place[is_there], per_event)]
    return links, linked, np.bincount(owner[is_there], minlength=n_jets.sum())


def _chosen(jets: FilePositions, linked_jets: ak.Array) -> tuple[Int64, Int64]:
    """Return the links of all jets, jet by jet: the jet's number, and the link's."""
    link_event = np.repeat(np.arange(len(linked_jets)), ak.num(linked_jets))
    links = [link_event, ak.to_numpy(ak.flatten(linked_jets))]
    order, first, count = find_rows([jets.events, jets.positions], links)
    return np.repeat(np.arange(len(count)), count), order[ranges(first, count)]


def _nested(elements: ak.Array, per_jet: Any, n_jets: Any) -> ak.Array:
    """Return the elements of each event as lists of its jets."""
    return ak.unflatten(ak.unflatten(ak.flatten(elements), per_jet), n_jets)


def _of_each(jets: Any, elements: Any) -> ak.Array:
    """Return a placeholder of some elements of each jet, for arrays that have types and no data."""
    _, nested = ak.unzip(ak.cartesian([ak.local_index(jets), elements], nested=True))
    return nested


def _association(events: Any, jets: str, tables: Mapping[str, str]) -> Association | None:
    known = set(events.fields)
    for end, objects in tables.items():
        for table in (f"{jets}{end}", f"Jet{end}{_RADIUS_NAMES.get(jets, jets)}"):
            for index in _INDICES if {table, objects} <= known else ():
                if index in events[table].fields:
                    return table, index, objects
    return None
