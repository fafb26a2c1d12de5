"""An endpoint: a server's address, its state as this process sees it, and what is in flight."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from random import Random

from sonic_coffea import errors
from sonic_coffea.errors import SonicError
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._breaker import CircuitBreaker
from sonic_coffea.pool._channels import Channels
from sonic_coffea.pool._limits import AdaptiveLimit, Quota
from sonic_coffea.pool._request import Attempt, ModelKey, RequestSlice
from sonic_coffea.pool._settings import Settings, is_in_process
from sonic_coffea.pool._signature import Signature
from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """A server as a pool sees it at this moment."""

    url: str
    in_flight: int
    circuit: str
    last_error: str | None


@dataclass(slots=True)
class Telemetry:
    """What a client reports of a model on a server: the state now, and RTTs since the last report.

    Attributes
    ----------
    in_flight, waiting : int
        Requests at this moment.
    version : str
        The version that they ask for; empty if it is unknown.
    network_s : float
        The time to the server and back without any work; 0 if it is unknown.
    refused : int
        Requests that were refused for lack of capacity.
    full : float
        Requests like the last one that make a full batch.
    rtts : dict
        By size of the requests (bits of the number of rows): number, sum and minimum of the RTTs.
    """

    in_flight: int = 0
    waiting: int = 0
    version: str = ""
    network_s: float = 0.0
    refused: int = 0
    full: float = 1.0
    rtts: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    def answered(self, rtt_s: float, rows: int, full: float) -> None:
        self.full = full
        size = rows.bit_length()
        number, sum_s, min_s = self.rtts.get(size, (0, 0.0, rtt_s))
        self.rtts[size] = (number + 1, sum_s + rtt_s, min(min_s, rtt_s))


class Endpoint:
    """A server as this process sees it.

    Attributes
    ----------
    priority : float
        It gets requests only while no usable endpoint has a lower number.
    draining : bool
        Whether it gets no more requests, and is closed after the last one.
    signatures : dict
        Whether it has each model.
    limits, quotas : dict
        The adaptive limit, and the quota, of each model.
    attempts : dict
        The attempts in flight, in the order in which they began. Late ones may be at a server that
        hangs, so they do not count for limits.
    by_model : Counter
        The number of attempts in flight that are not late.
    late_at : float
        When an attempt may be late, at the earliest.
    probed_at : float
        When the probe began whose result is awaited; infinity if there is none.
    """

    def __init__(self, url: str, settings: Settings, rng: Random) -> None:
        self.url, self._settings = url, settings
        self.priority: float = 0
        self.draining = False
        self.breaker = CircuitBreaker(rng)
        self.signatures = defaultdict[ModelKey, Signature](partial(Signature, rng))
        self._revalidates_at = 0.0
        self._refused_bytes: dict[ModelKey, tuple[int, float]] = {}
        # What is in flight
        self.channels = Channels(settings.channels)
        self.limits = defaultdict[ModelKey, AdaptiveLimit](partial(AdaptiveLimit, settings, rng))
        self.quotas = defaultdict[ModelKey, Quota](Quota)
        self.attempts: dict[Attempt, None] = {}
        self.by_model: Counter[ModelKey] = Counter()
        self._begun = 0  # attempts so far: by it, endpoints with equal load take turns
        self._telemetry = defaultdict[ModelKey, Telemetry](Telemetry)
        # Late responses. The least time until a response is late is halved while the server hangs.
        # What this process makes itself would only take longer if it were made twice.
        min_late_s = math.inf if is_in_process(url) else settings.hedge_after_s or tuning.LATE_S
        self._healthy_min_late_s = self._min_late_s = min_late_s
        self._answered_from = 0.0  # when the youngest request began that was answered
        self.late_at = math.inf
        # Liveness. It owes a response if it was sent a request since its last sign of life, even if
        # the request was given up; `_alive_at` is that sign, or when it began to owe a response.
        self._owes, self._alive_at = False, 0.0
        self.probed_at = math.inf
        self._probe_answered_at = 0.0
        # The log
        self._retries, self._logs_at = 0, -math.inf
        self._loss_is_logged, self._loss_logs_at = False, -math.inf

    # Whether it can take requests

    @property
    def contracts(self) -> dict[ModelKey, Contract]:
        """The contracts of the models that it has."""
        known = ((key, signature.contract) for key, signature in self.signatures.items())
        return {key: contract for key, contract in known if contract is not None}

    @property
    def awaited(self) -> int:
        """The number of attempts that are not late."""
        return self.by_model.total()

    def lost_since(self, key: ModelKey) -> float:
        """Return when it was lost, or found without a model; infinity if it can serve the model."""
        return min(self.breaker.failing_since, self.signatures[key].missing_since)

    def back_offs(self, key: ModelKey) -> list[float]:
        """Return when each back-off ends that concerns a model."""
        signature, limit = self.signatures[key], self.limits[key]
        return [self.breaker.retry_at, limit.paused_until, signature.retry_at]

    def usable(self, request: RequestSlice, now: float) -> bool:
        """Whether a slice may be sent to it."""
        passes = self.breaker.circuit(now) != "open"
        return passes and not self.draining and self.signatures[request.key].fits(request)

    def remaining(self, key: ModelKey, now: float) -> int:
        """Return how many more requests for a model may be sent to it now."""
        remaining = self.limits[key].remaining(self.by_model[key], now, self.quotas[key])
        if self.breaker.circuit(now) == "half-open":
            return min(remaining, 1 - self.awaited)
        if self.breaker.exhausted(now) and self.awaited:
            return 0  # until a response comes, or these requests are lost, too
        return remaining

    def load(self, key: ModelKey) -> tuple[float, int]:
        """Return a sort key: of several endpoints, the one with the lowest is used least."""
        return self.by_model[key] / self.limits[key].value, self._begun

    def accepts_size(self, request: RequestSlice, now: float) -> bool:
        """Whether no request of this size was refused lately."""
        nbytes, until = self._refused_bytes.get(request.key, (0, -math.inf))
        return request.nbytes < nbytes or now >= until

    def wait_times(self, key: ModelKey) -> list[float]:
        """Return the times at which the next request for a model may leave."""
        quota = self.quotas[key]
        return [*self.back_offs(key), quota.next_turn_at, quota.expires_at]

    # Requests and their outcomes

    def begin(self, request: RequestSlice, now: float) -> Attempt:
        """Begin an attempt to send a slice."""
        if not self.attempts and not self._owes:
            self._alive_at = now
        self._owes = True
        key = request.key
        used = {attempt.channel for attempt in request.attempts if attempt.url == self.url}
        channel = self.channels.choose(used, now)
        self.channels[channel].in_flight += 1
        self.channels[channel].nbytes += request.nbytes
        self.by_model[key] += 1
        self._begun += 1
        self.quotas[key].sent(now)
        attempt = Attempt(request, self.url, channel, now, self.by_model[key])
        self.attempts[attempt] = None
        self.late_at = min(self.late_at, now + self._min_late_s)
        request.attempts.append(attempt)
        return attempt

    def settle(self, attempt: Attempt) -> None:
        """Make room for others, as an attempt has ended."""
        channel = self.channels[attempt.channel]
        channel.in_flight -= 1
        channel.nbytes -= attempt.slice.nbytes
        del self.attempts[attempt]
        if not attempt.late:
            self.by_model[attempt.key] -= 1

    def mark_alive(self, now: float) -> None:
        """Take a sign of life: any answer."""
        self._alive_at, self._owes = now, False

    def answered(self, attempt: Attempt, rtt_s: float, now: float) -> None:
        """Take a response to a request."""
        self.mark_alive(now)
        if self.breaker.succeed() and self._loss_is_logged:
            self._loss_is_logged = False
            logger.warning("%s answers again", self.url)
        self.signatures[attempt.key].answered()
        self.channels[attempt.channel].answered()
        self._answered_from = max(self._answered_from, attempt.begun_at)
        if attempt.late:  # it was slow, and did not hang
            self._min_late_s = min(2 * self._min_late_s, self._healthy_min_late_s)
        key, rows = attempt.key, attempt.slice.rows
        full = (attempt.slice.call.contract.max_rows or rows) / rows
        self.limits[key].answered(rtt_s, rows, attempt.in_flight, now, full)
        self._telemetry[key].answered(rtt_s, rows, full)

    def failed(self, error: SonicError, now: float) -> None:
        """Take the loss of a request; the endpoint is lost only if all requests in flight are."""
        self._owes, hopeless = False, self.awaited == 0
        delivered = not (isinstance(error, errors.ServerLostError) and error.undelivered)
        if self.breaker.fail(error, now, hopeless=hopeless):
            self._lost(error, now)
        elif hopeless and delivered and now >= self._revalidates_at:
            # Its only server may have been restarted, with another model.
            self._revalidates_at = now + tuning.VALID_S
            self.revalidate()
        self.channels.plan_renewals(now)

    def erred(self, attempt: Attempt, error: SonicError, now: float, *, too_large: bool) -> None:
        """Take an error other than a loss; `too_large`: the size of the request may be why."""
        key, limit = attempt.key, self.limits[attempt.key]
        if not isinstance(error, (errors.DeadlineError, errors.CancelledError)):
            self.mark_alive(now)
        if too_large:
            self._refuse_size(error, attempt.slice, now)
        match error:
            case errors.RouteTimeoutError():
                self.breaker.last_error = error
                limit.halve(now)
                if not self.by_model[key]:  # the route may cut all requests, and at once
                    limit.pause(now)
            case errors.OverloadError():
                self.breaker.last_error = error
                limit.refused(self.by_model[key], now, error.retry_after_s)
                self._telemetry[key].refused += 1
            case errors.TokenExpiredError():
                limit.pause(now)
            case errors.ModelNotFoundError():
                self.signatures[key].miss(now)

    def retried(self, error: SonicError, now: float) -> None:
        """Log the number of requests that are sent again, at most once in `RECHECK_S`."""
        self._retries += 1
        if now >= self._logs_at:
            requests = "1 request is" if self._retries == 1 else f"{self._retries} requests are"
            logger.warning("%s; %s sent again", error, requests)
            self._retries, self._logs_at = 0, now + tuning.RECHECK_S

    def revalidate(self) -> None:
        """Have its models validated again, as another server may come back at this URL."""
        for signature in self.signatures.values():
            signature.invalidate()

    def _lost(self, error: SonicError, now: float) -> None:
        """Forget its limits and validate again, as another server may come back at this URL."""
        if now >= self._loss_logs_at:
            what = "%s; nothing gets through, and requests are sent again for up to %g s"
            logger.warning(what, error, self._settings.retry_timeout_s)
            self._loss_is_logged = True
            self._logs_at = self._loss_logs_at = now + tuning.RECHECK_S
        self.limits.clear()
        self.revalidate()

    def _refuse_size(self, error: SonicError, request: RequestSlice, now: float) -> None:
        """Have requests of this size split for some time, as it refused this one for its size."""
        if not self.accepts_size(request, now):
            return
        _, until = self._refused_bytes.get(request.key, (0, -math.inf))
        level = logging.DEBUG if now < until else logging.WARNING
        logger.log(level, "%s; requests of %d bytes are split", error, request.nbytes)
        self._refused_bytes[request.key] = request.nbytes, now + tuning.RECHECK_S

    # Silence and late responses

    @property
    def probe_at(self) -> float:
        """When to probe it, unless it answers before; infinity if it owes nothing."""
        waits = self.attempts and self.probed_at == math.inf
        return self._alive_at + tuning.SILENCE_S if waits else math.inf

    def probed(self, error: SonicError | None, now: float) -> bool:
        """Take a probe's result, and return whether the server is lost.

        It is not if it has answered a request since the probe began.
        """
        probed_at, self.probed_at = self.probed_at, math.inf
        self._owes = False
        if error is None:
            self._alive_at = self._probe_answered_at = now
            return False
        silent = self._alive_at <= probed_at
        if silent and self.breaker.open(error, now):
            self._lost(error, now)
        return silent

    def overtaken(self, attempt: Attempt) -> bool:
        """Whether a request that was sent later, or at the same time, has been answered."""
        return attempt.begun_at <= self._answered_from

    def hedge_won(self, now: float) -> None:
        """Hedge the next late request sooner, as the server of this one hung."""
        self._min_late_s = max(self._min_late_s / 2, tuning.MIN_LATE_S)
        self.late_at = min(self.late_at, now + self._min_late_s)

    def take_late(self, now: float) -> list[Attempt]:
        """Return the attempts that have become late, which no longer count for limits."""
        awaited = [attempt for attempt in self.attempts if not attempt.late]
        late = [attempt for attempt in awaited if self._is_late(attempt, now)]
        for attempt in late:
            attempt.late = True
            self.by_model[attempt.key] -= 1
            self.channels[attempt.channel].late(now)
        oldest_at = min((x.begun_at for x in awaited if not x.late), default=math.inf)
        self.late_at = max(oldest_at + self._min_late_s, now + self._min_late_s / 4)
        return late

    def _is_late(self, attempt: Attempt, now: float) -> bool:
        """Whether an attempt has waited longer than usual, while the server answers others."""
        at_once, attempts = self._settings.hedge_after_s is not None, len(attempt.slice.attempts)
        late_s = self.limits[attempt.key].late_s(attempt.slice.rows)
        if late_s is None:
            travels_s = attempt.slice.nbytes / tuning.UNKNOWN_BYTES_PER_S
            late_s = 0.0 if at_once else tuning.UNKNOWN_S * attempts + travels_s
        back_off = max(1.0, attempts / tuning.MAX_RETRIES)
        late_at = attempt.sent_at + back_off * max(late_s, self._min_late_s)
        if now < late_at:
            return False
        hangs = at_once or self._min_late_s < self._healthy_min_late_s
        return hangs or self.overtaken(attempt) or self._probe_answered_at > late_at

    # What others are told

    def state(self, now: float) -> ServerState:
        error = self.breaker.last_error
        return ServerState(
            url=self.url,
            in_flight=len(self.attempts),
            circuit=self.breaker.circuit(now),
            last_error=str(error) if error else None,
        )

    def telemetry(self, key: ModelKey, waiting: int) -> Telemetry:
        """Return what happened to a model's requests since the last time; `waiting` of them do."""
        last, contract = self._telemetry.pop(key, Telemetry()), self.contracts.get(key)
        last.in_flight, last.waiting = self.by_model[key], waiting
        last.version = contract.version if contract else ""
        last.network_s = self.channels.round_trip_s
        return last
