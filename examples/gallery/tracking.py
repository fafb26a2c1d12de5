"""ExaTrkX: one graph and one request for each event; the network scores edges."""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from toys import spacepoints

import sonic_coffea as sonic

MODEL = sonic.Model(
    "tracking",
    {
        "x": sonic.Flat(["r", "phi", "z"], splits=None),
        # Indices of hits within the event, as in PyTorch Geometric: [2, E].
        "edge_index": sonic.Flat(["source", "target"], None, dtype="int64", axis_order="FL"),
    },
    {"edge_score": sonic.Output(per="constituent", of="edge_index")},
    one_request_per="event",
)


def graphs(hits):
    """Return ``events * edges * {source, target, true}``: pairs of hits in neighbouring layers."""
    number = ak.local_index(hits.r)
    pairs = ak.cartesian({"a": hits, "b": hits})
    ends = ak.cartesian({"source": number, "target": number})
    near = (pairs.b.layer == pairs.a.layer + 1) & (abs(pairs.b.phi - pairs.a.phi) < 0.4)
    true = (pairs.a.track == pairs.b.track)[near]
    return ak.with_field(ends[near], true, "true")


def run():
    """Score edges, and compare with those of true tracks."""
    hits = spacepoints(100, 3)
    edges = graphs(hits)
    with serving({"tracking": NETWORKS / "tracking.onnx"}, max_batch_size=0):
        # One graph at a time: two in a request would share the indices of their hits.
        score = compare(MODEL, {"x": hits, "edge_index": edges}, network("tracking"), batch=1)
    kept, true = (ak.to_numpy(ak.flatten(values)) for values in (score > 0.4, edges.true))
    return {
        "efficiency": float(kept[true].mean()),
        "purity": float(true[kept].mean()),
        "purity of all edges": float(true.mean()),
        "edges in a graph": float(np.mean(ak.num(edges))),
        "rows": len(hits),
    }


if __name__ == "__main__":
    main(run)
