"""Dense grids, as DeepTau's: images of each jet's constituents, filled in compiled code."""

import awkward as ak
from common import NETWORKS, compare, main, network, serving
from sample import auc, grids, jets

import sonic_coffea as sonic


def run():
    """Score the sample's jets by their images."""
    test_jets = jets(2)
    model = sonic.Model("tau_images", {"grid": sonic.Dense("grid")}, {"scores": ["qcd", "top"]})
    images = ak.zip({"grid": grids(test_jets)}, depth_limit=1)
    with serving({model.name: NETWORKS / "tau_images.onnx"}):
        scores = compare(model, images, network("tau_images"))
    return {"auc": auc(test_jets.is_top, scores.top), "rows": len(test_jets)}


if __name__ == "__main__":
    main(run)
