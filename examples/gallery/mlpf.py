"""Particle flow by a network: tracks and clusters of an event, a class and a momentum for each."""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from toys import elements

import sonic_coffea as sonic

FIELDS = ["track", "ecal", "hcal", "log_e", "eta", "phi"]
KINDS = ["none", "charged", "photon", "neutral"]


def run(events=400):
    """Find the particles of events, and compare with the true ones."""
    records = elements(events, 2)
    model = sonic.Model(
        "mlpf",
        {"elements": sonic.Flat(FIELDS, splits="row_splits")},
        {
            "kinds": sonic.Output(KINDS, per="constituent"),
            "momentum": sonic.Output(["log_pt"], per="constituent"),
        },
    )
    with (
        serving({model.name: NETWORKS / "mlpf.onnx"}, max_batch_size=0) as pool,
        # The network looks at all pairs of a request's elements, so some events are enough.
        sonic.connect(pool.settings.servers, max_request_bytes=20_000),
    ):
        scores = compare(model, records, network("mlpf"), batch=16, rtol=1e-3, atol=1e-4)
    table = np.stack([ak.to_numpy(ak.flatten(scores.kinds[kind])) for kind in KINDS], 1)
    kind, true = table.argmax(1), ak.to_numpy(ak.flatten(records.kind)).astype(int)
    # Particles have another multiplicity than elements: those that are of some kind.
    particles = scores.momentum[ak.unflatten(kind, ak.num(records)) > 0]
    off = ak.to_numpy(ak.flatten(scores.momentum.log_pt - records.log_pt))[true == 1]
    return {
        "accuracy": float(np.mean(kind == true)),
        "largest class": float(np.bincount(true).max() / len(true)),
        "particles an event": float(ak.mean(ak.num(particles))),
        "resolution of charged hadrons": float(np.std(off)),
        "rows": len(true),
    }


if __name__ == "__main__":
    main(run)
