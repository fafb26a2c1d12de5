"""Random events and networks for the analyses here, the same each time."""

import contextlib
import tempfile
from pathlib import Path

import awkward as ak
import numpy as np
import onnx
import xgboost
from onnx import TensorProto, helper, numpy_helper

import sonic_coffea as sonic


def events(number):
    """Return ``events * {event, Jet, Lepton, MET, FatJet, Photon}``."""
    rng = np.random.default_rng(1)

    def objects(counts, **fields):
        total = int(counts.sum())
        columns = {
            "pt": 30 + rng.exponential(60, total),
            "eta": rng.uniform(-2.4, 2.4, total),
            "phi": rng.uniform(-np.pi, np.pi, total),
            "mass": rng.exponential(10, total),
        }
        columns |= {name: rng.uniform(*limits, total) for name, limits in fields.items()}
        flat = ak.zip({name: column.astype("float32") for name, column in columns.items()})
        return ak.unflatten(flat, counts)

    fat = objects(rng.integers(0, 3, number), msoftdrop=(0, 200))
    candidates = objects(rng.integers(1, 80, int(ak.sum(ak.num(fat)))), charge=(-1, 1))
    fat["pf"] = ak.unflatten(candidates, ak.num(fat))
    photons = objects(rng.integers(0, 4, number), r9=(0, 1), sieie=(0, 0.05), phoIso=(0, 10))
    return ak.zip(
        {
            "event": np.arange(number),
            "Jet": objects(rng.integers(4, 9, number), btag=(0, 1)),
            "Lepton": objects(np.ones(number, int))[:, 0],
            "MET": objects(np.ones(number, int))[:, 0][["pt", "phi"]],
            "FatJet": fat,
            "Photon": photons,
        },
        depth_limit=1,
    )


def forest(path, features, *, seed, regression=False):
    """Fit trees to random numbers, and write them as XGBoost's JSON."""
    rng = np.random.default_rng(seed)
    x = rng.exponential(50, (500, len(features))).astype("float32")
    target = x[:, 0] / x.mean() if regression else x[:, 0] > x[:, -1]
    kind = xgboost.XGBRegressor if regression else xgboost.XGBClassifier
    trees = kind().fit(x, target)
    trees.get_booster().feature_names = list(features)
    trees.save_model(path)


def network(path, inputs, outputs, *, seed):
    """Write a perceptron: inputs by name and shape of a row, outputs by name and shape of a row."""
    rng = np.random.default_rng(seed)
    nodes, weights, flat, width = [], [], [], 0
    for name, shape in inputs.items():
        flat.append(f"{name}_flat")
        nodes.append(helper.make_node("Flatten", [name], [flat[-1]], axis=1))
        width += int(np.prod(shape))
    nodes += [helper.make_node("Concat", flat, ["all"], axis=1)]
    nodes += [helper.make_node("MatMul", ["all", "first"], ["product"])]
    nodes += [helper.make_node("Tanh", ["product"], ["hidden"])]
    layers = {"first": (width, 16), **{name: (16, np.prod(s)) for name, s in outputs.items()}}
    for name, (rows, columns) in layers.items():
        # Small, as the inputs are large: a hidden layer of 1 and -1 alone would hide differences.
        width = 0.01 if name == "first" else 1.0
        layer = rng.normal(0, width / np.sqrt(rows), (int(rows), int(columns))).astype("float32")
        weights.append(numpy_helper.from_array(layer, name if name == "first" else f"{name}_w"))
    for name, shape in outputs.items():
        weights.append(numpy_helper.from_array(np.array([-1, *shape]), f"{name}_shape"))
        nodes += [helper.make_node("MatMul", ["hidden", f"{name}_w"], [f"{name}_flat"])]
        nodes += [helper.make_node("Reshape", [f"{name}_flat", f"{name}_shape"], [name])]

    def tensors(shapes):
        return [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])
            for name, shape in shapes.items()
        ]

    graph = helper.make_graph(nodes, path.stem, tensors(inputs), tensors(outputs), weights)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)


@contextlib.contextmanager
def served(make):
    """Let `make` write the networks into a folder, run them in this process, and yield it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        files = {path.stem: path for path in folder.iterdir()}
        repository = sonic.build_repository(folder / "repository", files)
        with sonic.connect(repository):
            yield folder


def padded(column, length, fill=0):
    """Return a column as ``[N, length]``, for code by hand."""
    short = ak.pad_none(column, length, clip=True)
    return ak.to_numpy(ak.fill_none(short, fill, axis=1)).astype("float32")


def softmax(numbers):
    """Return the softmax of each row, for code by hand."""
    exponents = np.exp(numbers - numbers.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def main(run):
    """Run an analysis, and print its largest difference to the code by hand."""
    for name, (ours, direct) in run().items():
        print(
            f"{name}: {len(direct):,} numbers differ by at most {np.abs(ours - direct).max():.1e}"
        )
