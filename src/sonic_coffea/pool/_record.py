"""The last events that a core took, and what it decided: for bug reports, and to replay them."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

from sonic_coffea.errors import SonicError
from sonic_coffea.pool._core import Event, PoolCore
from sonic_coffea.pool._instructions import Instruction
from sonic_coffea.pool._limits import Quota
from sonic_coffea.pool._process import hooks
from sonic_coffea.pool._request import Attempt, RequestSlice
from sonic_coffea.pool._settings import Settings
from sonic_coffea.transport import Contract, Response

# Events, slices and instructions that are kept: some 4 MB.
MAX_ITEMS = 20_000


class RecordedCore(PoolCore):
    """A core that remembers its last turns, without rows and tokens."""

    def __init__(self, settings: Settings) -> None:
        seed = Random().getrandbits(32)
        nbytes = settings.in_flight_bytes(hooks.memory_bytes)
        settings = dataclasses.replace(settings, max_in_flight_bytes=nbytes)
        super().__init__(settings, Random(seed))
        # Decisions depend on numbers; other options are paths, or secret.
        options = settings.options().items()
        numbers = {name: value for name, value in options if isinstance(value, int | float)}
        self._start = {"servers": settings.servers, "balance": settings.balance, **numbers}
        self._start |= {"has_fallback": settings.fallback is not None, "seed": seed}
        self._turns = self._items = 0
        self._last: deque[Any] = deque()

    def handle(self, now: float, *events: Event) -> list[Instruction]:
        taken = [
            (event.func.__name__, {name: plain(value) for name, value in event.keywords.items()})
            for event in events
        ]
        instructions = super().handle(now, *events)
        self._last.append((now, taken, decided(instructions)))
        self._turns += 1
        self._items += items(self._last[-1])
        while self._items > MAX_ITEMS:
            self._items -= items(self._last.popleft())
        return instructions

    def lines(self) -> list[str]:
        """Return the settings and the last turns, each as a line of JSON."""
        first = {**self._start, "left_out": self._turns - len(self._last)}
        return [json.dumps(line, default=dataclasses.asdict) for line in (first, *self._last)]


def items(turn: tuple[float, list[Any], list[Any]]) -> int:
    _, taken, decided = turn
    slices = sum(len(arguments.get("slices", ())) for _, arguments in taken)
    return 1 + len(taken) + slices + len(decided)


def decided(instructions: Sequence[Instruction]) -> list[Any]:
    """Return instructions, each as its name and its plain fields."""
    return [[type(item).__name__, *map(plain, item)] for item in instructions]


def plain(value: Any) -> Any:  # noqa: PLR0911  a table
    """Return a value for JSON; an object without one, such as a call, becomes a number."""
    match value:
        case None | bool() | int() | float() | str() | Contract():  # most are numbers
            return value
        case Attempt(slice=request):
            return id(value), value.url, value.channel, request.start, request.stop
        case RequestSlice(call=call):
            numbers = value.start, value.stop, value.nbytes, value.whole
            return id(call), *numbers, call.key, call.contract
        case SonicError():
            marks = "undelivered", "unreached", "gone", "retry_after_s"
            return type(value).__name__, str(value), {x: getattr(value, x, None) for x in marks}
        case Response():
            return value.version
        case Quota():
            return dataclasses.astuple(value)
        case dict():
            return [plain(item) for item in value.items()]
        case list() | tuple():
            return [plain(item) for item in value]
    return id(value)
