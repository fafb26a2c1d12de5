"""Graph attention: nodes and edges of several jets in one request, told apart by their splits."""

import awkward as ak
from common import NETWORKS, compare, main, network, serving
from sample import auc, jets

import sonic_coffea as sonic
from sonic_coffea.demo.features import CONSTITUENT_FEATURES


def graphs(test_jets, most=24, reach=0.2):
    """Return ``jets * nodes * {part_...}``, and ``jets * edges * {source, target}`` near by."""
    nodes = test_jets.parts[:, :most]
    number = ak.local_index(nodes.pt)
    near = ak.cartesian({"a": nodes, "b": nodes})
    ends = ak.cartesian({"source": number, "target": number})
    deta = near.a.part_deta - near.b.part_deta
    dphi = near.a.part_dphi - near.b.part_dphi
    return nodes, ends[deta**2 + dphi**2 < reach**2]


def run():
    """Score the sample's jets as graphs."""
    test_jets = jets(2)
    nodes, edges = graphs(test_jets)
    model = sonic.Model(
        "graph_attention",
        {
            "nodes": sonic.Flat(list(CONSTITUENT_FEATURES), splits="node_splits"),
            "edges": sonic.Flat(["source", "target"], splits="edge_splits", dtype="int64"),
        },
        {"scores": ["qcd", "top"]},
    )
    with (
        serving({model.name: NETWORKS / "graph_attention.onnx"}, max_batch_size=0) as pool,
        # Some graphs in a request: the network compares all edges with all graphs.
        sonic.connect(pool.settings.servers, max_request_bytes=500_000),
    ):
        scores = compare(
            model, {"nodes": nodes, "edges": edges}, network("graph_attention"), batch=64
        )
    return {"auc": auc(test_jets.is_top, scores.top), "rows": len(test_jets)}


if __name__ == "__main__":
    main(run)
