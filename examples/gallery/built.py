"""Networks whose layers are written down instead of fitted: masses of triplets, slopes of tracks.

python built.py        # writes networks/spanet.onnx and networks/tracking.onnx
"""

import numpy as np
from common import NETWORKS
from fitted import Graph
from onnx import TensorProto


def spanet(path, jets=16):
    """Assign jets to a top: the tensor of all triplets is a contraction of the jets' embeddings."""
    g = Graph(1)
    add, const = g.add, g.constant

    def column(k):  # of Jet_data: mass, pt, eta, sin phi, cos phi, b tag, and whether it is tagged
        return add("Slice", "Jet_data", *(const([n]) for n in (k, k + 1, 2)))

    def axes(x, *where):  # [N, J, J] or [N, J] as a part of [N, J, J, J]
        return add("Unsqueeze", x, const(list(where)))

    def parabola(m2, mass, width):
        off = add("Div", add("Sub", add("Sqrt", m2), const(mass)), const(width))
        return add("Mul", add("Mul", off, off), const(-0.5))

    mass, pt, eta, sin, cos, tag = map(column, range(6))
    p = [add("Mul", pt, x) for x in (cos, sin, add("Sinh", eta))]
    squares = [add("Mul", x, x) for x in (*p, mass)]
    energy = add("Sqrt", add("Sum", *squares))
    vectors = add("Concat", energy, *p, axis=2)
    metric = const(np.diag([1.0, -1.0, -1.0, -1.0]))
    products = add(
        "MatMul", add("MatMul", vectors, metric), add("Transpose", vectors, perm=[0, 2, 1])
    )
    own = add("Squeeze", squares[3], const([2]))
    pairs = add("Add", products, products)
    two = add(
        "Relu",
        add("Sum", pairs, add("Unsqueeze", own, const([1])), add("Unsqueeze", own, const([2]))),
    )
    three = [axes(pairs, 3), axes(pairs, 2), axes(pairs, 1)]
    three += [axes(own, *where) for where in ((2, 3), (1, 3), (1, 2))]
    top = add("Relu", add("Sum", *three))
    tags = add("Squeeze", add("Mul", tag, const(4.0)), const([2]))
    tagged = add("Sub", axes(tags, 1, 2), add("Add", axes(tags, 1, 3), axes(tags, 2, 3)))
    score = add("Sum", axes(parabola(two, 80.4, 10.0), 3), parabola(top, 172.5, 16.0), tagged)
    number = np.arange(jets)
    i, j, k = np.meshgrid(number, number, number, indexing="ij")
    present = add("Cast", "Jet_mask", to=TensorProto.FLOAT)
    all_present = add(
        "Mul", add("Mul", axes(present, 1, 2), axes(present, 1, 3)), axes(present, 2, 3)
    )
    allowed = add(
        "Mul", all_present, const(((i < j) & (k != i) & (k != j))[np.newaxis].astype("f"))
    )
    score = add("Add", score, add("Mul", add("Sub", allowed, const(1.0)), const(1e4)))
    flat = add("Reshape", score, const([0, -1]))
    best = add("LogSoftmax", flat, axis=1)
    add("Reshape", best, const([0, jets, jets, jets]), name="t1_assignment_log_probability")
    # The class of the event, by how well a top fits, and by what else is there.
    fit = add("ReduceMax", flat, axes=[1], keepdims=1)
    lepton = add("Slice", "Lepton_data", *(const([n]) for n in (0, 1, 2)))
    extra = add(
        "Sum",
        *(
            add("Mul", add("ReduceSum", x, const([1, 2]), keepdims=0), const(0.002))
            for x in (
                lepton,
                add("Slice", "Met_data", *(const([n]) for n in (0, 1, 2))),
                "Event_data",
            )
        ),
    )
    logit = add("Add", fit, add("Unsqueeze", extra, const([1])))
    both = add("Concat", add("Neg", logit), logit, axis=1)
    add("Softmax", add("Mul", both, const(0.5)), axis=1, name="EVENT_top")
    widths = {"Jet": (jets, 7), "Met": (1, 4), "Lepton": (1, 5), "Event": (1, 1)}
    inputs = {f"{n}_data": ("f", ["N", *shape]) for n, shape in widths.items()}
    inputs |= {f"{n}_mask": ("b", ["N", shape[0]]) for n, shape in widths.items()}
    output = {
        "t1_assignment_log_probability": ("f", ["N", jets, jets, jets]),
        "EVENT_top": ("f", ["N", 2]),
    }
    g.save(path, inputs, output)


def tracking(path):
    """Score edges between hits, by the slopes of the edges that end where they begin."""
    g = Graph(1)
    add, const = g.add, g.constant
    first, second = (
        add("Gather", "edge_index", const(n), axis=0) for n in (0, 1)
    )  # of edge_index [2, E]
    a, b = (add("Gather", "x", index, axis=0) for index in (first, second))
    step = add("Sub", b, a)  # of r, phi and z
    radius, turn, along = (
        add("Slice", step, *(const([n]) for n in (k, k + 1, 1))) for k in range(3)
    )
    slopes = add("Concat", add("Div", turn, radius), add("Div", along, radius), axis=1)
    # The edge points to the beam: z at r = 0.
    r, z = (add("Slice", a, *(const([n]) for n in (k, k + 1, 1))) for k in (0, 2))
    back = add("Sub", z, add("Mul", r, add("Div", along, radius)))
    prior = add("Exp", add("Mul", add("Mul", back, back), const(-0.5 / 0.1**2)))
    # Messages: each hit gets the slopes of the edges that end there, by their priors.
    messages = add("Concat", add("Mul", slopes, prior), prior, axis=1)
    nodes = add("Mul", add("Slice", "x", *(const([n]) for n in (0, 3, 1))), const(0.0))
    places = add("Expand", add("Unsqueeze", second, const([1])), const([1, 3]))
    received = add("ScatterElements", nodes, places, messages, axis=0, reduction="add")
    here = add("Gather", received, first, axis=0)
    weight = add("Slice", here, *(const([n]) for n in (2, 3, 1)))
    mean = add(
        "Div", add("Slice", here, *(const([n]) for n in (0, 2, 1))), add("Add", weight, const(1e-3))
    )
    off = add("Div", add("Sub", slopes, mean), const([0.02, 0.05]))
    agrees = add(
        "Exp", add("Mul", add("ReduceSum", add("Mul", off, off), const([1])), const(-0.02))
    )
    # Where nothing ends, such as in the first layer, the prior alone decides.
    heeded = add("Div", weight, add("Add", weight, const(0.05)))
    factor = add("Sub", const(1.0), add("Mul", heeded, add("Sub", const(1.0), agrees)))
    add("Squeeze", add("Mul", prior, factor), const([1]), name="edge_score")
    inputs = {"x": ("f", ["H", 3]), "edge_index": ("i", [2, "E"])}
    g.save(path, inputs, {"edge_score": ("f", ["E"])})


if __name__ == "__main__":
    spanet(NETWORKS / "spanet.onnx")
    tracking(NETWORKS / "tracking.onnx")
