"""Indices in files of other experiments, whose schemas nest them, or name no collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
import uproot
from coffea.nanoevents import NanoEventsFactory, PHYSLITESchema, TreeMakerSchema
from tests.nanoaod import sample

import sonic_coffea as sonic
from sonic_coffea import errors

HITS = [[2, 0], [1], [-1]]
TRACKS = [[1.0, 2.0, 3.0], [4.0, 5.0], [6.0]]
# Of the track of each hit, if that is above 1.5.
FOUND = [[3], [-9], [5], [-9]]


# The names of fields are short, as coffea's `TreeMakerSchema` once took their first letters.


def read(path: Path, schema: Any, columns: dict[str, list[Any]], **options: Any) -> ak.Array:
    """Write branches to a file, and return its events."""
    arrays = {name: ak.Array(column) for name, column in columns.items()}
    with uproot.recreate(path / "events.root") as file:
        tree = file.mktree("Events", {name: array.type.content for name, array in arrays.items()})
        tree.extend(arrays)
    options |= {"schemaclass": schema, "mode": "virtual"}
    return NanoEventsFactory.from_root({str(path / "events.root"): "Events"}, **options).events()


def cut(tracks: ak.Array, z: ak.Array) -> ak.Array:
    """Return some tracks, in another order."""
    return tracks[z > 1.5][:, ::-1]


@pytest.mark.parametrize("name", ["Tracks.z", "Tracks.vertex.z"])
def test_indices_in_records_of_a_collection_are_those_of_the_file(
    name: str, tmp_path: Path
) -> None:
    hits, link = ak.Array(HITS), "HitsAuxDyn.link"
    columns = {f"{link}.m_persIndex": abs(hits), f"{link}.m_persKey": ak.where(hits < 0, 0, 77)}
    columns |= {f"TracksAuxDyn.{leaf}": TRACKS for leaf in ("z", "vertex.z", "vertex.t")}
    events = read(tmp_path, PHYSLITESchema, columns)
    events = ak.with_field(events, cut(events.Tracks, events.Tracks.z), "Tracks")
    row = sonic.Row(sonic.Feature(name, index="Hits.link.m_persIndex"), missing=-9.0)
    assert row.pack(events).tolist() == FOUND
    events["Hits", "link", "m_persKey"] = ak.Array([[77, 78], [77], [0]])
    with pytest.raises(errors.InputError, match="lead to several collections.*: 77, 78"):
        row.pack(events)


@pytest.mark.parametrize("link", ["to.index", "to_Tracks_index"])
def test_relations_that_lead_to_several_collections_are_refused(link: str) -> None:
    """As EDM4hep has them, in a record, and where coffea names the collection."""
    beside = f"{link.removesuffix('index')}collectionID"
    leaves = link.rpartition(".")[2], beside.rpartition(".")[2]
    row = sonic.Row(sonic.Feature("Tracks.z", index=f"Hits.{link}"), missing=-9.0)
    indices = ak.Array([[2, 0], [1], [-1]])
    for each in (indices, abs(indices)):
        hits = ak.zip(dict(zip(leaves, (each, [[5, 0], [5], [7]]), strict=True)))
        hits = ak.zip({"to": hits}) if "." in link else hits
        events = {"Hits": hits, "Tracks": ak.zip({"z": TRACKS})}
        if each is indices:
            assert row.pack(events).tolist() == FOUND
            continue
        asked = rf"lead to several collections, by 'Hits.{beside}': 5, 7;.*link.{leaves[1]} == key"
        with pytest.raises(errors.InputError, match=asked):
            row.pack(events)


def test_an_index_into_an_event_without_objects_is_refused(tmp_path: Path) -> None:
    columns = {"Hits_t": [[0], [0], [0]], "Tracks_z": [[1.0], [], [6.0]]}
    events = read(tmp_path, TreeMakerSchema, columns)
    track = sonic.Row(sonic.Feature("Tracks.z", index="Hits.t"), missing=-9.0)
    with pytest.raises(errors.InputError, match=r"'Hits\.t' is 0 in event 1, which has 0 of"):
        track.pack(events)
    events = ak.with_field(events, events.Tracks[events.Tracks.z > 1.5], "Tracks")
    assert track.pack(events).tolist() == [[-9], [-9], [6]]


def test_collections_without_a_name_are_known_by_their_columns(tmp_path: Path) -> None:
    columns = {"Hits_t": HITS, "Tracks_z": TRACKS}
    columns |= {"Tracks_n": [[2, -1, 1], [0, 1], [0]]}
    events = read(tmp_path, TreeMakerSchema, columns)
    good = cut(events.Tracks, events.Tracks.z)
    track = sonic.Row(sonic.Feature("Good.z", index="Hits.t"), missing=-9.0)
    assert track.pack(ak.with_field(events, good, "Good")).tolist() == FOUND
    following = sonic.Row(sonic.Feature("z", index="n"), missing=-9.0)
    assert following.pack(good).tolist() == [[2], [-9], [5], [4], [6]]


def test_an_index_of_the_file_into_objects_that_it_does_not_have_is_refused(
    tmp_path: Path,
) -> None:
    columns = {"Hits_t": HITS, "Tracks_z": TRACKS, "Cells_z": TRACKS}
    log: list[Any] = []
    events = read(tmp_path, TreeMakerSchema, columns, access_log=log)
    z = events.Tracks.z
    made = ak.zip({"z": 1.0 * z, "position": ak.local_index(z)})
    events = ak.with_field(events, cut(made, z), "Good")
    track = sonic.Row(sonic.Feature("Good.z", index="Hits.t"), missing=-9.0)
    with pytest.raises(errors.InputError, match="'Good' are not those of the file.*of their col"):
        track.pack(events)
    assert {access.branch for access in log} == {"Hits_t", "Tracks_z"}
    events["Good", "file_position"] = events.Good.position
    assert track.pack(events).tolist() == FOUND


def test_an_index_of_merged_objects_is_refused_where_it_may_count_in_two_lists(
    tmp_path: Path,
) -> None:
    events = read(tmp_path, TreeMakerSchema, {"Hits_t": HITS, "Tracks_z": TRACKS})
    merged = ak.concatenate([events.Hits, events.Hits[:, :0]], axis=1)
    own = ak.Array([[1, 0], [0], [-1]])
    events["Merged"] = ak.with_field(merged, own, "own")
    track = sonic.Row(sonic.Feature("Tracks.z", index="Merged.t"), missing=-9.0)
    assert track.pack(events).tolist() == [[3], [1], [5], [-9]]
    noted = ak.with_field(events.Tracks, ak.local_index(events.Tracks.z), "file_position")
    for tracks in (events.Tracks, noted):
        changed = ak.with_field(events, cut(tracks, events.Tracks.z), "Tracks")
        if tracks is noted:
            assert track.pack(changed).tolist() == FOUND
        else:
            with pytest.raises(errors.InputError, match="'Merged.t' has the name of an index"):
                track.pack(changed)
        of_own = sonic.Row(sonic.Feature("Tracks.z", index="Merged.own"), missing=-9.0)
        assert of_own.pack(changed).tolist() == [[2], [3], [5], [-9]]


def test_an_index_counts_in_the_objects_and_not_in_what_they_refer_to() -> None:
    events = sample(entry_stop=50)
    grandmother = sonic.Feature("GenPart.parent.pdgId", index="GenPart.genPartIdxMother")
    expected = ak.flatten(ak.fill_none(events.GenPart.parent.parent.pdgId, -9))
    found = sonic.Row(grandmother, missing=-9.0).pack(events)[:, 0]
    assert found.tolist() == expected.tolist()
    assert len({*found.tolist()}) > 3


def test_an_index_may_be_a_real_number_that_is_whole() -> None:
    """As the relations of EDM4hep are that coffea reads."""
    tracks = ak.zip({"z": ak.Array(TRACKS)})
    track = sonic.Row(sonic.Feature("Tracks.z", index="Hits.track"), missing=-9.0)
    found = {2.0: 3.0, -1.0: -9.0}
    for number in (*found, 0.5, np.nan, np.inf):
        hits = ak.zip({"track": ak.Array([[number, 0.0], [1.0], []])})
        events = ak.zip({"Hits": hits, "Tracks": tracks}, depth_limit=1)
        if number in found:
            assert track.pack(events).tolist() == [[found[number]], [1], [5]]
            continue
        with pytest.raises(errors.InputError, match="expected whole numbers"):
            track.pack(events)
