"""What a pool writes for a bug report, and whether it tells all that the core went by."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.doubling import MODEL, jets, twice
from tests.pool.scenario import Call, Waiter
from tests.pool.scripted import ONE, TWO, ScriptedServer, pool_of

from sonic_coffea import errors
from sonic_coffea.pool import ModelKey, Settings
from sonic_coffea.pool._core import Event, PoolCore
from sonic_coffea.pool._instructions import Answer
from sonic_coffea.pool._record import decided
from sonic_coffea.pool._request import RequestSlice
from sonic_coffea.transport import Contract, Response, TensorSpec


class Replay:
    """A core that takes the events of a dump again."""

    def __init__(self, lines: list[str]) -> None:
        start, *self.turns = map(json.loads, lines)
        assert start.pop("left_out") == 0
        has_fallback, seed = start.pop("has_fallback"), start.pop("seed")
        fallback = "grpc://fallback:8001" if has_fallback else None
        settings = Settings.make(start.pop("servers"), fallback=fallback, **start)
        self.core = PoolCore(settings, Random(seed))
        self.attempts: dict[int, Any] = {}
        self.others: dict[int, Any] = {}

    def run(self) -> int:
        """Compare each decision; return how many there were."""
        decisions = 0
        for now, events, expected in self.turns:
            instructions = self.core.handle(now, *map(self.event, events))
            for instruction, (kind, *fields) in zip(instructions, expected, strict=True):
                if kind == "Send":
                    self.attempts[fields[0][0]] = instruction.attempt
            now_decided = json.dumps(decided(instructions), default=lambda c: c.version)
            assert list(map(same, json.loads(now_decided))) == list(map(same, expected))
            decisions += len(expected)
        return decisions

    def event(self, line: list[Any]) -> Event:
        """Return an event again, its arguments by the methods of the same names."""
        taken, arguments = line
        again = {x: getattr(self, x, lambda v: v)(value) for x, value in arguments.items()}
        return partial(getattr(PoolCore, taken), **again)

    def slices(self, lines: list[Any]) -> list[RequestSlice]:
        return [self.slice(*line) for line in lines]

    def slice(
        self, number: int, start: int, stop: int, nbytes: int, whole: bool, key: Any, said: Any
    ) -> RequestSlice:
        if start == 0:
            self.others[number] = Call(outcome(said), ModelKey(*key))
        return RequestSlice(self.others[number], start, stop, nbytes, whole=whole)

    def call(self, number: int) -> Call:
        return self.others[number]

    def caller(self, number: int) -> Waiter:
        return self.others.setdefault(number, Waiter())

    def attempt(self, fields: list[Any]) -> Any:
        return self.attempts[fields[0]]

    def answer(self, fields: list[Any]) -> Answer:
        attempt, version, *times = fields
        response = Response(outputs={}, version=version, sent_bytes=0, received_bytes=0)
        return Answer(self.attempt(attempt), response, *times)

    def key(self, fields: list[Any]) -> ModelKey:
        return ModelKey(*fields)

    def error(self, said: Any) -> Any:
        return said and outcome(said)

    def outcome(self, said: Any) -> Any:
        return said and outcome(said)


def outcome(said: Any) -> Any:
    """Return a contract or an error."""
    if isinstance(said, dict):
        tensors = {x: [TensorSpec(**spec) for spec in said[x]] for x in ("inputs", "outputs")}
        return Contract(**{**said, **tensors})
    kind, message, marks = said
    error = getattr(errors, kind)(message)
    for name, mark in marks.items():
        if mark is not None:
            setattr(error, name, mark)
    return error


def same(decision: list[Any]) -> Any:
    """Return the part of a decision that does not depend on where objects lie in memory."""
    kind, *fields = decision
    if kind in ("Send", "Cancel", "Count"):
        return kind, fields[0][1:]
    return (kind, fields) if kind in ("Probe", "Validate", "Reconnect", "Close") else kind


def test_dumps_replay_each_decision_without_rows_and_secrets(
    one: ScriptedServer, two: ScriptedServer, tmp_path: Path
) -> None:
    options = {"hedge_after_s": 0.05, "retry_timeout_s": 5.0, "channels": 2}
    with pool_of(ONE, TWO, headers={"a": "secret"}, **options) as pool:
        MODEL(jets(*[98_765_432] * 8), pool=pool)
        assert twice(MODEL(jets(*range(100)), pool=pool)) == list(range(100))
        one.gate.clear()
        assert twice(MODEL(jets(*range(40)), pool=pool)) == list(range(40))
        one.gate.set()
        two.behaviour = lambda *_: errors.OverloadError("full")
        assert twice(MODEL(jets(*range(100)), pool=pool)) == list(range(100))
        pool.dump(tmp_path / "dump")
        with pytest.raises(errors.ConfigError, match="cannot write"):
            pool.dump(tmp_path)
        options = pool.settings.options()
    text = (tmp_path / "dump").read_text()
    assert "Answer" in text
    assert "secret" not in text
    assert "98765432" not in text
    lines = text.splitlines()
    numbers = {name: value for name, value in options.items() if isinstance(value, (int, float))}
    assert numbers.items() <= json.loads(lines[0]).items()
    assert Replay(lines).run() > 100


def test_dumps_have_the_last_of_many_turns(
    one: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonic_coffea.pool._record.MAX_ITEMS", 1000)
    with pool_of(ONE) as pool:
        for _ in range(3):
            MODEL(jets(*range(800)), pool=pool)
        pool.dump(tmp_path / "dump")
    start, *turns = map(json.loads, (tmp_path / "dump").read_text().splitlines())
    assert start["left_out"] > 0
    assert 0 < len(turns) <= 1000
    assert any(kind == "answered" for kind, *_ in turns[-1][1])
