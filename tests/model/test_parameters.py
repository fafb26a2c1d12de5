"""Parameters that requests carry, and models that rows cannot be sent to."""

from __future__ import annotations

from typing import Any

import awkward as ak
import pytest
from tests.network.fault_server import Exchange, FaultServer, answered
from tritonclient.grpc import service_pb2

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer

EVENTS = ak.Array([[{"pt": 1.0, "eta": 0.5}], []])


def model(**options: Any) -> sonic.Model:
    return sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["a"]}, **options)


def test_requests_carry_parameters() -> None:
    requests: list[Any] = []

    async def record(call: Exchange) -> None:
        await call.complete.wait()
        requests.append(service_pb2.ModelInferRequest.FromString(call.request[5:]))
        await answered(call)

    declared = {"era": "2024", "calibrated": True, "step": 3, "threshold": 0.25}
    with FaultServer({"m": FakeModel.of(model())}) as server, sonic.connect(server.url):
        server.misbehave(record, times=2)
        scores = model(parameters=declared, priority=2, server_timeout_s=0.5)(EVENTS)
        assert scores.tolist() == model()(EVENTS).tolist()
    first, second = requests
    assert first.parameters["era"].string_param == "2024"
    assert first.parameters["calibrated"].bool_param is True
    assert first.parameters["step"].int64_param == 3
    assert first.parameters["threshold"].double_param == 0.25
    assert first.parameters["priority"].int64_param == 2
    assert first.parameters["timeout"].int64_param == 500_000
    assert not second.parameters


def test_scores_of_other_parameters_are_others(tmp_path: Any) -> None:
    """Neither the cache nor the provenance takes one for the other."""
    first, second = (model(parameters={"era": era}) for era in ("2023", "2024"))
    assert first.config_hash != second.config_hash != model().config_hash
    with (
        FakeServer({"m": FakeModel.of(model())}) as server,
        sonic.connect(server.url, cache=tmp_path / "scores", cache_trusts_versions=True) as pool,
    ):
        for declared in (first, second, model(), model(priority=1), second):
            declared(EVENTS)
        # Priority says when, not what.
        assert pool.statistics.total().rows == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters": {"priority": 1}}, "'priority' is not free; declare priority="),
        ({"parameters": {"timeout": 1}}, "declare .*server_timeout_s="),
        ({"parameters": {"sequence_id": 1}}, "sequences are not supported"),
        ({"parameters": {"a": [1]}}, "'a': expected a bool, int, float or str, got list"),
        ({"priority": 0}, "priority of 1 or more, got 0"),
        ({"server_timeout_s": 0.0}, "server_timeout_s above 0 s and below .*, got 0.0"),
        ({"server_timeout_s": "20"}, "server_timeout_s above 0 s and below .*, got '20'"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        model(**options)
