"""Advice from the statistics of a run: causes of lost time, and remedies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sonic_coffea.errors import printable

if TYPE_CHECKING:
    from sonic_coffea.reporting._tally import Statistics, Tally
    from sonic_coffea.transport import ModelStatistics

# During the first requests, code is compiled, and servers warm up.
_SOME_REQUESTS = 50
# By how much one time has to exceed another, to be the cause of a delay.
_MUCH_LONGER = 2.0


def advise(
    statistics: Statistics, timings: Mapping[tuple[str, str], ModelStatistics]
) -> Iterator[str]:
    """Yield what slows a run down, by statistics of its clients and its servers, and the remedy."""
    s, total = statistics, statistics.total()
    padding = _ratio(s.padding, s.padding + s.elements)
    truncated = _ratio(s.truncated, s.truncated + s.elements)
    retried = _ratio(total.retries, total.requests)
    rows = _ratio(total.rows, total.requests)
    warm = total.requests > _SOME_REQUESTS
    if s.masked:
        yield (
            f"{s.masked:,} rows are masked (None), as no server scored them: the log says "
            "why; a longer retry_timeout_s, or a fallback, would wait for the servers"
        )
    if padding > 0.5:
        yield (
            f"{padding:.0%} of the elements that are sent are padding: Bucketed sends "
            "rows of like length together, Flat sends none"
        )
    if truncated > 0.05:
        yield (
            f"{truncated:.0%} of the constituents are truncated: compare the "
            "length with that of the network's training"
        )
    if retried > 0.01:
        yield (
            f"{retried:.0%} of the requests were sent again: servers are "
            "lost or overloaded; the log says which"
        )
    if warm and rows < 32:
        yield (
            f"a request holds {rows:.0f} rows: larger chunks, or a "
            "larger max_batch_size of the model, spare servers and network"
        )
    if warm and total.pack_s + total.unpack_s > total.trip_s > 0:
        yield (
            "packing and unpacking take longer than the servers: more cores would help; more "
            "servers would not"
        )
    for (server, model, _), tally in statistics:
        if tally.requests > _SOME_REQUESTS:
            name = printable(f"{model} on {server}")
            yield from _of_server(name, tally, timings.get((server, model)))


def _of_server(model: str, tally: Tally, timings: ModelStatistics | None) -> Iterator[str]:
    # A request that waits while others are packed does not wait for servers.
    packs = tally.pack_s + tally.unpack_s > tally.trip_s
    waits = tally.wait_s > _MUCH_LONGER * tally.trip_s and not packs
    if timings is not None and timings.requests:
        queue_s = timings.queue_s / timings.requests
        work_s = timings.work_s / timings.requests
        network_s = tally.trip_s / tally.requests - queue_s - work_s
        if waits and queue_s < 0.1 * work_s:
            yield (
                f"requests wait here while {model} has an empty queue: allow more in "
                "flight (max_in_flight, max_in_flight_bytes)"
            )
        elif queue_s > _MUCH_LONGER * work_s:
            yield (
                f"requests for {model} wait there {_ratio(queue_s, work_s):.0f} times as long as "
                "they are worked on: it is saturated, and needs more instances, or servers beside"
            )
        if network_s > _MUCH_LONGER * (queue_s + work_s) > 0:
            yield (
                f"the network takes {network_s / (queue_s + work_s):.0f} times as long as "
                f"{model}: smaller types (dtype='float16'), Bucketed, or compression send less"
            )
    elif waits:
        yield (
            f"requests wait here for {model} {_ratio(tally.wait_s, tally.trip_s):.0f} times "
            "as long as they travel: more servers, or more instances, would help"
        )
    p50, p99 = tally.latency_s(0.5), tally.latency_s(0.99)
    if p99 > 10 * p50:
        yield (
            f"the p99 of requests for {model} is {p99 / p50:.0f} times their p50: "
            "hedge_after_s sends slow ones to another server, too"
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
