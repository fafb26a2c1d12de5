"""Global ParT for AK8 jets: four groups with their own lengths, from weaver's file."""

import awkward as ak
import numpy as np
import toys
from common import NETWORKS, compare, main, network, serving
from sample import auc, jets

import sonic_coffea as sonic
from sonic_coffea.demo.features import CONSTITUENT_FEATURES

VECTORS = ["part_px", "part_py", "part_pz", "part_energy"]
# The smallest and largest length of each group, and its variables.
PARTS = {
    "cpf": ((12, 90), [*CONSTITUENT_FEATURES], VECTORS),
    "npf": ((8, 60), [*CONSTITUENT_FEATURES[:7]], VECTORS),
    "sv": ((1, 10), [f"f{i}" for i in range(11)], ["px", "py", "pz", "energy"]),
}


def preprocessing():
    """Return what weaver writes beside a network with several groups of inputs."""

    def group(names, least, most):
        info = {"median": 0, "norm_factor": 1, "replace_inf_value": 0, "pad": 0}
        info |= {"lower_bound": -1e32, "upper_bound": 1e32}
        lengths = {"min_length": least, "max_length": most}
        return {"var_names": names, "var_infos": dict.fromkeys(names, info), **lengths}

    groups = {}
    for kind, (limits, features, vectors) in PARTS.items():
        groups[f"{kind}_features"] = group(features, *limits)
        groups[f"{kind}_vectors"] = group(vectors, *limits)
        groups[f"{kind}_mask"] = group([f"{kind}_mask"], *limits)
    groups["jet_features"] = group(["log_pt", "log_mass", "eta"], 1, 1)
    names = ["probQCD", "probTop", "massCorr"]
    return {"output_names": names, "input_names": list(groups), **groups}


# Each group's variables are in a collection of the jet.
PREFIX = {kind: f"{kind}." for kind in PARTS}
MODEL = sonic.Model.from_weaver("glopart", preprocessing(), prefix=PREFIX)


def objects(number):
    """Return the sample's jets with charged and neutral candidates, and simulated vertices."""
    records = jets(number)
    charged = records.parts.part_charge != 0
    columns = {"cpf": records.parts[charged], "npf": records.parts[~charged]}
    columns["sv"] = toys.displaced(records.is_top > 0, 0.5, 1.0, 11, np.random.default_rng(number))
    columns |= {"log_pt": np.log(records.pt / 500), "log_mass": np.log1p(records.mass / 100)}
    columns |= {name: records[name] for name in ("eta", "mass", "msoftdrop", "is_top")}
    return ak.zip(columns, depth_limit=1)


def run():
    """Score the sample's jets."""
    records = objects(2)
    with serving({"glopart": NETWORKS / "glopart.onnx"}):
        scores = compare(MODEL, records, network("glopart"))
    mass = ak.to_numpy(scores.massCorr * records.mass)
    tops = ak.to_numpy(records.is_top > 0)
    ratio = mass[tops] / ak.to_numpy(records.msoftdrop[tops])
    return {
        "auc": auc(tops, scores.probTop),
        "mass of tops: median of the ratio": float(np.median(ratio)),
        "rows": len(records),
    }


if __name__ == "__main__":
    main(run)
