"""Scores are those of onnxruntime, in the structure of the objects; calls may be many at a time."""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import numpy as np
import pytest
from tests.doubling import MODEL, served
from tests.network.fault_server import Exchange, FaultServer, answered
from tests.scored import same_scores
from tests.waiting import until
from tritonclient.grpc import service_pb2

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.tools import check, scaffold


def test_scores_are_those_of_direct_inference(
    connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array, direct: list[Any]
) -> None:
    scores = tagger(jets)
    assert str(scores.type) == "2000 * var * ?{qcd: float32, top: float32}"
    same_scores(scores.top, direct)
    np.testing.assert_allclose(ak.flatten(ak.drop_none(scores.top + scores.qcd)), 1, atol=1e-6)
    total = connected.statistics.total()
    assert total.rows == int(ak.sum(~ak.is_none(jets, axis=1)))
    assert total.requests == -(-total.rows // 64)


def test_hundreds_of_labels_are_not_all_printed() -> None:
    many = declared(outputs={"y": [f"v{n}" for n in range(300)]})
    assert "v8, v9, ..., v299: 300 labels" in repr(many)


def test_the_hash_is_that_of_the_declaration_as_it_is() -> None:
    model = declared()
    hashes = [model.config_hash]
    # The same object: a hash of every call would take longer than a small call.
    assert model.config_hash is hashes[0]
    assert hashes[0].encode() not in pickle.dumps(model)
    scaled = sonic.Row(sonic.Feature("pt", scale=2))
    renamed = sonic.Output(["b"], discriminants={"odds": "b / (1 - b)"})
    for change in (
        lambda: setattr(model, "version", "2"),
        lambda: model.inputs.update(x=scaled),
        lambda: model.outputs.update(y=renamed),
    ):
        change()
        hashes.append(model.config_hash)
    assert len(set(hashes)) == 4
    same = declared(inputs={"x": scaled}, outputs={"y": renamed}, version=2)
    assert model.config_hash == same.config_hash == pickle.loads(pickle.dumps(model)).config_hash


def test_a_contract_is_compared_once_until_the_declaration_changes() -> None:
    model = sonic.Model("m", MODEL.inputs, {"y": ["twice"]}, parameters={"seed": 1})
    numbers = ak.Array([{"pt": 1.0}])
    with FakeServer(served()) as server, sonic.connect(server.url) as pool:
        assert model(numbers).twice.tolist() == [2.0]
        contract = pool.contract("m", None)
        # The same object: a comparison in every call would take a tenth of a small one.
        assert model.compare(contract, server="") is model.compare(contract, server="")
        model.outputs["y"] = sonic.Output(["once", "twice"])
        with pytest.raises(errors.ContractError, match="declared with 2 labels"):
            model(numbers)
        model.outputs["y"] = sonic.Output(["doubled"])
        assert model(numbers).doubled.tolist() == [2.0]
        for seed in (1, True):  # which are equal
            model.parameters = (("seed", seed),)
            assert model.compare(contract, server="").parameters[0][1] is seed


def test_contracts_are_checked_before_anything_is_sent(
    connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array
) -> None:
    wrong = sonic.Model(
        "tagger",
        {"feature": sonic.Padded("pt", 8, dtype="float64"), "mask": sonic.Mask(8)},
        {"score": ["qcd", "top"], "scores": ["a", "b", "c"]},
    )
    with pytest.raises(errors.ContractError) as caught:
        wrong(jets)
    message = str(caught.value)
    for part in (
        "the model has no input 'feature'; did you mean 'features'?",
        "nothing is given for the model's input 'features'",
        "the model has no output 'score'; did you mean 'scores'?",
        "declared with 3 labels, the model gives FP32 [N, 2]",
        "FP64 [N, 1, 8]",
        "FP32 [N, 2, ?]",
    ):
        assert part in message
    assert connected.statistics.total().requests == 0


def test_labels_are_compared_with_those_of_the_server(
    installation: Any, tagger_path: Path, tagger: sonic.Model, tmp_path: Path
) -> None:
    served, labels = tmp_path / "served", {"tagger": {"scores": ["qcd", "top"]}}
    sonic.build_repository(served, {"tagger": tagger_path}, labels=labels)
    with sonic.LocalServer(served, stop_timeout_s=0.0) as server, sonic.connect(server) as pool:
        tagger.check()
        swapped, renamed = (
            sonic.Model("tagger", tagger.inputs, {"scores": names})
            for names in (["top", "qcd"], ["light", "heavy"])
        )
        with pytest.raises(errors.ContractError, match="labels .* 'scores' .* another order"):
            swapped.check()
        for model, detail in (
            (renamed, "the server calls the values of 'scores' qcd, top"),
            (swapped, "are declared in another order"),
        ):
            steps = {step.name: step.detail for step in check(pool.settings, declared=[model])}
            assert detail in steps["declaration of tagger"]
        assert '"scores": ["qcd", "top"]' in scaffold(pool.settings, "tagger")


def test_calls_from_many_threads(
    connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array, direct: list[Any]
) -> None:
    with ThreadPoolExecutor(8) as threads:
        parts = [jets[start : start + 250] for start in range(0, len(jets), 250)]
        scores = list(threads.map(lambda part: tagger(part).top, parts))
    same_scores(ak.concatenate(scores), direct)


def declared(**options: Any) -> sonic.Model:
    return sonic.Model(
        "m", **{"inputs": {"x": sonic.Row("pt")}, "outputs": {"y": ["a"]}, **options}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "call sonic.connect"),
        ({"on_error": None}, "no on_error Non"),
        ({"pool": 0}, "sonic.connect returns"),
        ({"masks": None}, "submit has no option 'masks'; did you mean 'mask'"),
    ],
)
def test_bad_calls_are_refused(options: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        declared()([{"pt": 1.0}], **options)
    with pytest.raises(errors.ConfigError, match="expected pool to be what"):
        declared().check(0)


EVENTS = ak.Array([[{"pt": 1.0, "eta": 0.5}], []])


def test_requests_carry_parameters() -> None:
    requests: list[Any] = []

    async def record(call: Exchange) -> None:
        await call.complete.wait()
        requests.append(service_pb2.ModelInferRequest.FromString(call.request[5:]))
        await answered(call)

    parameters = {"era": "2024", "calibrated": True, "step": 3, "threshold": 0.25}
    with FaultServer({"m": FakeModel.of(declared())}) as server, sonic.connect(server.url):
        server.misbehave(record, times=2)
        scores = declared(parameters=parameters, priority=2, server_timeout_s=0.5)(EVENTS)
        assert scores.tolist() == declared()(EVENTS).tolist()
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
    first, second = (declared(parameters={"era": era}) for era in ("2023", "2024"))
    assert first.config_hash != second.config_hash != declared().config_hash
    with (
        FakeServer({"m": FakeModel.of(declared())}) as server,
        sonic.connect(server.url, cache=tmp_path / "scores", cache_trusts_versions=True) as pool,
    ):
        for model in (first, second, declared(), declared(priority=1), second):
            model(EVENTS)
        # Priority says when, not what.
        assert pool.statistics.total().rows == 3


def scored(model: sonic.Model, jets: ak.Array, server: FakeServer) -> Any:
    pending = model.submit(jets)
    assert len(pending.result()) == 20
    return pending


def unasked(model: sonic.Model, jets: ak.Array, server: FakeServer) -> Any:
    pending = model.submit(jets)
    until(pending.done)
    return pending


def cancelled(model: sonic.Model, jets: ak.Array, server: FakeServer) -> Any:
    pending = model.submit(jets)
    pending.cancel()
    return pending


def late(model: sonic.Model, jets: ak.Array, server: FakeServer) -> Any:
    server.hold()
    pending = model.submit(jets)
    with contextlib.suppress(errors.DeadlineError):
        pending.result(0.0)
    server.release()
    return pending


def refused(model: sonic.Model, jets: ak.Array, server: FakeServer) -> Any:
    server.fail(grpc.StatusCode.INVALID_ARGUMENT, "no luck")
    pending = model.submit(jets)
    with contextlib.suppress(errors.RequestError):
        pending.result()
    return pending


def unknown(model: sonic.Model, jets: ak.Array, server: FakeServer) -> Any:
    with contextlib.suppress(errors.ModelNotFoundError):
        model.submit(jets, version=7)


@pytest.mark.parametrize("end", [scored, unasked, cancelled, late, refused, unknown])
def test_rows_are_freed_with_their_call(
    sonic_server: Any, request: pytest.FixtureRequest, end: Any
) -> None:
    """Also while somebody keeps the call.

    Chunks are large, and few objects: cycles of them are collected many chunks later.
    """
    model = sonic.Model("tagger", {"x": sonic.Padded(["pt"], 4)}, {"y": ["top"]})
    server = sonic_server(model)
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    jets, freed = jets_and_numbers()
    kept = end(model, jets, server)
    del jets
    until(lambda: freed() is None)  # by the pool's thread, too
    del kept


def test_rows_are_freed_once_scores_of_their_constituents_are_taken(sonic_server: Any) -> None:
    outputs = {"y": sonic.Output(per="constituent")}
    model = sonic.Model("tagger", {"x": sonic.Padded(["pt"], 4)}, outputs)
    sonic_server(model, functions={"tagger": lambda inputs: {"y": inputs["x"][:, 0]}})
    jets, freed = jets_and_numbers()
    pending = model.submit(jets)
    del jets
    first, again = pending.result(), pending.result()
    gc.collect()
    assert freed() is None
    assert first.tolist() == again.tolist()
    assert ak.num(first).tolist() == [3] * 20


def jets_and_numbers() -> tuple[ak.Array, Any]:
    """Return 20 jets, and a reference to their numbers."""
    pt = np.ones(60, np.float32)
    content = ak.contents.RecordArray([ak.contents.NumpyArray(pt)], ["pt"])
    return ak.Array(ak.contents.ListOffsetArray(OFFSETS, content)), weakref.ref(pt)


OFFSETS = ak.index.Index64(np.arange(0, 61, 3))
