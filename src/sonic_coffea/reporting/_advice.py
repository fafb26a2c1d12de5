"""Advice from the statistics of a run: causes of lost time, and remedies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sonic_coffea.errors import printable

if TYPE_CHECKING:
    from sonic_coffea.reporting._tally import Statistics, Tally
    from sonic_coffea.transport import ModelStatistics

# Limits beyond which there is advice.
_MUCH_PADDING = 0.5
_MUCH_TRUNCATED = 0.05
_MANY_RETRIES = 0.01
_LONG_WAIT = 2.0
_LONG_TAIL = 10.0
_FEW_ROWS, _SOME_REQUESTS = 32, 50
_NETWORK = 2.0


def advise(
    statistics: Statistics, timings: Mapping[tuple[str, str], ModelStatistics]
) -> Iterator[str]:
    """Yield what slows a run down, by statistics of its clients and its servers, and the remedy."""
    s, total = statistics, statistics.total()
    if s.masked:
        yield (
            f"{s.masked:,} rows are masked (None), as no server scored them: the log says "
            "why; a longer retry_timeout_s, or a fallback, would wait for the servers"
        )
    sent = s.padding + s.elements
    if sent and s.padding / sent > _MUCH_PADDING:
        yield (
            f"{s.padding / sent:.0%} of the elements that are sent are padding: Bucketed sends "
            "rows of like length together, Flat sends none"
        )
    constituents = s.truncated + s.elements
    if constituents and s.truncated / constituents > _MUCH_TRUNCATED:
        yield (
            f"{s.truncated / constituents:.0%} of the constituents are truncated: compare the "
            "length with that of the network's training"
        )
    if total.requests and total.retries / total.requests > _MANY_RETRIES:
        yield (
            f"{total.retries / total.requests:.0%} of the requests were sent again: servers are "
            "lost or overloaded; the log says which"
        )
    if total.requests > _SOME_REQUESTS and total.rows / total.requests < _FEW_ROWS:
        yield (
            f"a request holds {total.rows / total.requests:.0f} rows: larger chunks, or a "
            "larger max_batch_size of the model, spare servers and network"
        )
    if total.requests > _SOME_REQUESTS and total.pack_s + total.unpack_s > total.trip_s > 0:
        yield (
            "packing and unpacking take longer than the servers: more cores would help; more "
            "servers would not"
        )
    for (server, model, _), tally in statistics:
        account = timings.get((server, model))
        yield from _of_server(printable(server), printable(model), tally, account)


def _of_server(
    server: str, model: str, tally: Tally, timings: ModelStatistics | None
) -> Iterator[str]:
    # During the first requests, code is compiled, and servers warm up.
    if tally.requests <= _SOME_REQUESTS:
        return
    # A request that waits while others are packed does not wait for servers.
    packs = tally.pack_s + tally.unpack_s > tally.trip_s
    waits = tally.wait_s > _LONG_WAIT * tally.trip_s and not packs
    if timings is not None and timings.requests:
        queue_s = timings.queue_s / timings.requests
        work_s = (timings.input_s + timings.compute_s + timings.output_s) / timings.requests
        network_s = tally.trip_s / tally.requests - queue_s - work_s
        if waits and queue_s < 0.1 * work_s:
            yield (
                f"requests wait here while {model} on {server} has an empty queue: allow more in "
                "flight (max_in_flight, max_in_flight_bytes)"
            )
        elif queue_s > _LONG_WAIT * work_s:
            yield (
                f"requests for {model} wait on {server} {queue_s / work_s:.0f} times as long as it "
                "works on them: it is saturated, and needs more instances, or servers beside it"
            )
        if network_s > _NETWORK * (queue_s + work_s) > 0:
            yield (
                f"the network takes {network_s / (queue_s + work_s):.0f} times as long as "
                f"{model} on {server}: smaller types (dtype='float16'), Bucketed, or compression "
                "send less"
            )
    elif waits:
        yield (
            f"requests wait here for {model} on {server} {tally.wait_s / tally.trip_s:.0f} times "
            "as long as they travel: more servers, or more instances, would help"
        )
    p50, p99 = tally.latency_s(0.5), tally.latency_s(0.99)
    if p99 > _LONG_TAIL * p50:
        yield (
            f"the p99 of requests for {model} on {server} is {p99 / p50:.0f} times their p50: "
            "hedge_after_s sends slow ones to another server, too"
        )
