"""A call's slices: each counts once, whatever becomes of its attempts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.pool.scenario import LOST, contract

from sonic_coffea import errors
from sonic_coffea.pool._call import Call
from sonic_coffea.pool._request import Attempt, RequestSlice
from sonic_coffea.pool._servers import Sender
from sonic_coffea.transport import Response

RESPONSE = Response(outputs={}, version="2", sent_bytes=0, received_bytes=0)


class Rows(list[int]):
    """Rows that lie where they are selected."""

    segments = ()

    def selection(self, start: int, stop: int) -> range:
        return range(start, stop)

    def events_of(self, start: int, stop: int) -> tuple[int, int]:
        return start, stop

    def pack(self, start: int, stop: int, lend: Any = None) -> dict[str, np.ndarray]:
        return {"x": np.asarray(self[start:stop])}


def call_of(rows: int, placed: list[Any], **options: Any) -> tuple[Call, list[RequestSlice]]:
    output = SimpleNamespace(place=lambda selection, *_: placed.append(selection))
    call = Call(contract(), Rows(range(rows)), {"y": output}, ["y"], version=None, **options)
    slices = [RequestSlice(call, n, n + 4, 16) for n in range(0, rows, 4)]
    call.begin(rows, Call.end)
    return call, slices


def test_a_call_ends_when_each_row_is_placed_or_masked_whatever_overlaps() -> None:
    """Were rows counted by number, the whole and one half would stand for the others."""
    placed: list[Any] = []
    call, (first, second, third) = call_of(12, placed, mask=True)
    front, back = first.halves()
    for request in (front, first, front, third):
        call.place(request, RESPONSE)
        call.finish(request)
    assert call.missing(first) == call.missing(back) == []
    assert call.missing(second) == [(4, 8)]
    assert not call.over
    front, back = second.halves()
    call.place(back, RESPONSE)
    call.finish(back)
    # Of a slice that is lost, rows that have their scores keep them.
    assert call.fail(second, LOST) == 2
    assert call.lost == [range(4, 6)]
    assert call.over


def test_what_servers_lose_fails_the_call_unless_it_may_be_lost() -> None:
    call, (first, second) = call_of(8, [])
    assert call.fail(second, LOST) == 0
    assert call.over
    with pytest.raises(errors.ServerLostError) as caught:
        call.raise_failure()
    assert (caught.value.rows, caught.value.events) == ((4, 8), (4, 8))
    assert call.fail(first, LOST) == 0
    call.cancel()
    assert call.failure is caught.value
    # A wrong model is no loss.
    masked, (one,) = call_of(4, [], mask=True)
    masked.fail(one, errors.ContractError("another model"))
    assert isinstance(masked.failure, errors.ContractError)


def test_an_attempt_is_cancelled_whether_it_has_left_or_not() -> None:
    cancelled: list[str] = []
    handle = SimpleNamespace(cancel=lambda: cancelled.append("handle"))
    _, (request, _) = call_of(8, [])
    late, early = (Attempt(request, "grpc://s1:8001", 0, 0.0, 1) for _ in range(2))
    late.sent(handle)
    late.cancel()
    assert cancelled == ["handle"]
    early.cancel()
    early.sent(handle)
    assert cancelled == ["handle", "handle"]


def test_an_attempt_is_sent_when_it_is_packed() -> None:
    """Until then, no server can be late with its response."""
    before: list[int] = []
    sent: list[Any] = []
    call, (request, _) = call_of(8, [])
    attempt = Attempt(request, "grpc://s1:8001", 0, 0.0, 1)

    def infer(_: Any, pack: Any, *__: Any, **___: Any) -> Any:
        before.append(len(sent))
        pack(None)
        return SimpleNamespace()

    connection: Any = SimpleNamespace(infer=infer, close=lambda: None)
    sender = Sender(connection, [].append, sent.append)
    sender.send(call, attempt, "1")
    sender.close()
    assert sender._thread is not None
    sender._thread.join()
    assert before == [0]
    assert [event.attempt for event in sent] == [attempt]


def test_what_nobody_waits_for_is_neither_packed_nor_sent() -> None:
    posted: list[Any] = []
    connection: Any = SimpleNamespace(
        infer=lambda *_, **__: pytest.fail("sent"), close=lambda: None
    )
    call, (request, _) = call_of(8, [])
    attempt = Attempt(request, "grpc://s1:8001", 0, 0.0, 1)
    attempt.cancel()
    sender = Sender(connection, posted.append, [].append)
    sender.send(call, attempt, "1")
    sender.close()
    assert sender._thread is not None
    sender._thread.join()
    (event,) = posted
    assert isinstance(event.error, errors.CancelledError)
