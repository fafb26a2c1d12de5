"""Constituents are assigned to several targets without overlap."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import InputError

RANKS = {"t1": 3, "t2": 3, "H": 2}


def network(counts: list[int]) -> dict[str, Any]:
    """Return random logarithms, symmetric in the first two constituents of a target."""
    rng = np.random.default_rng(5)
    each: dict[str, list[Any]] = {name: [] for name in RANKS}
    for n in counts:
        for name, rank in RANKS.items():
            numbers = rng.normal(size=(n,) * rank)
            each[name].append((numbers + numbers.swapaxes(0, 1)).tolist())
    return {name: ak.Array(lists) for name, lists in each.items()}


def greedy(event: dict[str, Any], choices: int) -> list[dict[str, Any]]:
    """Assign one event's constituents, in plain Python."""
    length = len(event["H"])
    banned: set[Any] = set()
    out = []
    for _ in range(choices):
        free, chosen = set(range(length)), dict.fromkeys(RANKS)
        for _ in RANKS:
            options = [
                (np.asarray(event[name])[at], name, at)
                for name, rank in RANKS.items()
                if chosen[name] is None
                for at in permutations(sorted(free), rank)
                if (name, frozenset(at[:2]), at[2:]) not in banned
            ]
            if options:
                _, name, at = max(options)
                chosen[name] = (at, np.exp(np.asarray(event[name])[at]))
                free -= set(at)
        for name, choice in chosen.items():
            if choice is not None:
                banned.add((name, frozenset(choice[0][:2]), choice[0][2:]))
        out.append(chosen)
    return out


def test_choices_are_those_of_one_event_after_the_other() -> None:
    counts = [8, 6, 9, 3, 2, 0, 8]
    outputs = network(counts)
    assigned = sonic.assignments(outputs, choices=3)
    for number in range(len(counts)):
        event = {name: array[number].to_list() for name, array in outputs.items()}
        expected = greedy(event, 3) if counts[number] else [dict.fromkeys(RANKS)] * 3
        for choice, wanted in zip(assigned[number].to_list(), expected, strict=True):
            for name, target in wanted.items():
                if target is None:
                    assert choice[name] == {"index": None, "probability": None}
                    continue
                at, probability = target
                assert {*choice[name]["index"][:2]} == {*at[:2]}
                assert choice[name]["index"][2:] == [*at[2:]]
                assert choice[name]["probability"] == pytest.approx(probability)
    jets = ak.Array([[10.0 * n for n in range(count)] for count in counts])
    first = ak.drop_none(assigned.H.index[:, 0], axis=0)
    there = jets[~ak.is_none(assigned.H.index[:, 0])]
    assert (there[first] == 10.0 * first).to_list() == [[True, True]] * len(first)


def test_nothing_is_assigned_that_has_no_probability() -> None:
    nan = float("nan")
    pairs = ak.Array([[[0.9, nan, 0.1], [nan, 0.8, 0.0], [0.1, 0.0, 0.9]], [], [[0.5]]])
    assigned = sonic.assignments({"H": pairs}, choices=2, log=False)
    assert assigned.H.index.to_list() == [[[0, 2], [1, 2]], [None, None], [None, None]]
    assert assigned.H.probability.to_list() == [[0.1, 0.0], [None, None], [None, None]]
    nothing = sonic.assignments({"H": pairs[:0]}, choices=2, log=False)
    assert nothing.type.content == assigned.type.content
    with pytest.raises(InputError, match="target 'b': expected 3 constituents in each axis"):
        sonic.assignments({"H": pairs[:1], "b": ak.Array([[0.5, 0.1]])}, log=False)
