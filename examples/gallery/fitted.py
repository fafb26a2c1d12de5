"""Networks without torch: transformers with random layers and a last one by least squares, DeepMET.

python fitted.py        # writes upart.onnx, glopart.onnx and deepmet.onnx, in a minute
"""

import awkward as ak
import numpy as np
import onnx
import onnxruntime
import toys
from common import NETWORKS
from onnx import TensorProto, helper, numpy_helper

WIDTH, HIDDEN = 32, 384
KINDS = {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "b": TensorProto.BOOL}


class Graph:
    """An ONNX graph that grows node by node."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.constants, self.inputs = [], [], {}

    def add(self, kind, *inputs, name=None, **attributes):
        name = name or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, array):
        name = f"c{len(self.constants)}"
        kind = np.int64 if np.asarray(array).dtype.kind == "i" else np.float32
        self.constants.append(numpy_helper.from_array(np.asarray(array, kind), name))
        return name

    def dense(self, x, into, out, *, bend="Tanh"):
        """Add a random layer, of a size such that numbers stay of order one."""
        x = self.add("MatMul", x, self.constant(self.rng.normal(0, into**-0.5, (into, out))))
        x = self.add("Add", x, self.constant(self.rng.uniform(-1, 1, out)))
        return self.add(bend, x) if bend else x

    def save(self, path, inputs, outputs):
        """Write it; inputs and outputs are ``{name: (kind, shape)}``."""
        values = [
            [helper.make_tensor_value_info(n, KINDS[k], shape) for n, (k, shape) in side.items()]
            for side in (inputs, outputs)
        ]
        graph = helper.make_graph(self.nodes, path.stem, *values, self.constants)
        opset = [helper.make_opsetid("", 17)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=9)
        onnx.checker.check_model(model)
        onnx.save(model, path)


def tokens(graph, shapes, features, vectors, mask):
    """Add a token for each constituent; return these, four-vectors, masks and features."""
    for name in filter(None, (features, vectors, mask)):
        graph.inputs[name] = ("f", ["rows", *shapes[name]])
    number = next(n for n in shapes[features] if isinstance(n, int))
    if mask is None:  # as UParT: what has no energy is padding
        used = graph.add("ReduceSum", graph.add("Abs", vectors), graph.constant([2]), keepdims=1)
        present = graph.add("Cast", graph.add("Greater", used, graph.constant(0.0)), to=1)
    else:  # as weaver
        features, vectors, present = (
            graph.add("Transpose", part, perm=[0, 2, 1]) for part in (features, vectors, mask)
        )
    x = graph.dense(graph.dense(features, number, WIDTH), WIDTH, WIDTH)
    return x, vectors, present, features, number


def attention(graph, x, vectors, present):
    """Add attention, with a bias of the squared mass of each pair."""
    metric = graph.constant(np.diag([-2.0, -2.0, -2.0, 2.0]))
    other = graph.add("Transpose", vectors, perm=[0, 2, 1])
    mass = graph.add("Relu", graph.add("MatMul", graph.add("MatMul", vectors, metric), other))
    bias = graph.add("Log", graph.add("Add", mass, graph.constant(1.0)))
    hidden = graph.add("Sub", graph.add("Transpose", present, perm=[0, 2, 1]), graph.constant(1.0))
    q, k, v = (graph.dense(x, WIDTH, WIDTH, bend=None) for _ in range(3))
    weights = graph.add("MatMul", q, graph.add("Transpose", k, perm=[0, 2, 1]))
    weights = graph.add("Mul", weights, graph.constant(WIDTH**-0.5))
    weights = graph.add("Sub", weights, graph.add("Mul", bias, graph.constant(0.2)))
    weights = graph.add("Add", weights, graph.add("Mul", hidden, graph.constant(1e9)))
    heard = graph.add("MatMul", graph.add("Softmax", weights, axis=2), v)
    return graph.add("Tanh", graph.add("Add", x, heard))


def transformer(path, model, groups, numbers, objects, classes, targets=()):
    """Write a network for a declared model, fitted to objects.

    Parameters
    ----------
    groups : list of tuple
        Names of the inputs of features, four-vectors, and mask or None.
    numbers : str or None
        The input of an object's own numbers.
    classes : array of int
        What each object is.
    targets : list of array
        What is regressed.
    """
    graph = Graph(7)
    sent = model.pack(objects)
    shapes = {}
    for features, vectors, mask in groups:  # of any length, the same in a group
        for name in filter(None, (features, vectors, mask)):
            count = len(getattr(model.inputs[name], "features", [None]))
            shapes[name] = [features, count] if mask is None else [count, features]
    each = [tokens(graph, shapes, *group) for group in groups]
    pooled, width = [], 0
    for x, _, present, features, count in each:  # means, the greatest, and how many there are
        used = graph.add("Mul", graph.add("Concat", x, features, axis=2), present)
        width += 2 * (WIDTH + count) + 1
        axis = graph.constant([1])
        number = graph.add("ReduceSum", present, axis, keepdims=0)
        total = graph.add("ReduceSum", used, axis, keepdims=0)
        least = graph.add("Max", number, graph.constant(1.0))
        pooled += [graph.add("Div", total, least), graph.add("Mul", number, graph.constant(0.1))]
        pooled.append(graph.add("ReduceMax", used, axes=[1], keepdims=0))
    together = list(zip(*each, strict=True))[:3]
    x, vectors, present = (graph.add("Concat", *group, axis=1) for group in together)
    used = graph.add("Mul", attention(graph, x, vectors, present), present)
    mean = graph.add("ReduceSum", used, graph.constant([1]), keepdims=0)
    pooled.append(graph.add("Mul", mean, graph.constant(0.05)))
    width += WIDTH
    if numbers:
        graph.inputs[numbers] = ("f", ["rows", *sent[numbers].shape[1:]])
        pooled.append(graph.add("Squeeze", numbers, graph.constant([2])))
        width += sent[numbers].shape[1]
    together = graph.add("Concat", *pooled, axis=1)
    deep = graph.dense(together, width, HIDDEN)
    last = graph.add("Concat", together, deep, axis=1, name="last")
    graph.save(path, graph.inputs, {last: ("f", ["rows", width + HIDDEN])})
    session = onnxruntime.InferenceSession(path)
    rows = [slice(i, i + 256) for i in range(0, len(classes), 256)]
    h = np.concatenate([session.run(None, {n: t[r] for n, t in sent.items()})[0] for r in rows])
    target = np.column_stack([np.eye(int(classes.max()) + 1)[classes], *targets])
    h1 = np.c_[h, np.ones(len(h))].astype(np.float64)
    fit = np.linalg.solve(h1.T @ h1 + 1.0 * np.eye(h1.shape[1]), h1.T @ target)
    out = graph.add("MatMul", last, graph.constant(fit[:-1]))
    count = target.shape[1] - len(targets)
    out = graph.add("Add", out, graph.constant(fit[-1]))
    parts = [graph.add("Slice", out, *(graph.constant([n]) for n in (0, count, 1)))]
    parts = [graph.add("Mul", parts[0], graph.constant(6.0))]
    parts = [graph.add("Softmax", parts[0], axis=1)]
    if targets:
        parts.append(
            graph.add(
                "Slice",
                out,
                *(graph.constant([n]) for n in (count, target.shape[1], 1)),
            )
        )
    (name,) = model.outputs
    graph.add("Concat", *parts, axis=1, name=name)
    graph.save(path, graph.inputs, {name: ("f", ["rows", target.shape[1]])})


def deepmet(path, model):
    """Fit, by Adam in numpy, what dz and puppi say of candidates of each kind and charge."""
    records, true = toys.candidates(800, 1)
    true = np.stack([ak.to_numpy(true.px), ak.to_numpy(true.py)], 1)
    tensors = model.pack(toys.with_categories(records, 1))
    p, x = np.split(tensors["candidates"].astype(float), 2, axis=2)
    x = np.concatenate([x, np.ones_like(x[:, :, :1])], 2)
    particle, charge = tensors["particle"], tensors["charge"]
    tables = [np.zeros((6, 3)), np.zeros((4, 3))]
    mean = [np.zeros_like(table) for table in tables]
    square = [np.zeros_like(table) for table in tables]
    for step in range(1, 301):
        score = ((tables[0][particle] + tables[1][charge]) * x).sum(2)
        weight = (particle > 0) / (1 + np.exp(-score))
        off = (weight[:, :, None] * p).sum(1) + true
        slope = ((p * off[:, None]).sum(2) * weight * (1 - weight))[:, :, None] * x
        for i, index in enumerate((particle, charge)):
            columns = [
                np.bincount(index.ravel(), slope[:, :, k].ravel(), len(tables[i])) for k in range(3)
            ]
            gradient = np.stack(columns, 1) / len(p)
            mean[i] += 0.1 * (gradient - mean[i])
            square[i] += 0.01 * (gradient**2 - square[i])
            unbiased = square[i] / (1 - 0.99**step)
            tables[i] -= 0.1 * mean[i] / (1 - 0.9**step) / (np.sqrt(unbiased) + 1e-9)
    graph = Graph(0)
    add, const = graph.add, graph.constant

    def part(x, start, stop):
        return add("Slice", x, *(const([n]) for n in (start, stop, 2)))

    chosen = [
        add("Gather", const(table), name)
        for table, name in zip(tables, ("particle", "charge"), strict=True)
    ]
    table = add("Add", *chosen)
    products = add("Mul", part("candidates", 2, 4), part(table, 0, 2))
    total = add("ReduceSum", products, const([2]), keepdims=1)
    add("Sigmoid", add("Add", total, part(table, 2, 3)), name="weights")
    axes = ["rows", "length"]
    inputs = {"candidates": ("f", [*axes, 4]), "particle": ("i", axes), "charge": ("i", axes)}
    graph.save(path, inputs, {"weights": ("f", [*axes, 1])})


def main():
    import glopart
    import upart
    from deepmet import MODEL

    deepmet(NETWORKS / "deepmet.onnx", MODEL)
    for example in (upart, glopart):
        path = NETWORKS / f"{example.__name__}.onnx"
        objects, *rest = example.training()
        transformer(path, example.MODEL, example.GROUPS, example.NUMBERS, objects, *rest)
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
