"""Retries: what a failed attempt tells of its endpoint, and whether its rows are sent again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    DeadlineError,
    InferenceError,
    ModelNotFoundError,
    OverloadError,
    RequestTooLargeError,
    RouteTimeoutError,
    ServerLostError,
    SonicError,
    TokenExpiredError,
)
from sonic_coffea.pool._breaker import back_off_s

if TYPE_CHECKING:
    from sonic_coffea.pool._endpoint import Endpoint
    from sonic_coffea.pool._models import ServedModels
    from sonic_coffea.pool._request import Attempt, ModelKey
    from sonic_coffea.pool._state import CoreState

# Rows that servers lose while they answer other rows may be killing the servers. If each second
# server is dead, one request of 16 is lost four times by chance.
SUSPECT_LOSSES = MAX_RETRIES = 4
# A request that a route cuts is split into eighths, while others are in flight beside it.
MAX_SPLITS = 3


class RetryPolicy:
    """Decides by the error, by how long rows have been failing, and by their endpoint."""

    def __init__(self, state: CoreState, models: ServedModels) -> None:
        self._state = state
        self._models = models

    def again(self, attempt: Attempt, error: SonicError, now: float) -> bool:  # noqa: PLR0911  a table
        """Learn from a failed attempt, and return whether its rows are sent again."""
        request, endpoint = attempt.slice, self._state.endpoints.get(attempt.url)
        if request.first_failed_at is None:
            request.first_failed_at = now
        failing_s = now - request.first_failed_at
        assert endpoint is not None  # noqa: S101  it is removed when nothing is in flight to it
        match error:
            case ModelNotFoundError():
                self._missed(endpoint, attempt.key, now)
                return failing_s < self._state.settings.retry.timeout_s
            case OverloadError():
                if splits(attempt, error):
                    endpoint.too_large(error, request, now)
                endpoint.overloaded(error, attempt.key, now)
                return failing_s < self._state.settings.timeouts.request_s
            case ServerLostError():
                return self._retries_lost(attempt, endpoint, error, now)
            case DeadlineError() if endpoint.in_flight.overtaken(attempt):
                return self._retries_lost(attempt, endpoint, error, now)
            case RequestTooLargeError() if request.rows > 1:
                endpoint.liveness.hear(now)
                endpoint.too_large(error, request, now)
                return True
            case RequestTooLargeError() | InferenceError():
                endpoint.liveness.hear(now)
                request.inference_failures += 1
                return request.inference_failures == 1
            case TokenExpiredError():
                endpoint.liveness.hear(now)
                endpoint.in_flight.limit(attempt.key).pause(now, self._state.rng)
                return failing_s < self._state.settings.retry.timeout_s
        return False

    def _missed(self, endpoint: Endpoint, key: ModelKey, now: float) -> None:
        """Learn that a server lacks a model: others behind its URL may have it."""
        endpoint.liveness.hear(now)
        endpoint.signatures.miss(key, now)
        if key not in endpoint.signatures.valid:
            self._models.forget(key)

    def _retries_lost(
        self, attempt: Attempt, endpoint: Endpoint, error: SonicError, now: float
    ) -> bool:
        request, timeout_s = attempt.slice, self._state.settings.retry.timeout_s
        endpoint.failed(error, now)
        self._models.doubt()
        if not getattr(error, "undelivered", False):
            request.losses += 1
            if request.losses >= SUSPECT_LOSSES:
                back_offs = request.losses - SUSPECT_LOSSES + 1
                request.retry_at = now + back_off_s(back_offs, self._state.rng)
        lost_since = self._state.lost_since(attempt.key, now)
        if lost_since is not None:
            return now - lost_since < timeout_s
        return request.retries < MAX_RETRIES or now - (request.first_failed_at or now) < timeout_s


def splits(attempt: Attempt, error: SonicError) -> bool:
    """Return whether a request may pass in parts that did not pass as a whole."""
    request = attempt.slice
    if request.whole or request.rows == 1:
        return False
    if isinstance(error, RouteTimeoutError):
        # Others' requests may be why it took long; then small ones take as long.
        return attempt.in_flight == 1 or request.splits < MAX_SPLITS
    return isinstance(error, RequestTooLargeError)
