"""Parameters that requests carry, and models that rows cannot be sent to."""

from __future__ import annotations

from typing import Any

import awkward as ak
import pytest
from tests.network.fault_server import Exchange, FaultServer, answered
from tritonclient.grpc import model_config_pb2, service_pb2

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport._model_queries import contract_of

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


def test_a_real_server_takes_them(server: sonic.LocalServer, installation: Any) -> None:
    inputs = {"features": sonic.Padded(["pt", "eta"], 4), "mask": sonic.Mask(4)}
    options = {"parameters": {"era": "2024"}, "priority": 1, "server_timeout_s": 20.0}
    with sonic.connect(server) as pool:
        each = [
            sonic.Model("tagger", inputs, {"scores": ["qcd", "top"]}, **more)(EVENTS, pool=pool)
            for more in ({}, options)
        ]
    assert each[0].tolist() == each[1].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters": {"priority": 1}}, "'priority' is not free; declare priority="),
        ({"parameters": {"timeout": 1}}, "declare server_timeout_s="),
        ({"parameters": {"sequence_id": 1}}, "sequences are not supported"),
        ({"parameters": {"a": [1]}}, "'a': expected a bool, int, float or str, got list"),
        ({"priority": 0}, "a priority of 1 or more, got 0"),
        ({"server_timeout_s": 0.0}, "server_timeout_s above 0 s and below .*, got 0.0"),
        ({"server_timeout_s": "20"}, "server_timeout_s above 0 s and below .*, got '20'"),
    ],
)
def test_bad_parameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        model(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_transaction_policy": {"decoupled": True}}, "decoupled: it gives any number of"),
        ({"sequence_batching": {}}, "a sequence batcher: its requests belong together"),
    ],
)
def test_models_that_rows_cannot_be_sent_to(config: dict[str, Any], message: str) -> None:
    metadata = service_pb2.ModelMetadataResponse(name="m", versions=["1"])
    metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 1])
    metadata.outputs.add(name="y", datatype="FP32", shape=[-1, 1])
    contract = contract_of("m", "1", metadata, model_config_pb2.ModelConfig(**config))
    with pytest.raises(errors.ContractError, match=message):
        model().compare(contract, server="grpc://one")
    fine = contract_of("m", "1", metadata, model_config_pb2.ModelConfig(dynamic_batching={}))
    assert not model().compare(fine, server="grpc://one").unsupported
