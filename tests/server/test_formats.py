"""Trees, TorchScript and Python functions: what is read, what is refused, what is served."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import zipfile

import awkward as ak
import numpy as np
import pytest

import sonic_coffea as sonic
from sonic_coffea.errors import ConfigError, ContractError, InferenceError, ServerStartError
from sonic_coffea.server import Served, build_repository, ensure, read_repository

from .support import configuration, function, infer

# Runs where the packages are, and predicts there as well: the reference.
TRAIN = """
import json, numpy as np, sys
folder, rng = sys.argv[1], np.random.default_rng(3)
x = rng.normal(size=(400, 3)).astype("float32")
kind = (x[:, 0] * x[:, 1] > 0).astype(int) + (x[:, 2] > 0.5)
import lightgbm, xgboost
pair = xgboost.train({"objective": "binary:logistic", "nthread": 1},
    xgboost.DMatrix(x, kind > 0, feature_names=["pt", "eta", "phi"]), 5)
pair.save_model(f"{folder}/pair.json")
three = {"objective": "multi:softprob", "num_class": 3, "nthread": 1, "eta": 1}
stopped = xgboost.train(three, xgboost.DMatrix(x[:200], kind[:200]), 60, early_stopping_rounds=5,
    verbose_eval=False, evals=[(xgboost.DMatrix(x[200:], kind[200:]), "test")])
stopped.save_model(f"{folder}/stopped.ubj")
best = stopped.inplace_predict(x, iteration_range=(0, stopped.best_iteration + 1))
assert (abs(best - stopped.inplace_predict(x)) > 1e-3).any()
light = lightgbm.train({"objective": "multiclass", "num_class": 3, "verbose": -1, "num_threads": 1},
    lightgbm.Dataset(x, kind), 5)
light.save_model(f"{folder}/light.txt")
np.savez(f"{folder}/expected.npz", x=x, pair=pair.inplace_predict(x)[:, None],
    stopped=best, light=light.predict(x))
"""
TRACKER = '''
import numpy as np
from pathlib import Path
from constants import OFFSET

SCALE = np.load(Path(__file__).with_name("scale.npy"))

def tracks(hits, row_splits):
    """The mean of the hits of each event."""
    sums = np.add.reduceat(hits, row_splits[:-1].astype(int))
    means = sums / np.diff(row_splits)[:, None]
    return {"mean": (means * SCALE + OFFSET).astype("float32")}

def listed(x):
    return [x]
'''
OBJECTS = """
import numpy as np
def objects(x): return {"y": np.where(x > 1, None, x.astype("O"))}
"""
ROWS = {"inputs": {"x": ("float32", [-1, 2])}, "outputs": {"y": ("float32", [-1, 2])}}
GRAPH = {
    "inputs": {"hits": ("float32", [-1, 2]), "row_splits": ("int64", [-1])},
    "outputs": {"mean": ("float32", [-1, 2])},
}


@pytest.fixture(scope="module")
def extended(installation):
    return ensure(extras=("xgboost", "lightgbm"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory, extended):
    folder = tmp_path_factory.mktemp("trees")
    subprocess.run([str(extended.python), "-I", "-c", TRAIN, str(folder)], check=True, timeout=100)
    return folder


@pytest.fixture(scope="module")
def tracker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracker")
    (folder / "tracker.py").write_text(TRACKER)
    (folder / "constants.py").write_text("OFFSET = 1.0\n")
    np.save(folder / "scale.npy", np.array([2.0, 3.0]))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory, trees, tracker, serve):
    more = [tracker / "constants.py", tracker / "scale.npy"]
    models = {
        **{path.stem: path for path in trees.glob("*.*") if path.suffix != ".npz"},
        "tracks": Served(f"{tracker / 'tracker.py'}:tracks", **GRAPH, files=more),
    }
    path = build_repository(tmp_path_factory.mktemp("served") / "r", models)
    outputs = {"y": ("bytes", ["N", 2])}
    objects = function(trees / "objects.py", OBJECTS, outputs=outputs)
    build_repository(path, {"objects": objects}, warmup=False)
    with serve(path) as server:
        yield path, server


@pytest.mark.parametrize("name", ["pair", "stopped", "light"])
def test_trees_score_as_their_package_does(served, trees, name):
    expected = np.load(trees / "expected.npz")
    (scores,) = infer(served[1], name, features=expected["x"]).values()
    assert scores.dtype == expected[name].dtype
    np.testing.assert_array_equal(scores, expected[name])


def test_features_in_another_order_than_in_the_file_are_refused(served):
    (pair,) = (entry for entry in read_repository(served[0]) if entry["model"] == "pair")
    assert pair["features"] == ["pt", "eta", "phi"]
    jets = ak.Array({name: [1.0, 2.0] for name in ("pt", "eta", "phi", "mass")})
    outputs = {"scores": ["top"]}
    with sonic.connect(served[1]) as pool:
        right = sonic.Model("pair", {"features": sonic.Row(["pt", "eta", "phi"])}, outputs)
        assert len(right(jets, pool=pool)) == 2
        for fields in (["eta", "pt", "phi"], ["mass", "pt", "phi"]):
            swapped = sonic.Model("pair", {"features": sonic.Row(fields)}, outputs)
            with pytest.raises(
                ContractError, match="feature '.*' is number .* in the model's file"
            ):
                swapped(jets, pool=pool)
        # The file may have the last part of a path.
        events = ak.zip({"Jet": jets}, depth_limit=1)
        fields = ["Jet.pt", "Jet.eta", "Jet.phi"]
        nested = sonic.Model("pair", {"features": sonic.Row(fields)}, outputs)
        assert nested(events, pool=pool).tolist() == right(jets, pool=pool).tolist()
        nested = sonic.Model("pair", {"features": sonic.Row(fields[::-1])}, outputs)
        with pytest.raises(ContractError, match="feature .Jet.phi. is number 0 .* number 2 in"):
            nested(events, pool=pool)
        # Another name may mean the same.
        renamed = sonic.Model("pair", {"features": sonic.Row(["pt", "eta", "mass"])}, outputs)
        assert len(renamed(jets, pool=pool)) == 2
        contract = renamed.check(pool)
    notes = renamed.compare_labels({}, contract, server="here")
    assert notes == ["in the model's file 'mass' is 'phi'"]


OBJECTIVES = [
    ("binary:logitraw", {"booster": "dart"}, "json"),
    ("multi:softmax", {"num_class": 3}, "ubj"),
    ("multi:softprob", {"num_class": 3}, "json"),
    ("reg:quantileerror", {"quantile_alpha": [0.1, 0.5, 0.9]}, "ubj"),
]


@pytest.mark.parametrize(("objective", "options", "suffix"), OBJECTIVES)
def test_tensors_of_trees_come_from_the_file(tmp_path, objective, options, suffix):
    xgboost = pytest.importorskip("xgboost")
    x = np.random.default_rng(3).normal(size=(60, 4)).astype("f4")
    targets = (x[:, 0] > 0) + (x[:, 1] > 0.5) if "num_class" in options else x[:, 0] > 0
    options = {"objective": objective, "nthread": 1, **options}
    booster = xgboost.train(options, xgboost.DMatrix(x, targets), 2)
    booster.save_model(tmp_path / f"m.{suffix}")
    path = build_repository(tmp_path / "r", {"m": tmp_path / f"m.{suffix}"})
    (entry,) = read_repository(path)
    width = booster.inplace_predict(x).size // len(x)
    assert entry["inputs"] == [{"name": "features", "dtype": "float32", "shape": [-1, 4]}]
    assert entry["outputs"][0]["shape"] == [-1, width]


def test_binary_trees_need_their_package_or_a_declaration(tmp_path, monkeypatch):
    (tmp_path / "m.ubj").write_bytes(b"{")
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(
        ConfigError, match="^reading .* needs the xgboost package here; save the trees as .json"
    ):
        build_repository(tmp_path / "r", {"m": tmp_path / "m.ubj"})
    build_repository(tmp_path / "r", {"m": Served(tmp_path / "m.ubj", **ROWS)})


def test_functions_run_from_their_copied_source(served, tracker):
    path, server = served
    # Their first axes count different things: they must not be stacked.
    assert "max_batch_size" not in configuration(path, "tracks")
    assert (path / "tracks" / "1" / "source" / "tracker.py").read_text() == TRACKER
    hits = np.arange(12, dtype="f4").reshape(6, 2)
    answer = infer(server, "tracks", hits=hits, row_splits=np.array([0, 4, 6]))
    expected = [hits[:4].mean(0) * [2, 3] + 1, hits[4:].mean(0) * [2, 3] + 1]
    np.testing.assert_allclose(answer["mean"], expected)


def test_objects_that_are_no_strings_are_never_written_as_text(served):
    """Triton would give the strings '1.0' and 'None'."""
    objects = sonic.Model(
        "objects", {"x": sonic.Row(["a", "b"])}, {"y": sonic.Output(["a", "b"], dtype="string")}
    )
    for place in served:
        for a, value in ((1.0, "1.0"), (2.0, "None")):
            with (
                sonic.connect(place) as pool,
                pytest.raises(InferenceError, match=f"the model returned {value}"),
            ):
                objects(ak.Array([{"a": a, "b": 1.0}]), pool=pool)


def test_servers_without_a_package_say_how_to_add_it(tmp_path, serve):
    source = function(tmp_path / "f.py", "import package_that_is_missing\ndef f(x): return {}\n")
    path = build_repository(tmp_path / "r", {"m": source})
    with pytest.raises(ServerStartError) as caught:
        serve(path).start()
    assert "model 'm' needs package_that_is_missing" in str(caught.value)
    remedy = "sonic-coffea server install --with package_that_is_missing"
    assert str(caught.value).count(remedy) == 1


def test_imported_functions_are_copied_by_their_file(tmp_path, tracker, monkeypatch):
    monkeypatch.syspath_prepend(str(tracker))
    monkeypatch.delitem(sys.modules, "tracker", raising=False)
    import tracker as module

    path = build_repository(tmp_path / "r", {"m": Served(module.listed, **ROWS)})
    (entry,) = read_repository(path)
    assert entry["function"] == "listed"
    assert entry["file"] == "source/tracker.py"


def no_function_of_a_file():
    def inner(x):
        return {"y": x}

    return inner


def one(x):
    return {"y": x}


@functools.wraps(one)
def wrapping(x):
    return {"y": -one(x)["y"]}


def save_coded_trees(folder):
    """Trees of a category of names and one of numbers; and what XGBoost has besides trees."""
    names, numbers = {"offsets": [0, 1], "values": [97]}, {"type": 15, "values": [1, 10]}
    dart = {"name": "dart", "gbtree": {"model": {"cats": {"enc": [names, numbers]}}}}
    for name, booster in (("coded", dart), ("linear", {"name": "gblinear"})):
        learner = {"learner_model_param": {"num_feature": "2"}, "objective": {"name": "reg:gamma"}}
        text = json.dumps({"learner": {**learner, "gradient_booster": booster}})
        (folder / f"{name}.json").write_text(text)
    text = 'max_feature_idx=1\nnum_class=1\n\nTree=0\n\npandas_categorical:[["a"], [1, 10]]\n'
    (folder / "coded.txt").write_text(text)


def test_trees_of_categories_are_served_if_their_inputs_are_declared(tmp_path):
    save_coded_trees(tmp_path)
    models = {each: Served(tmp_path / f"coded.{each}", **ROWS) for each in ("json", "txt")}
    assert len(read_repository(build_repository(tmp_path / "r", models))) == 2


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (no_function_of_a_file(), ROWS, "write it to a file and pass 'file.py:function'"),
        (wrapping, ROWS, "expected the function that is called 'one' in .*, got another"),
        (len, ROWS, "expected a function that is defined at the top of a file"),
        ("tracker.py:track", GRAPH, "top of .*tracker.py is called 'track'; did you mean 'tracks'"),
        ("tracker.py:tracks", {}, r"expected the inputs and outputs, which .*\[model m"),
        ("none.py:tracks", ROWS, "cannot read .*none.py: No such file or directory"),
        ("tracker.py", ROWS, "is given as '.*tracker.py:function'"),
        ("broken.py:f", ROWS, "expected Python source in"),
        (
            "tracker.py:listed",
            {**ROWS, "inputs": {"x": ("float", [-1])}},
            "did you mean 'float64' or 'float32'",
        ),
        ("tracker.py:listed", {**ROWS, "inputs": {"x": "float32"}}, "as a type and a shape"),
        (
            "tracker.py:listed",
            {**ROWS, "outputs": {"y": ("int8", [])}},
            "axes of tensor 'y', .*got ..",
        ),
        (
            "tracker.py:listed",
            {**ROWS, "files": ["none.npy"]},
            "cannot read none.npy: No such file",
        ),
        ("tracker.py:listed", {**ROWS, "platform": "onnxruntime"}, "of kind function"),
        ("tracker.py:listed", {**ROWS, "max_batch_size": -1}, "integer >= 0, got -1"),
        *(
            ("tracker.py:tracks", {**GRAPH, option: value}, message)
            for option, value, message in (
                *((option, "x", f"expected {option} as a dict") for option in GRAPH),
                ("warmup", False, "expected warmup as a dict"),
                ("warmup", {"hit": [4, 2]}, "no input is called 'hit'; did you mean 'hi"),
                ("warmup", {"hits": 4}, "expected a shape as warmup of 'hits', got 4"),
                *(("files", value, "files as a list of paths") for value in ("f.py", None, 5)),
                *(
                    ("outputs", {"y": ("float32", [-1, length])}, r"tensor 'y'.*\[model m")
                    for length in (0, -2, 2.5)
                ),
            )
        ),
        *(
            (source, {}, "expected a file of a kind that can be served")
            for source in ("notes.doc", None, 3, b"m.onnx", ["m.onnx"])
        ),
        ("broken.onnx", {}, "expected an ONNX file, got"),
        ("empty.onnx", {}, "expected an ONNX file, got"),
        ("broken.json", {}, "expected XGBoost trees in .*broken.json"),
        ("broken.ubj", {}, "expected XGBoost trees in"),
        ("broken.txt", {}, "expected LightGBM trees in .*broken.txt, which has no max_feature_idx"),
        ("linear.json", {}, r"expected XGBoost trees in .*linear.json, got a linear model"),
        ("coded.json", {}, r"a pandas category, .* send the codes: .*categories={1: 0, 10: 1}"),
        ("coded.txt", {}, r"a pandas category, .* send the codes: .*categories={1: 0, 10: 1}"),
        ("none.txt", {}, "cannot read .*none.txt: No such file or directory"),
        ("broken.pt", ROWS, "expected a TorchScript file, got .*holds no TorchScript code"),
        ("state.pt", ROWS, "torch.jit.save writes one, torch.save does not"),
        ("good.pt", {}, "which cannot be read from its file"),
    ],
)
def test_sources_that_cannot_be_served_are_refused(tmp_path, tracker, source, options, message):
    for suffix in ("py", "json", "ubj", "txt", "pt", "onnx"):
        (tracker / f"broken.{suffix}").write_text("this is ( no model\n")
    (tracker / "empty.onnx").touch()
    for name, entry in (("state.pt", "a/data.pkl"), ("good.pt", "a/code/c.py")):
        with zipfile.ZipFile(tracker / name, "w") as archive:
            archive.writestr(entry, "")
    save_coded_trees(tracker)
    wanted = str(tracker / source) if isinstance(source, str) else source
    with pytest.raises(ConfigError, match=message) as caught:
        build_repository(tmp_path / "r", {"m": Served(wanted, **options)})
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def save_torchscript(path):
    """torch is too large for these tests: what is written for its files is compared instead."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/code/__torch__.py", "")
    return path


def test_torchscript_is_written_for_either_backend(tmp_path):
    net = save_torchscript(tmp_path / "net.pt")
    native = {"inputs": ROWS["inputs"], "outputs": {"OUTPUT__0": ("float32", [-1, 2])}}
    path = build_repository(
        tmp_path / "r",
        {"here": Served(net, **ROWS), "there": Served(net, **native, platform="pytorch")},
        threads=2,
    )
    here, there = (configuration(path, name) for name in ("here", "there"))
    assert (here["backend"], there["backend"]) == ("python", "pytorch")
    assert there["parameters"]["INTRA_OP_THREAD_COUNT"]["string_value"] == "2"
    assert there["output"] == [{"name": "OUTPUT__0", "data_type": "TYPE_FP32", "dims": ["2"]}]
    files = {name: {p.name for p in (path / name / "1").iterdir()} for name in ("here", "there")}
    assert files["there"] == {"model.pt", "sonic-manifest.json"}
    assert "model.py" in files["here"]


def test_the_digest_covers_what_decides_the_outputs(tmp_path):
    """By it scores are kept: what gives other outputs has another one, and a copy has the same."""
    source, helper = tmp_path / "twice.py", tmp_path / "helper.py"
    for file in (source, helper):
        file.write_text(f"def f(a, b):\n    return {{'y': a, 'z': '{file.stem}'}}\ng = f\n")
    net, trees = save_torchscript(tmp_path / "net.pt"), tmp_path / "trees.json"
    learner = {"learner_model_param": {"num_feature": "2"}, "objective": {"name": "reg:logistic"}}
    trees.write_text(json.dumps({"learner": learner}))
    row, wide, double = ("float32", ["N", 2]), ("float32", ["N", 3]), ("float64", ["N", 2])
    inputs, outputs = {"a": row, "b": row}, {"OUTPUT__0": row, "OUTPUT__1": row}
    turned = dict(reversed(inputs.items())), dict(reversed(outputs.items()))
    pair = {"inputs": inputs, "outputs": outputs}
    models = {
        "f": Served(f"{source}:f", **pair),
        "g": Served(f"{source}:g", **pair),
        "more": Served(f"{source}:f", **pair, files=[helper]),
        "main": Served(f"{helper}:f", **pair, files=[source]),
        "net": Served(net, **pair),
        "inputs": Served(net, inputs=turned[0], outputs=outputs),
        "outputs": Served(net, inputs=inputs, outputs=turned[1]),
        "types": Served(net, inputs=inputs, outputs={**outputs, "OUTPUT__1": double}),
        "shapes": Served(net, inputs=inputs, outputs={**outputs, "OUTPUT__1": wide}),
        "native": Served(net, **pair, platform="pytorch"),
        "trees": Served(trees, inputs={"x": row}, outputs={"y": row}),
        "cast": Served(trees, inputs={"x": row}, outputs={"y": double}),
    }
    path = build_repository(tmp_path / "r", {**models, "copy": models["f"]})
    build_repository(tmp_path / "r", models)
    parameters = {name: configuration(path, name)["parameters"] for name in [*models, "copy"]}
    digests = {name: p["sha256.1"]["string_value"] for name, p in parameters.items()}
    assert digests.pop("copy") == digests["f"]
    assert len(set(digests.values())) == len(models)


def test_torchscript_scores_where_the_server_has_torch(tmp_path, serve, installation):
    python = str(installation.python)
    if subprocess.run([python, "-I", "-c", "import torch"], check=False, timeout=100).returncode:
        pytest.skip("the server's environment has no torch; `nox -s torch` has")
    # Of code in a file: torch reads it.
    (tmp_path / "make.py").write_text(f"""
import torch
from typing import Optional
class Net(torch.nn.Module):
    def forward(self, x, w):
        return x * 2, (x * w).sum(1, keepdim=True)
class Masked(torch.nn.Module):
    def forward(self, x, mask: Optional[torch.Tensor] = None, w: Optional[torch.Tensor] = None):
        return x if w is None else x * 2, x if mask is None else x * mask
torch.jit.script(Net()).save({str(tmp_path / "net.pt")!r})
torch.jit.script(Masked()).save({str(tmp_path / "masked.pt")!r})
""")
    subprocess.run([python, "-I", tmp_path / "make.py"], check=True, timeout=100)
    rows = ("float32", ["N", 3])
    outputs = {"double": rows, "dot": ("float32", ["N", 1])}
    net = Served(tmp_path / "net.pt", inputs={"x": rows, "w": rows}, outputs=outputs)
    path = build_repository(tmp_path / "r", {"net": net})
    numbered = {f"OUTPUT__{n}": spec for n, spec in enumerate(outputs.values())}
    native = Served(tmp_path / "net.pt", inputs={"x": rows, "w": rows}, outputs=numbered)
    build_repository(path, {"native": native}, platform="pytorch")
    # As Triton's own backend finds them, whatever their order, and whichever are left out.
    turned = {"inputs": {"w": rows, "x": rows}, "outputs": dict(reversed(numbered.items()))}
    dot_alone = {"inputs": {"in__1": rows, "in__0": rows}, "outputs": dict([*numbered.items()][1:])}
    others = {"turned": turned, "dot_alone": dot_alone}
    build_repository(path, {n: Served(tmp_path / "net.pt", **o) for n, o in others.items()})
    masked = Served(tmp_path / "masked.pt", inputs={"x": rows, "w": rows}, outputs={"y": rows})
    build_repository(path, {"masked": masked})
    x = np.arange(6, dtype="f4").reshape(2, 3)
    with serve(path) as server:
        np.testing.assert_array_equal(infer(server, "masked", x=x, w=x + 1)["y"], x * 2)
        answer = infer(server, "turned", x=x, w=x + 1)
        np.testing.assert_array_equal(answer["OUTPUT__0"], x * 2)
        (dots,) = infer(server, "dot_alone", in__0=x, in__1=x + 1).values()
        np.testing.assert_allclose(dots, (x * (x + 1)).sum(1, keepdims=True))
        for name, (double, dot) in {"net": outputs, "native": numbered}.items():
            answer = infer(server, name, x=x, w=x + 1)
            np.testing.assert_array_equal(answer[double], x * 2)
            np.testing.assert_allclose(answer[dot], (x * (x + 1)).sum(1, keepdims=True))


@pytest.mark.parametrize(
    ("length", "shapes"), [(-1, {"hits": [4, 2], "row_splits": [3]}), (3, {"hits": [4, 2]})]
)
def test_warmup_takes_the_lengths_of_free_axes_and_keeps_the_others(
    tmp_path, tracker, length, shapes
):
    inputs = {**GRAPH["inputs"], "row_splits": ("int64", [length])}
    options = {**GRAPH, "inputs": inputs, "warmup": shapes}
    graph = Served(f"{tracker}/tracker.py:tracks", **options)
    (warmup,) = configuration(build_repository(tmp_path / "r", {"m": graph}))["model_warmup"]
    dims = {name: tensor["dims"] for name, tensor in warmup["inputs"].items()}
    assert dims == {"hits": ["4", "2"], "row_splits": ["3"]}
