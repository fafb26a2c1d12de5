"""Ensembles: one call for several models, and tensors that do not connect."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from sonic_coffea.errors import ConfigError
from sonic_coffea.server import Ensemble, Served, build_repository

from .support import configuration, infer

STEPS = """
import numpy as np

def scale(raw):
    return {"features": (raw / np.float32(10)).astype("float32")}

def calibrate(scores, sum):
    return {"prob": scores[:, 1] ** 2 * sum}

def total(raw):
    return {"sum": raw.sum(axis=1)}
"""
CHAIN = [
    ("scale", {"raw": "RAW"}, {"features": "X"}),
    ("total", {"raw": "RAW"}, {"sum": "SUM"}),
    ("network", {"x": "X"}, {"scores": "S"}),
    ("calibration", {"scores": "S", "sum": "SUM"}, {"prob": "PROB"}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory, classifier):
    file = tmp_path_factory.mktemp("steps") / "steps.py"
    file.write_text(STEPS)

    def step(name, inputs, outputs):
        return Served(f"{file}:{name}", inputs=inputs, outputs=outputs)

    raw, number = {"raw": ("float32", ["N", 8])}, ("float32", ["N"])
    return {
        "scale": step("scale", raw, {"features": ("float32", ["N", 8])}),
        "total": step("total", raw, {"sum": number}),
        "network": classifier,
        "calibration": step(
            "calibrate", {"scores": ("float32", ["N", 2]), "sum": number}, {"prob": number}
        ),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory, models, serve):
    """Of two ensembles, one of them with a step that is not batched."""
    folder = tmp_path_factory.mktemp("ensembles")
    (folder / "f.py").write_text("def f(a, b): return {'y': a.sum() + b.sum(axis=0)}\n")
    fold = Served(
        f"{folder}/f.py:f",
        inputs={"a": ("float32", [-1, 2]), "b": ("float32", [-1, 8])},
        outputs={"y": ("float32", [8])},
    )
    steps = [
        ("network", {"x": "RAW"}, {"scores": "S"}),
        ("fold", {"a": "S", "b": "RAW"}, {"y": "Y"}),
    ]
    # Declared before what they are made of, part of which is there already.
    path = build_repository(folder / "r", {k: v for k, v in models.items() if k == "scale"})
    rest = {k: v for k, v in models.items() if k != "scale"}
    ensembles = {"chain": Ensemble(steps=CHAIN), "folding": Ensemble(steps=steps)}
    build_repository(path, {**ensembles, **rest, "fold": fold}, max_batch_size=64)
    with serve(path) as running:
        yield running


def test_ensembles_answer_as_their_steps_in_turn(server, classifier):
    config = configuration(server.repository, "chain")
    assert config["max_batch_size"] == 64
    raw = np.random.default_rng(1).normal(size=(50, 8)).astype("f4")
    answer = infer(server, "chain", RAW=raw)
    session = onnxruntime.InferenceSession(str(classifier))
    (scores,) = session.run(["scores"], {"x": raw / np.float32(10)})
    assert list(answer) == ["PROB"]
    np.testing.assert_allclose(
        answer["PROB"].ravel(), scores[:, 1] ** 2 * raw.sum(axis=1), rtol=1e-5
    )


def test_steps_without_batching_see_whole_requests(server):
    raw = np.arange(24, dtype="f4").reshape(3, 8)
    answer = infer(server, "folding", RAW=raw)
    # The two scores of each row add up to one.
    np.testing.assert_allclose(answer["Y"], 3 + raw.sum(axis=0), rtol=1e-6)


def changed(index, step):
    return [step if i == index else s for i, s in enumerate(CHAIN)]


@pytest.mark.parametrize(
    ("ensemble", "message"),
    [
        ({"steps": []}, "expected steps of ensemble 'chain' with a tensor to begin and"),
        ({"steps": [("scale", "RAW")]}, "expected steps of ensemble 'chain' as"),
        (
            {"steps": changed(2, ("netwrk", {"x": "X"}, {"scores": "S"}))},
            "no model of ensemble 'chain' is called 'netwrk'; did you mean 'network'",
        ),
        (
            {"steps": changed(2, ("network", {"x": "X"}, {"score": "S"}))},
            "no output of 'network' is called 'score'; did you mean 'scores'",
        ),
        ({"steps": CHAIN, "inputs": ["RAWW"]}, "no input .* is called 'RAWW'; did you mean 'RAW'"),
        ({"steps": CHAIN, "outputs": ["PROBE"]}, "no output .* is called 'PROBE'; did you mean"),
    ],
)
def test_unknown_tensors_of_ensembles_are_named(tmp_path, models, ensemble, message):
    with pytest.raises(ConfigError, match=message):
        build_repository(tmp_path / "r", {**models, "chain": Ensemble(**ensemble)})
    assert list(tmp_path.iterdir()) == []
