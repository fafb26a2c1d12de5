"""What becomes of the rows of a request that failed: one rule for each kind of failure."""

from __future__ import annotations

import math
from typing import Literal

from sonic_coffea import errors
from sonic_coffea.errors import SonicError
from sonic_coffea.pool import _tuning as tuning
from sonic_coffea.pool._request import Attempt
from sonic_coffea.pool._settings import Settings

Decision = Literal["retry", "split", "lost", "fail"]
"""Send rows again, send them again by halves, take their server for lost, or give them up.

Rows that are lost are sent again while a server is left, or may come back.
"""


def classify(  # noqa: PLR0911  a table
    error: SonicError, attempt: Attempt, settings: Settings, *, overtaken: bool
) -> tuple[Decision, float]:
    """Return what becomes of rows, and for how long after their first failure.

    `overtaken`: a request that was sent no earlier has been answered.
    """
    request = attempt.slice
    splits = request.rows > 1 and not request.whole
    # Other requests in flight may be why a route is slow; then parts take as long.
    cut = splits and (attempt.in_flight == 1 or request.splits < tuning.MAX_RETRIES - 1)
    is_first = not request.inference_failures
    match error:
        case errors.RouteTimeoutError() if cut:
            return "split", settings.request_timeout_s
        case errors.OverloadError():
            return "retry", settings.request_timeout_s
        case errors.ModelNotFoundError() | errors.TokenExpiredError():
            return "retry", settings.retry_timeout_s
        case errors.ServerLostError():
            return "lost", settings.retry_timeout_s
        case errors.DeadlineError() if overtaken:
            return "lost", settings.retry_timeout_s
        case errors.RequestTooLargeError() if splits:
            return "split", math.inf
        case errors.RequestTooLargeError() | errors.InferenceError() if is_first:
            return "retry", math.inf
    return "fail", math.inf
