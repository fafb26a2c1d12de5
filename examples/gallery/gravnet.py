"""GravNet and object condensation: all hits of an event, without padding."""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from toys import showers

import sonic_coffea as sonic


def clusters(beta, place, threshold=0.3, reach=0.5):
    """Return the cluster of each hit: hits with the largest beta collect those near them."""
    assigned = np.full(len(beta), -1)
    for centre in np.argsort(-beta):
        if beta[centre] < threshold:
            break
        if assigned[centre] < 0:
            near = ((place - place[centre]) ** 2).sum(1) < reach**2
            assigned[near & (assigned < 0)] = centre
    return assigned


def run(events=150):
    """Cluster hits, and compare with the true showers."""
    hits = showers(events, 2)
    model = sonic.Model(
        "gravnet",
        {"hits": sonic.Flat(["x", "y", "z", "energy"], splits="row_splits")},
        {
            "beta": sonic.Output(["beta"], per="constituent"),
            "place": sonic.Output(["u", "v"], per="constituent"),
        },
    )
    with (
        serving({model.name: NETWORKS / "gravnet.onnx"}, max_batch_size=0) as pool,
        # A few events in a request: the other events do not change a score.
        sonic.connect(pool.settings.servers, max_request_bytes=20_000),
    ):
        scores = compare(model, hits, network("gravnet"), batch=8, rtol=1e-3, atol=1e-4)
    pure = total = 0
    for beta, u, v, true in zip(
        scores.beta.beta, scores.place.u, scores.place.v, hits.shower, strict=False
    ):
        assigned = clusters(ak.to_numpy(beta), np.c_[ak.to_numpy(u), ak.to_numpy(v)])
        for cluster in np.unique(assigned[assigned >= 0]):
            pure += np.bincount(ak.to_numpy(true)[assigned == cluster].astype(int)).max()
        total += len(assigned)
    return {"hits in the right cluster": float(pure / total), "rows": int(total)}


if __name__ == "__main__":
    main(run)
