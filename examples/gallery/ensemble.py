"""An ensemble: preparation, network and calibration run on the server, called as one model."""

from pathlib import Path

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from sample import auc, grids, jets
from steps import calibrate, prepare

import sonic_coffea as sonic
from sonic_coffea.server import Ensemble, Served

HERE = Path(__file__).with_name("steps.py")
GRID, SCORES = ("float32", ["N", 3, 16, 16]), ("float32", ["N", 2])


def run():
    """Score raw images by three steps in one request."""
    test_jets = jets(2)
    raw = ak.zip({"image": np.expm1(grids(test_jets)).astype(np.float32)}, depth_limit=1)
    model = sonic.Model("tagger", {"image": sonic.Dense("image")}, {"calibrated": ["qcd", "top"]})
    steps = {
        "prepare": Served(f"{HERE}:prepare", inputs={"image": GRID}, outputs={"grid": GRID}),
        "tau_images": NETWORKS / "tau_images.onnx",
        "calibrate": Served(
            f"{HERE}:calibrate", inputs={"scores": SCORES}, outputs={"calibrated": SCORES}
        ),
        "tagger": Ensemble(
            steps=[
                ("prepare", {"image": "image"}, {"grid": "grid"}),
                ("tau_images", {"grid": "grid"}, {"scores": "scores"}),
                ("calibrate", {"scores": "scores"}, {"calibrated": "calibrated"}),
            ],
            inputs=["image"],
            outputs=["calibrated"],
        ),
    }
    net = network("tau_images")
    with serving(steps):
        scores = compare(
            model, raw, lambda t: calibrate(net(prepare(t["image"]))["scores"]), rtol=1e-3
        )
    return {"auc": auc(test_jets.is_top, scores.top), "rows": len(test_jets)}


if __name__ == "__main__":
    main(run)
