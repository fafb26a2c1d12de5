"""ResNet-50, an eighth as wide, on images of jets: the other example of the first papers."""

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from sample import auc, grids, jets

import sonic_coffea as sonic


def images(test_jets, size=64):
    """``jets * 3 * 64 * 64``: the grids of a jet, each cell four pixels wide."""
    coarse = grids(test_jets)
    return coarse.repeat(size // coarse.shape[2], axis=2).repeat(size // coarse.shape[3], axis=3)


def run(number=600):
    """Score some of the sample's jets."""
    test_jets = jets(2)
    test_jets = test_jets[np.random.default_rng(1).permutation(len(test_jets))[:number]]
    model = sonic.Model("resnet50", {"image": sonic.Dense("image")}, {"scores": ["qcd", "top"]})
    pixels = ak.zip({"image": images(test_jets)}, depth_limit=1)
    with serving({model.name: NETWORKS / "resnet50.onnx"}, max_batch_size=64):
        scores = compare(model, pixels, network("resnet50"), batch=64)
    return {"auc": auc(test_jets.is_top, scores.top), "rows": len(test_jets)}


if __name__ == "__main__":
    main(run)
