"""An endpoint: a server's address, and its state as this process sees it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    CancelledError,
    DeadlineError,
    ModelNotFoundError,
    OverloadError,
    RouteTimeoutError,
    TokenExpiredError,
)
from sonic_coffea.pool._breaker import Circuit, CircuitBreaker
from sonic_coffea.pool._in_flight import InFlight
from sonic_coffea.pool._signature import VALID_S, Signatures

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from random import Random

    from sonic_coffea.errors import SonicError
    from sonic_coffea.pool._in_flight import RttStatistics
    from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
    from sonic_coffea.pool._settings import Settings

logger = logging.getLogger(__name__)

# An endpoint that owes responses is probed after this time without any.
SILENCE_S = 2.0
LOG_INTERVAL_S = 10.0
# After this time, larger requests are tried again: the server may have more memory by then.
REFUSED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a pool knows of a server at the moment."""

    url: str
    in_flight: int
    circuit: str
    last_error: str | None

    @property
    def usable(self) -> bool:
        """Whether requests may be sent to it."""
        return self.circuit != Circuit.OPEN.value


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """What a pool reports of an endpoint to the scheduler.

    ``models`` has, by model, the requests in flight and the RTT statistics since the last report;
    ``network_s`` is the time to the server and back, 0 if it is unknown.
    """

    url: str
    circuit_open: bool
    network_s: float
    models: Mapping[ModelKey, tuple[int, RttStatistics]]


class Endpoint:
    """A server as this process sees it.

    Attributes
    ----------
    priority : int
        Requests go to it while no endpoint of a lower number can take them.
    draining : bool
        Whether it gets no more requests, and is closed when the last one has ended.
    """

    def __init__(self, url: str, settings: Settings, rng: Random) -> None:
        self.url = url
        self._rng = rng
        self._revalidates_at = 0.0
        self.priority: float = 0  # the fallback comes after all servers that are named
        self.draining = False
        self._refused_bytes: dict[ModelKey, tuple[int, float]] = {}
        self.breaker = CircuitBreaker(rng)
        self.liveness = Liveness()
        self._retry_timeout_s = settings.retry_timeout_s
        self._retries, self._logs_at, self._loss_is_logged = 0, -math.inf, False
        self.signatures = Signatures(rng)
        self.in_flight = InFlight(url, settings)

    def lost_since(self, key: ModelKey) -> float | None:
        """Return since when it is lost, or lacks a model; None if it can serve the model."""
        since = self.breaker.failing_since, self.signatures.missing_since(key)
        return min((at for at in since if at is not None), default=None)

    def retry_at(self, key: ModelKey) -> float:
        """Return when all back-offs that concern a model are over."""
        paused_until = self.in_flight.limits[key].paused_until
        return max(self.breaker.retry_at, paused_until, self.signatures.retry_at(key))

    def usable(self, key: ModelKey, now: float) -> bool:
        """Whether requests for a model may be sent to it."""
        passes = self.breaker.circuit(now) is not Circuit.OPEN
        return passes and not self.draining and key in self.signatures.valid

    def room(self, key: ModelKey, now: float) -> int:
        """Return how many more requests for a model may be sent to it now."""
        room = self.in_flight.room(key, now)
        if self.breaker.circuit(now) is Circuit.HALF_OPEN:
            return min(room, 1 - self.in_flight.awaited)
        # Until something gets through, or all requests in flight are lost, too.
        held = self.breaker.exhausted(now) and self.in_flight.awaited > 0
        return 0 if held else room

    def begin(self, request: RequestSlice, now: float) -> Attempt:
        """Begin an attempt to send a slice."""
        self.liveness.request_sent(len(self.in_flight), now)
        return self.in_flight.begin(request, now)

    def answered(self, attempt: Attempt, rtt_s: float, now: float) -> None:
        self.liveness.answered(now)
        if self.breaker.succeed() and self._loss_is_logged:
            self._loss_is_logged = False
            logger.warning("%s answers again", self.url)
        self.signatures.answered(attempt.key)
        self.in_flight.answered(attempt, rtt_s, now)

    def failed(self, error: SonicError, now: float) -> None:
        """Take the loss of a request; the endpoint is lost only if all requests are."""
        self.liveness.owes = False
        hopeless = self.in_flight.awaited == 0
        if self.breaker.fail(error, now, hopeless=hopeless):
            self._lost(error, now)
        elif hopeless and not getattr(error, "undelivered", False) and now >= self._revalidates_at:
            # Its only server may have been restarted, with another model.
            self._revalidates_at = now + VALID_S
            self.signatures.revalidate()
        self.in_flight.channels.plan_renewals(now)

    def probed(self, error: SonicError | None, now: float) -> bool:
        """Take a probe's result, and return whether the server is silent."""
        silent = self.liveness.probed(now, live=error is None)
        if silent and error is not None and self.breaker.open(error, now):
            self._lost(error, now)
        return silent

    def _lost(self, error: SonicError, now: float) -> None:
        """Start slowly and validate again, as another server may come back at this URL."""
        if now >= self._logs_at:
            what = "%s; nothing gets through, and requests are sent again for up to %g s"
            logger.warning(what, error, self._retry_timeout_s)
            self._loss_is_logged, self._logs_at = True, now + LOG_INTERVAL_S
        self.in_flight.limits.clear()
        self.signatures.revalidate()

    def retried(self, error: SonicError, now: float) -> None:
        """Log how many requests are sent again, at most once in `LOG_INTERVAL_S`."""
        self._retries += 1
        if now >= self._logs_at:
            requests = "1 request is" if self._retries == 1 else f"{self._retries} requests are"
            logger.warning("%s; %s sent again", error, requests)
            self._retries, self._logs_at = 0, now + LOG_INTERVAL_S

    def erred(self, attempt: Attempt, error: SonicError, now: float, *, too_large: bool) -> None:
        """Take an error that it gave, other than a loss: perhaps because of the request's size."""
        key, limit = attempt.key, self.in_flight.limits[attempt.key]
        if not isinstance(error, (DeadlineError, CancelledError)):
            self.liveness.answered(now)
        if too_large:
            self._refuse_size(error, attempt.slice, now)
        match error:
            case RouteTimeoutError():
                self.breaker.last_error = error
                limit.halve(now)
                if not self.in_flight.by_model[key]:  # the route may cut all requests, and at once
                    limit.pause(now, self._rng)
            case OverloadError():
                self.breaker.last_error = error
                self.in_flight.refused(key, now, self._rng, error.retry_after_s)
            case TokenExpiredError():
                limit.pause(now, self._rng)
            case ModelNotFoundError():
                self.signatures.miss(key, now)

    def _refuse_size(self, error: SonicError, request: RequestSlice, now: float) -> None:
        """Send smaller requests for some time, as it refused this one for its size."""
        if not self.takes(request, now):
            return
        _, until = self._refused_bytes.get(request.key, (0, -math.inf))
        level = logging.DEBUG if now < until else logging.WARNING
        logger.log(level, "%s; requests of %d bytes are split", error, request.nbytes)
        self._refused_bytes[request.key] = request.nbytes, now + REFUSED_S

    def takes(self, request: RequestSlice, now: float) -> bool:
        """Whether no request of this size was refused lately."""
        nbytes, until = self._refused_bytes.get(request.key, (0, -math.inf))
        return request.nbytes < nbytes or now >= until

    def state(self, now: float) -> ServerState:
        error = self.breaker.last_error
        return ServerState(
            url=self.url,
            in_flight=len(self.in_flight),
            circuit=self.breaker.circuit(now).value,
            last_error=str(error) if error else None,
        )

    def report(self, models: Iterable[ModelKey]) -> EndpointReport:
        """Return the events since the last report, also for models without requests here."""
        valid = [key for key in models if key in self.signatures.valid]
        return EndpointReport(
            url=self.url,
            circuit_open=self.breaker.failing_since is not None,
            network_s=self.in_flight.channels.round_trip_s,
            models=self.in_flight.report(valid),
        )


class Liveness:
    """Probing: whether a server that owes responses is silent.

    Attributes
    ----------
    active_at : float
        When it last answered anything, or was sent a request while it owed no response.
    lives_at : float
        When it last answered a probe.
    owes : bool
        Whether it was sent a request since, with no known outcome; also if that was given up.
    """

    def __init__(self) -> None:
        self.active_at = self.lives_at = 0.0
        self.owes = False
        self._probed_at: float | None = None

    def answered(self, now: float) -> None:
        self.active_at, self.owes = now, False

    def request_sent(self, others_in_flight: int, now: float) -> None:
        if not others_in_flight and not self.owes:
            self.active_at = now
        self.owes = True

    def due_at(self, in_flight: int) -> float:
        """Return when it is to be probed, unless it answers before."""
        waits = in_flight and self._probed_at is None
        return self.active_at + SILENCE_S if waits else math.inf

    def start_probe(self, now: float) -> None:
        self._probed_at = now

    def probed(self, now: float, *, live: bool) -> bool:
        """Take the probe's result, and return whether the server is silent.

        An answer since the probe began counts more than the probe.
        """
        probed_at, self._probed_at = self._probed_at, None
        self.owes = False
        if live:
            self.active_at = self.lives_at = now
            return False
        return probed_at is None or self.active_at <= probed_at


class EndpointRegistry:
    """The endpoints of a pool, by URL.

    Attributes
    ----------
    by_url : dict
        The endpoints; that of an attempt stays while the attempt is in flight.
    servers : tuple of str
        Their URLs, without the fallback's.
    """

    def __init__(self, settings: Settings, rng: Random) -> None:
        self._settings = settings
        self._rng = rng
        self.by_url: dict[str, Endpoint] = {}
        self.set_servers(settings.servers, None)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.by_url.values())

    @property
    def active(self) -> list[Endpoint]:
        """The endpoints that are not draining."""
        return [endpoint for endpoint in self if not endpoint.draining]

    def set_servers(self, servers: Sequence[str], fallback: str | None) -> None:
        """Add and drain endpoints, so that these are the active ones."""
        self.servers = tuple(servers)
        urls = list(servers) if fallback is None else [*servers, fallback]
        new = [url for url in urls if url not in self.by_url]
        # Many processes start at the same time, and must not all turn to the same server.
        self._rng.shuffle(new)
        for url in new:
            self.by_url[url] = Endpoint(url, self._settings, self._rng)
        ordered = self._settings.balance == "priority"
        for url, endpoint in self.by_url.items():
            endpoint.draining = url not in urls
            endpoint.priority = urls.index(url) if ordered and url in urls else 0
        if fallback is not None and fallback not in servers:
            self.by_url[fallback].priority = math.inf

    def remove_drained(self) -> list[str]:
        """Remove endpoints that are draining and have nothing in flight; return their URLs."""
        urls = [e.url for e in self if e.draining and not e.in_flight]
        for url in urls:
            del self.by_url[url]
        return urls

    def candidates(self, key: ModelKey, now: float) -> list[Endpoint]:
        """Return the endpoints that may have a model: those that have not been rejected for it."""
        return [e for e in self.active if e.signatures.rejection(key, now) is None]

    def all_lost_since(self, key: ModelKey, now: float) -> float | None:
        """Return since when the last endpoint of a model is lost, or lacks it."""
        since = [endpoint.lost_since(key) for endpoint in self.candidates(key, now)]
        lost = [at for at in since if at is not None]
        return max(lost, default=-math.inf) if len(lost) == len(since) else None

    def choose(self, request: RequestSlice, now: float) -> Endpoint | None:
        """Return the endpoint that is to get a slice, if one has room for it."""
        usable = [e for e in self if e.usable(request.key, now)]
        if request.inference_failures:  # the endpoint that failed on these rows comes last
            usable = [e for e in usable if e.url != request.last_url] or usable
        late = {attempt.url for attempt in request.attempts}
        elsewhere = [e for e in usable if e.url not in late] if late else []
        return self._least_used(elsewhere, request, now) or self._least_used(usable, request, now)

    def _least_used(
        self, usable: list[Endpoint], request: RequestSlice, now: float
    ) -> Endpoint | None:
        if not usable:
            return None
        key = request.key
        highest = min([e.priority for e in usable])
        usable = [e for e in usable if e.priority == highest]
        # An endpoint without a quota, beside others that have one, will soon have one, too.
        allocated = [e for e in usable if e.in_flight.quota(key, now)]
        able = [e for e in allocated or usable if e.room(key, now) > 0]
        if len(able) <= 1:
            return able[0] if able else None

        def load(endpoint: Endpoint) -> tuple[bool, float, int]:
            in_flight = endpoint.in_flight
            used = in_flight.by_model[key] / in_flight.limits[key].value
            # The endpoint that has just lost these rows is the last to get them again.
            return endpoint.url == request.last_url, used, in_flight.taken

        return min(able, key=load)
