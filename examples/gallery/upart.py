"""UParT for AK4 jets: eight inputs of candidates, lost tracks and vertices, none with a mask."""

import awkward as ak
import numpy as np
import toys
from common import NETWORKS, compare, main, network, serving
from sample import auc

import sonic_coffea as sonic

# Charged candidates, lost tracks, neutral candidates and vertices: the padded length, and the
# number of features.
KINDS = {"cpf": (29, 25), "lt": (5, 18), "npf": (25, 8), "sv": (5, 14)}
VECTORS = ["px", "py", "pz", "energy"]


def fields(kind, names):
    """Return the paths of the fields of a kind in the jets."""
    return [f"{kind}.{name}" for name in names]


# input_1 to input_4 are the features, input_5 to input_8 the four-vectors: [N, L, F]. The network
# knows padding by its four-vector, which is 0.
FEATURES = {
    f"input_{k}": sonic.Padded(
        fields(kind, [f"f{i}" for i in range(width)]), length, axis_order="LF"
    )
    for k, (kind, (length, width)) in enumerate(KINDS.items(), 1)
}
FOUR_VECTORS = {
    f"input_{k}": sonic.Padded(fields(kind, VECTORS), length, axis_order="LF")
    for k, (kind, (length, _)) in enumerate(KINDS.items(), 5)
}
MODEL = sonic.Model("upart", {**FEATURES, **FOUR_VECTORS}, {"softmax": ["light", "b"]})


def jets(number, seed):
    """``jets * {is_b, cpf, lt, npf, sv: constituents * {f0, ..., px, py, pz, energy}}``."""
    rng = np.random.default_rng(seed)
    is_b = rng.random(number) < 0.5
    means = {"cpf": (12, 0), "lt": (1, 0), "npf": (9, 0), "sv": (0.3, 0.7)}
    kinds = {
        kind: toys.displaced(is_b & (kind != "npf"), *means[kind], width, rng)
        for kind, (_, width) in KINDS.items()
    }
    return ak.zip({"is_b": is_b, **kinds}, depth_limit=1)


def run():
    """Score simulated jets, in events of a few each."""
    flat = jets(3000, 2)
    events = ak.unflatten(flat, np.full(750, 4))
    shapes = {name: tensor.shape[1:] for name, tensor in MODEL.pack(events[:10]).items()}
    with serving({"upart": NETWORKS / "upart.onnx"}):
        scores = compare(MODEL, events, network("upart"))
    return {
        "auc": auc(flat.is_b, ak.flatten(scores.b)),
        "auc of the displacement of candidates": auc(
            flat.is_b, ak.fill_none(ak.mean(flat.cpf.f0, axis=1), 0)
        ),
        "jets without a vertex": int(ak.sum(ak.num(flat.sv) == 0)),
        "shapes": shapes,
        "rows": len(flat),
    }


if __name__ == "__main__":
    main(run)
