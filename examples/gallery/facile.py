"""FACILE: energies of calorimeter hits, by a tiny network in batches of 16,000."""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from toys import PULSE, pulses

import sonic_coffea as sonic

FIELDS = ["ieta", "depth", "gain", *(f"s{i}" for i in range(8))]


def run(events=400):
    """Regress the energies of hits, and compare them with sums of samples."""
    hits = pulses(events, 2)
    model = sonic.Model("facile", {"hits": sonic.Row(FIELDS)}, {"energy": None})
    batches = {"preferred_batch_size": [16000]}
    with serving(
        {model.name: NETWORKS / "facile.onnx"}, max_batch_size=16000, dynamic_batching=batches
    ):
        energy = compare(model, hits, network("facile"), batch=16000)
    summed = (hits.s3 + hits.s4 + hits.s5) / hits.gain / 5.0 / PULSE[3:6].sum()

    def width(estimate):
        return float(np.mean(np.abs(ak.to_numpy(ak.flatten(estimate - hits.energy)))))

    return {
        "mean error [GeV]": width(energy),
        "of a sum of three samples [GeV]": width(summed),
        "rows": int(ak.sum(ak.num(hits))),
    }


if __name__ == "__main__":
    main(run)
