"""Assignments of constituents to several targets, such as the jets of two top quarks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import awkward as ak
import numpy as np

from sonic_coffea.errors import InputError
from sonic_coffea.layouts._options import checked
from sonic_coffea.layouts._structure import Int64, Tensor


def assignments(
    probabilities: Mapping[str, ak.Array], *, choices: int = 1, log: bool = True
) -> ak.Array:
    """Return the most probable constituents of several targets, none of them used twice.

    The most probable target is assigned first, and its constituents are taken from the others, as
    SPANet does it. The second choice is made in the same way, without each target's first choice:
    permutations of it with the same probability count as the same choice.

    Parameters
    ----------
    probabilities : mapping
        For each target, the probability of each combination, with an axis for each constituent of
        the target: ``events * var * var * var * float``, as ``Output(per="constituent", axes=3)``
        returns SPANet's ``t1_assignment_log_probability``.
    choices : int
        How many choices.
    log : bool
        Whether these are logarithms of probabilities.

    Returns
    -------
    awkward array
        ``events * choices * {t1: {index: ?var * int64, probability: ?float64}, ...}``. Indices
        count in the lists of the event. Both are None where nothing is left, and in events that are
        None.

    Raises
    ------
    InputError
        If there is no target, or the targets do not have the same events and axes of the same
        length in each event.

    Examples
    --------
    >>> import awkward as ak
    >>> import sonic_coffea as sonic
    >>> pairs = ak.Array([[[0.0, 0.6, 0.1], [0.6, 0.0, 0.3], [0.1, 0.3, 0.0]]])
    >>> each = sonic.assignments({"W": pairs, "b": ak.Array([[0.5, 0.1, 0.4]])}, log=False)
    >>> each.W.index.tolist(), each.b.index.tolist()
    ([[[0, 1]]], [[[2]]])
    """
    declared: Any = probabilities
    arrays = [*declared.values()] if isinstance(declared, Mapping) else []
    kinds = ak.Array, np.ndarray
    if not arrays or not all(isinstance(array, kinds) and array.ndim > 1 for array in arrays):
        raise InputError(
            "assignments: expected a dict of targets, each with an array of probabilities that has "
            f"an axis for each constituent, got {probabilities!r}"
        )
    if len({*map(len, arrays)}) > 1:
        counts = ", ".join(f"{name} {len(array)}" for name, array in declared.items())
        raise InputError(f"assignments: the targets have different numbers of events: {counts}")
    choices = checked("length", choices, "assignments: expected choices to be")
    probabilities = {name: ak.fill_none(array, [], axis=0) for name, array in declared.items()}
    lengths = ak.to_numpy(ak.num(next(iter(probabilities.values())), axis=1))
    ranks = {name: array.ndim - 1 for name, array in probabilities.items()}
    index = {name: np.zeros((len(lengths), choices, rank), int) for name, rank in ranks.items()}
    value = {name: np.full((len(lengths), choices), -np.inf) for name in ranks}
    for length in np.unique(lengths).tolist():
        events = np.flatnonzero(lengths == length)
        places = {n: np.indices((length,) * r).reshape(r, -1).T for n, r in ranks.items()}
        scores = {n: _numbers(array[events], length, n) for n, array in probabilities.items()}
        for name, combinations in places.items():
            ordered = np.sort(combinations, axis=1)
            scores[name][:, (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)] = -np.inf
        for choice in range(choices if length else 0):
            for name, (best, at) in _assigned(scores, places).items():
                chosen = places[name][at]
                index[name][events, choice], value[name][events, choice] = chosen, best
                same = np.sort(places[name], axis=1) == np.sort(chosen, axis=1)[:, np.newaxis]
                known = np.isclose(scores[name], best[:, np.newaxis], atol=0.0)
                scores[name][same.all(axis=2) & known] = -np.inf
    each = {}
    for name, best in value.items():
        columns = {
            "index": ak.from_regular(index[name], axis=2),
            "probability": np.exp(best) if log else best,
        }
        there = np.isfinite(best)
        each[name] = ak.zip({n: ak.mask(c, there) for n, c in columns.items()}, depth_limit=2)
    return ak.zip(each, depth_limit=2)


def _numbers(array: ak.Array, length: int, name: str) -> Tensor:
    """Return the numbers of events of one length, one axis for all combinations."""
    shape = (len(array), *(length,) * (array.ndim - 1))
    numbers = None
    with suppress(ValueError):
        numbers = ak.to_numpy(ak.fill_none(array, -np.inf, axis=-1), allow_missing=False)
    # Without constituents, awkward may not know how many axes there are.
    if numbers is None or (numbers.shape != shape if length else numbers.size):
        raise InputError(
            f"target {name!r}: expected {length} constituents in each axis, as the first target "
            "has; give outputs of the same event"
        )
    numbers = numbers.astype(np.float64).reshape(len(array), math.prod(shape[1:]))
    finite: Tensor = np.nan_to_num(numbers, nan=-np.inf, neginf=-np.inf)
    return finite


def _assigned(
    scores: Mapping[str, Tensor], places: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Int64]]:
    """Return the score and the combination of each target, -inf where there is none left."""
    left = {name: numbers.copy() for name, numbers in scores.items()}
    every = np.arange(len(next(iter(left.values()))))
    assigned = {name: (np.full(len(every), -np.inf), np.zeros_like(every)) for name in left}
    for _ in left:
        best = {name: numbers.argmax(axis=1) for name, numbers in left.items()}
        most = np.stack([left[name][every, at] for name, at in best.items()])
        first = np.where(most.max(axis=0) > -np.inf, most.argmax(axis=0), -1)
        for number, (name, at) in enumerate(best.items()):
            rows = np.flatnonzero(first == number)
            assigned[name][0][rows], assigned[name][1][rows] = most[number, rows], at[rows]
            used = np.zeros((len(rows), int(places[name].max()) + 1), bool)
            np.put_along_axis(used, places[name][at[rows]], values=True, axis=1)
            for other, combinations in places.items():
                taken = used[:, combinations].any(axis=2)
                left[other][rows] = np.where(taken, -np.inf, left[other][rows])
            left[name][rows] = -np.inf
    return assigned
