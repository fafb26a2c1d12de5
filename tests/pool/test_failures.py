"""The table of failures: what becomes of rows by the error of their request."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.pool.scenario import Call

from sonic_coffea import errors
from sonic_coffea.pool import Settings
from sonic_coffea.pool._failures import MAX_SPLITS, Decision, classify
from sonic_coffea.pool._request import Attempt, RequestSlice

SETTINGS = Settings.make("grpc://one:8001", request_timeout_s=10, retry_timeout_s=20)
MANY, ONE_ROW = {"stop": 4}, {"stop": 1}


@pytest.mark.parametrize(
    ("kind", "rows", "overtaken", "expected"),
    [
        (errors.ServerLostError, MANY, False, (Decision.LOST, 20)),
        (errors.DeadlineError, MANY, True, (Decision.LOST, 20)),
        (errors.DeadlineError, MANY, False, (Decision.FAIL, math.inf)),
        (errors.OverloadError, MANY, False, (Decision.RETRY, 10)),
        (errors.RouteTimeoutError, MANY, False, (Decision.SPLIT, 10)),
        (errors.RouteTimeoutError, {**MANY, "splits": MAX_SPLITS}, False, (Decision.RETRY, 10)),
        (errors.RouteTimeoutError, ONE_ROW, False, (Decision.RETRY, 10)),
        (errors.ModelNotFoundError, MANY, False, (Decision.RETRY, 20)),
        (errors.TokenExpiredError, MANY, False, (Decision.RETRY, 20)),
        (errors.RequestTooLargeError, MANY, False, (Decision.SPLIT, math.inf)),
        (errors.RequestTooLargeError, {**MANY, "whole": True}, False, (Decision.RETRY, math.inf)),
        (errors.RequestTooLargeError, ONE_ROW, False, (Decision.RETRY, math.inf)),
        (errors.InferenceError, MANY, False, (Decision.RETRY, math.inf)),
        (
            errors.InferenceError,
            {**MANY, "inference_failures": 1},
            False,
            (Decision.FAIL, math.inf),
        ),
        (errors.RequestError, MANY, False, (Decision.FAIL, math.inf)),
        (errors.AccessError, MANY, True, (Decision.FAIL, math.inf)),
    ],
)
def test_each_failure_has_its_rule(
    kind: Any, rows: dict[str, Any], overtaken: bool, expected: tuple[Decision, float]
) -> None:
    request = RequestSlice(Call(), start=0, nbytes=16, **rows)
    attempt = Attempt(request, "grpc://one:8001", 0, 0.0, in_flight=2)
    assert classify(kind("no"), attempt, SETTINGS, overtaken=overtaken) == expected
