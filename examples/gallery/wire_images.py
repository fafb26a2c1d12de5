"""EmMichelTrackId: 48 by 48 patches around the hits of wire images, three classes for each hit."""

import awkward as ak
import numba
import numpy as np
from common import NETWORKS, compare, main, network, serving
from toys import PATCH, wires

import sonic_coffea as sonic


@numba.njit
def cut(images, plane, wire, tick):
    """Cut a patch around each hit; what is beyond the image's edge is 0."""
    patches = np.zeros((len(plane), PATCH, PATCH), images.dtype)
    half = PATCH // 2
    for n in range(len(plane)):
        for i in range(PATCH):
            for j in range(PATCH):
                x, y = wire[n] - half + i, tick[n] - half + j
                if 0 <= x < images.shape[1] and 0 <= y < images.shape[2]:
                    patches[n, i, j] = images[plane[n], x, y]
    return patches


def run(planes=40):
    """Tell tracks, showers and Michel electrons apart."""
    images, hits = wires(planes, 2)
    plane, wire, tick = ak.broadcast_arrays(np.arange(planes), hits.wire, hits.tick)
    flat = [ak.to_numpy(ak.flatten(values)) for values in (plane, wire, tick)]
    patches = ak.unflatten(ak.zip({"patch": cut(images, *flat)}, depth_limit=1), ak.num(hits))
    model = sonic.Model(
        "michel",
        {"patch": sonic.Dense("patch", shape=(1, PATCH, PATCH))},
        {"scores": ["track", "shower", "michel"]},
    )
    with serving({model.name: NETWORKS / "michel.onnx"}):
        scores = compare(model, patches, network("michel"))
    assert ak.num(scores).tolist() == ak.num(hits).tolist()
    table = np.stack([ak.to_numpy(ak.flatten(scores[name])) for name in scores.fields], 1)
    kind = ak.to_numpy(ak.flatten(hits.kind))
    return {
        "accuracy": float(np.mean(table.argmax(1) == kind)),
        "largest class": float(np.bincount(kind).max() / len(kind)),
        "rows": len(kind),
    }


if __name__ == "__main__":
    main(run)
