from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import awkward as ak
import numpy as np
import onnxruntime
import pytest
from tests.scored import same_scores

import sonic_coffea as sonic
from sonic_coffea import errors

if TYPE_CHECKING:
    from pathlib import Path


def test_scores_equal_direct_inference(
    connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array, direct: list[Any]
) -> None:
    scores = tagger(jets)
    assert str(scores.type) == "2000 * var * ?{qcd: float32, top: float32}"
    same_scores(scores.top, direct)
    np.testing.assert_allclose(ak.flatten(ak.drop_none(scores.top + scores.qcd)), 1, atol=1e-6)
    total = connected.statistics.total()
    assert total.rows == int(ak.sum(~ak.is_none(jets, axis=1)))
    assert total.requests == -(-total.rows // 64)


def test_any_selection_scores_the_same(
    connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array, direct: list[Any]
) -> None:
    chosen = [7, 3, 3, 1500, 0]
    same_scores(tagger(jets[chosen]).top, [direct[i] for i in chosen])
    single = next(i for i, event in enumerate(direct) if len(event) == 1)
    same_scores(tagger(jets[single : single + 1]).top, direct[single : single + 1])


def test_depth_does_not_matter(
    connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array, direct: list[Any]
) -> None:
    flat = tagger(ak.flatten(jets))
    assert flat.top.tolist() == pytest.approx([s for e in direct for s in e], abs=1e-6)
    deeper = tagger(ak.Array([jets[:3].tolist(), jets[3:5].tolist()]))
    assert deeper.top.tolist() == [tagger(jets[:3]).top.tolist(), tagger(jets[3:5]).top.tolist()]


def test_values_per_constituent(connected: sonic.Pool, jets: ak.Array) -> None:
    model = sonic.Model(
        "tagger",
        {"features": sonic.Padded(["pt", "eta"], 4), "mask": sonic.Mask(4)},
        {"scores": ["qcd", "top"], "weights": sonic.Output(["pt", "eta"], per="constituent")},
    )
    result = model(jets)
    assert result.fields == ["scores", "weights"]
    kept = ak.local_index(jets, axis=2) < 4
    assert ak.all(ak.drop_none(result.weights.pt, axis=2) == jets.pt[kept])
    assert ak.all(ak.is_none(result.weights, axis=2) == ~kept)


def test_no_object_needs_no_server(tagger: sonic.Model, jets: ak.Array) -> None:
    with sonic.connect("grpc://127.0.0.1:9"):
        for nothing in (jets[:0], jets[ak.num(jets) == 0], jets[:, :0]):
            scores = tagger(nothing)
            assert scores.tolist() == nothing.tolist()
            assert str(scores.type).endswith("var * ?{qcd: float32, top: float32}")


def test_hundreds_of_labels_are_not_all_printed() -> None:
    few, many = (
        sonic.Model("m", {"x": sonic.Row("pt")}, {"y": [f"v{n}" for n in range(number)]})
        for number in (12, 300)
    )
    assert "v10, v11)" in repr(few)
    for text in (repr(many), many._repr_html_()):
        assert "v8, v9, ..., v299: 300 labels" in text
        assert "v10" not in text


def test_pending(connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array) -> None:
    pending = tagger.submit(jets)
    assert "tagger" in repr(pending)
    scores = pending.result(timeout_s=60)
    assert pending.done()
    assert pending.result().top.tolist() == scores.top.tolist()
    assert "done" in repr(pending)
    pending.cancel()
    assert pending.result().top.tolist() == scores.top.tolist()


def test_what_made_the_scores_is_written_on_them(
    connected: sonic.Pool, server: sonic.LocalServer, tagger: sonic.Model, jets: ak.Array
) -> None:
    record = tagger(jets).attrs["sonic"]
    assert len(record["digest"]) == 64
    assert record == {
        "digest": record["digest"],
        "model": "tagger",
        "version": "1",
        "servers": [server.url],
        "config_hash": tagger.config_hash,
        "sonic_coffea": sonic.__version__,
    }
    assert tagger(jets)[5:9].attrs["sonic"] == record


def test_hash_changes_with_the_declaration(tagger: sonic.Model) -> None:
    others = [
        sonic.Model("tagger", tagger.inputs, {"scores": ["top", "qcd"]}),
        sonic.Model("tagger", tagger.inputs, {"scores": ["qcd", "top"]}, version=2),
        sonic.Model(
            "tagger",
            {**tagger.inputs, "features": sonic.Padded(["pt", sonic.Feature("eta", scale=2)], 8)},
            {"scores": ["qcd", "top"]},
        ),
    ]
    assert len({m.config_hash for m in (tagger, *others)}) == 4
    assert pickle.loads(pickle.dumps(tagger)).config_hash == tagger.config_hash


def test_hash_is_that_of_the_declaration_as_it_is() -> None:
    model = sonic.Model("m", {"x": sonic.Row("pt")}, {"y": ["a"]})
    first = model.config_hash
    # The same object: a hash of every call would take longer than a small call.
    assert model.config_hash is first
    assert first.encode() not in pickle.dumps(model)
    model.version = "2"
    model.inputs["x"] = sonic.Row("eta")
    model.outputs["y"] = sonic.Output(["b"])
    same = sonic.Model("m", {"x": sonic.Row("eta")}, {"y": ["b"]}, version=2)
    assert model.config_hash == same.config_hash != first
    assert pickle.loads(pickle.dumps(model)).config_hash == same.config_hash


def test_contract_is_checked_before_anything_is_sent(
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
        "declared with 3 labels, the model gives 2",
        "FP64 [N, 1, 8]",
        "FP32 [N, 2, ?]",
    ):
        assert part in message
    assert connected.statistics.total().requests == 0


@pytest.mark.parametrize(
    ("name", "version", "hint"),
    [("taggr", None, "did you mean 'tagger'"), ("tagger", 7, "it has version 1")],
)
def test_missing_model(
    connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array, name: str, version: Any, hint: str
) -> None:
    model = sonic.Model(name, tagger.inputs, tagger.outputs, version=version)
    with pytest.raises(errors.ModelNotFoundError, match=hint) as caught:
        model(jets)
    assert caught.value.model == name
    assert caught.value.server in connected.settings.servers
    tagger(jets[:10])  # what one lacks, another has


def test_pinned_version(connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array) -> None:
    pinned = sonic.Model("tagger", tagger.inputs, tagger.outputs, version=1)
    assert pinned(jets).top.tolist() == tagger(jets).top.tolist()


def test_calls_from_many_threads(
    connected: sonic.Pool, tagger: sonic.Model, jets: ak.Array, direct: list[Any]
) -> None:
    scores: dict[int, Any] = {}

    def work(i: int) -> None:
        scores[i] = tagger(jets[i * 250 : (i + 1) * 250]).top

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same_scores(ak.concatenate([scores[i] for i in range(8)]), direct)


def test_without_servers_it_says_how_to_name_one(tagger: sonic.Model, jets: ak.Array) -> None:
    with pytest.raises(errors.ConfigError, match="call sonic.connect"):
        tagger(jets)


def test_wrong_declarations(tagger: sonic.Model) -> None:
    with pytest.raises(errors.ConfigError, match="at least one input and one output"):
        sonic.Model("m", {}, {"x": ["a"]})
    with pytest.raises(errors.ConfigError, match="expected a layout such as sonic.Padded"):
        sonic.Model("m", {"x": ["pt"]}, {"x": ["a"]})  # type: ignore[dict-item]
    with pytest.raises(errors.ConfigError, match="a dict for inputs, .* got Row"):
        sonic.Model("m", sonic.Row(["pt"]), {"x": ["a"]})  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="a dict for outputs, .* got list"):
        sonic.Model("m", {"x": sonic.Row(["pt"])}, ["a"])  # type: ignore[arg-type]


def test_import_is_light() -> None:
    code = (
        "import sys, sonic_coffea as sonic\n"
        "heavy = {'coffea', 'distributed', 'numba', 'grpc', 'tritonclient', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "m = sonic.Model('m', {'x': sonic.Padded('pt', 3)}, {'y': ['a']})\n"
        "sonic.connect('grpc://triton.example:8001')\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def some_jets(rng: np.random.Generator, levels: int) -> Any:
    """Lists in lists of jets, some of which are None, and some of the lists above them."""
    if rng.random() < (0.2 if levels in (0, 2) else 0):
        return None
    if levels:
        return [some_jets(rng, levels - 1) for _ in range(rng.integers(0, 4))]
    columns = rng.normal(size=(2, rng.integers(0, 11))).astype(np.float32).tolist()
    return [{"pt": pt, "eta": eta} for pt, eta in zip(*columns, strict=True)]


def one_by_one(session: Any, plain: Any, levels: int) -> Any:
    """The top scores by onnxruntime, each jet by itself."""
    if plain is None:
        return None
    if levels:
        return [one_by_one(session, item, levels - 1) for item in plain]
    features, mask = np.zeros((1, 2, 8), np.float32), np.zeros((1, 1, 8), np.float32)
    for k, constituent in enumerate(plain[:8]):
        features[0, :, k] = constituent["pt"], constituent["eta"]
        mask[0, 0, k] = 1
    return float(session.run(["scores"], {"features": features, "mask": mask})[0][0, 1])


def same(scores: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(scores) == len(expected) and all(map(same, scores, expected))
    return scores is None if expected is None else abs(scores - expected) < 1e-6


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_any_nesting_scores_as_onnxruntime_does(
    connected: sonic.Pool, tagger: sonic.Model, tagger_path: Path, depth: int
) -> None:
    rng = np.random.default_rng(depth)
    plain = [some_jets(rng, depth - 1) for _ in range(40)]
    array = ak.values_astype(ak.Array(plain), np.float32)
    expected = one_by_one(onnxruntime.InferenceSession(tagger_path), plain, depth)
    assert same(tagger(array).top.tolist(), expected)


def test_several_outputs_of_nothing_have_their_types(connected: sonic.Pool, jets: ak.Array) -> None:
    model = sonic.Model(
        "tagger",
        {"features": sonic.Padded(["pt", "eta"], 8), "mask": sonic.Mask(8)},
        {
            "scores": ["qcd", "top"],
            "weights": sonic.Output(["pt", "eta"], per="constituent"),
        },
    )
    full, empty = model(jets), model(jets[:0])
    assert connected.statistics.total().rows == sum(
        jet is not None for event in jets.tolist() for jet in event
    )
    types = [str(ak.type(x)).partition(" * ")[2] for x in (full, empty)]
    # Nothing was cut off, so there is no option among the constituents.
    assert types[1] == (
        "var * ?{scores: {qcd: float32, top: float32}, weights: var * {pt: float32, eta: float32}}"
    )
    assert types[0].replace("?{pt", "{pt") == types[1]


def test_outputs_without_labels_are_numbers(connected: sonic.Pool, jets: ak.Array) -> None:
    inputs = {"features": sonic.Padded(["pt", "eta"], 8), "mask": sonic.Mask(8)}
    plain = sonic.Model("tagger", inputs, {"scores": None})(jets[:50])
    named = sonic.Model("tagger", inputs, {"scores": ["qcd", "top"]})(jets[:50])
    assert str(plain.type) == "50 * var * option[2 * float32]"
    assert plain[..., 1].tolist() == named.top.tolist()


def test_scores_do_not_depend_on_the_requests(
    server: sonic.LocalServer, tagger: sonic.Model, jets: ak.Array
) -> None:
    scores = []
    for options in ({}, {"max_request_bytes": 500}, {"max_in_flight": 1, "max_in_flight_bytes": 1}):
        with sonic.connect(server, **options) as pool:
            scores.append(tagger(jets[:400], pool=pool).top.tolist())
    assert scores[0] == scores[1] == scores[2]
