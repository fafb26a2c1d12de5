"""Errors carry their place, pickle, hint at the nearest name, and are the tree that is drawn."""

from __future__ import annotations

import pickle
import re

import pytest

from sonic_coffea import errors

CLASSES = [each for name, each in vars(errors).items() if name.endswith("Error")]


def drawn_parents() -> dict[str, str]:
    """Each class of the drawing, and the one above it."""
    above: dict[int, str] = {}
    parents = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│├└─ ]*)(\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            above[depth] = match[2]
            if depth:
                parents[match[2]] = above[depth - 1]
    return parents


def test_classes_are_as_the_docstring_draws_them() -> None:
    parents = {c.__name__: c.__bases__[0].__name__ for c in CLASSES}
    assert parents.pop("SonicError") == "Exception"
    assert drawn_parents() == parents


PLACE = {"server": "grpc://s:1", "model": "m", "version": "2", "request": "r1"}


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_pickle_and_are_no_oserror(kind: type[errors.SonicError]) -> None:
    assert not issubclass(kind, OSError)
    before = kind("what was wrong", events=(3, 7), rows=(5, 9), **PLACE)
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is kind
    place = "server grpc://s:1, model m, version 2, request r1, events 3..6, rows 5..8"
    assert str(after) == str(before) == f"what was wrong [{place}]"
    assert (after.server, after.events, after.rows) == ("grpc://s:1", (3, 7), (5, 9))


def test_context_is_added_and_kept() -> None:
    error = errors.RequestError("no", model="m").at(model="other", server="s").because("why")
    assert (error.model, error.server) == ("m", "s")
    assert error.within("input 'x'").message == "input 'x': no (why)"
    table = errors.ContractError("what differs:\n  x  float32", server="grpc://s:1")
    assert str(table) == "what differs:\n  x  float32\n[server grpc://s:1]"


def test_causes_are_found_below_other_errors() -> None:
    inner = errors.FieldError("no field")
    openly, silently = Exception("wrapped by coffea"), Exception("and again")
    openly.__cause__ = inner
    silently.__context__ = openly
    for error in (inner, openly, silently):
        assert errors.find(error) is inner
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert errors.find(first) is None


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("FatJets", ["FatJet", "Jet", "Muon"], "did you mean 'FatJet' or 'Jet'?"),
        ("fatjet", ["FatJet"], "did you mean 'FatJet'?"),
        ("zzz", ["b", "a"], "there are: a, b"),
        ("zzz", ["a\nWARNING: b", "\x1b[2J"], r"there are: \x1b[2J, a\nWARNING: b"),
        ("x", [], "there are none"),
    ],
)
def test_hints_name_the_nearest(name: str, known: list[str], hint: str) -> None:
    assert errors.nearest(name, known) == hint


@pytest.mark.parametrize("change", ["at", "because", "within"])
def test_errors_with_more_context_keep_what_the_server_said(change: str) -> None:
    overload = errors.OverloadError("the queue is full")
    overload.retry_after_s = 2.5
    arguments: dict[str, str] = {"server": "grpc://s:1"} if change == "at" else {}
    words = () if change == "at" else ("at noon",)
    changed = getattr(overload, change)(*words, **arguments)
    assert type(changed) is errors.OverloadError
    assert changed.retry_after_s == 2.5
    assert str(changed) != str(overload)


def test_long_values_are_shortened() -> None:
    with pytest.raises(errors.ConfigError, match=r"^expected a dict, got \[0, 1, 2.*…$") as caught:
        errors.expect(holds=False, expected="a dict", got=list(range(10_000)))
    assert len(str(caught.value)) < 600
