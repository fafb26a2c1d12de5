"""A server that is not a Triton: a network in fixed point, as on an FPGA.

The arithmetic is that of hls4ml's ap_fixed<16, 6>: whole numbers, ten bits behind the point. It is
served by a minimal KServe-v2 server, without any of Triton's extensions, to the same client.
"""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main
from sample import auc, jets

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer

FIELDS = ["pt", "eta", "mass", "msoftdrop"]
POINT = 10
WEIGHTS = (
    dict(np.load(NETWORKS / "fixed_point.npz")) if (NETWORKS / "fixed_point.npz").exists() else {}
)


def saturate(x):
    """Round down to 16 bits, and saturate, as the hardware does."""
    return np.clip(x, -(2**15), 2**15 - 1)


def evaluate(inputs):
    """Compute ``N * 2 * float32`` from ``N * 4 * float32``, in integers."""
    x = saturate(
        np.floor(inputs["features"].astype(np.float64) / 512.0 * 2**POINT).astype(np.int64)
    )
    for layer in ("0", "2"):
        weight, bias = (WEIGHTS[f"{layer}_{name}"].astype(np.int64) for name in ("weight", "bias"))
        x = saturate(((x @ weight.T) >> POINT) + bias)
        x = np.maximum(x, 0) if layer == "0" else x
    return {"scores": (x / 2.0**POINT).astype(np.float32)}


def run():
    """Score the sample's jets."""
    model = sonic.Model("fixed", {"features": sonic.Row(FIELDS)}, {"scores": ["qcd", "top"]})
    test_jets = jets(2)
    fpga = FakeModel(
        inputs={"features": ("float32", (4,))},
        outputs={"scores": ("float32", (2,))},
        function=evaluate,
        max_rows=100_000,  # only Triton tells its limit
    )
    with FakeServer({"fixed": fpga}, extensions=()) as server, sonic.connect(server.url):
        scores = compare(model, test_jets, evaluate)
    separation = auc(test_jets.is_top, scores.top - scores.qcd)
    return {"auc": separation, "rows": len(ak.flatten(scores.top, axis=0))}


if __name__ == "__main__":
    main(run)
