"""ParticleTransformer: classes and mass of jets, from weaver's file, in requests by length."""

import json

import awkward as ak
import numpy as np
from common import NETWORKS, compare, main, network, serving
from sample import auc, jets

import sonic_coffea as sonic
from sonic_coffea.demo.features import CONSTITUENT_FEATURES

VECTORS = ["part_px", "part_py", "part_pz", "part_energy"]


def preprocessing():
    """Return what weaver writes beside a network: lengths between 8 and 32, by powers of two."""

    def group(names):
        info = {"median": 0, "norm_factor": 1, "replace_inf_value": 0, "pad": 0}
        info |= {"lower_bound": -1e32, "upper_bound": 1e32}
        lengths = {"min_length": 8, "max_length": 32}
        return {"var_names": names, "var_infos": dict.fromkeys(names, info), **lengths}

    groups = {
        "pf_features": group(list(CONSTITUENT_FEATURES)),
        "pf_vectors": group(VECTORS),
        "pf_mask": group(["part_mask"]),
    }
    return {"output_names": ["label_QCD", "label_Top"], "input_names": list(groups), **groups}


def run(folder=None):
    """Score the sample's jets."""
    preprocess = preprocessing()
    if folder is not None:
        (folder / "preprocess.json").write_text(json.dumps(preprocess))
    weaver = sonic.Model.from_weaver("particle_transformer", preprocess, output="scores")
    outputs = {**weaver.outputs, "jet_mass": None}
    model = sonic.Model(weaver.name, weaver.inputs, outputs)
    test_jets = jets(2)
    test_jets = test_jets[np.argsort(-ak.to_numpy(test_jets.pt))]
    with serving({model.name: NETWORKS / "particle_transformer.onnx"}):
        scores = compare(model, test_jets.parts, network("particle_transformer"))
    tops = test_jets.is_top > 0
    ratio = ak.to_numpy(scores.jet_mass[tops] / test_jets.msoftdrop[tops])
    return {
        "auc": auc(test_jets.is_top, scores.scores.Top),
        "mass of tops: median of the ratio": float(np.median(ratio)),
        "half width": float(np.diff(np.quantile(ratio, [0.16, 0.84]))[0] / 2),
        "rows": len(test_jets),
    }


if __name__ == "__main__":
    main(run)
