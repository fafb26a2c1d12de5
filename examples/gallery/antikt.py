"""Anti-kt clustering (https://arxiv.org/abs/0802.1189), E-scheme, in numpy: served, or called."""

import itertools

import numpy as np


def cluster(particles, row_splits, radius=0.8, least=20.0):
    """Cluster the particles of each event.

    ``[sum n, 4]`` (px, py, pz, e in GeV) and offsets ``[N + 1]`` become jets above 20 GeV,
    ``[sum m, 4]`` (pt, eta, phi, constituents), and their offsets.
    """
    clustered, splits = [], [0]
    for start, stop in itertools.pairwise(row_splits):
        clustered += _jets(particles[start:stop].astype(np.float64), radius, least)
        splits.append(len(clustered))
    jets = np.asarray(clustered, np.float32).reshape(-1, 4)
    return {"jets": jets, "jet_splits": np.asarray(splits, np.int64)}


def _jets(four, radius, least):
    members, jets = np.ones(len(four)), []
    while len(four):
        pt2 = four[:, 0] ** 2 + four[:, 1] ** 2
        phi = np.arctan2(four[:, 1], four[:, 0])
        rapidity = 0.5 * np.log((four[:, 3] + four[:, 2] + 1e-9) / (four[:, 3] - four[:, 2] + 1e-9))
        inverse = 1.0 / np.maximum(pt2, 1e-12)
        dphi = np.abs(phi[:, None] - phi[None])
        dphi = np.minimum(dphi, 2 * np.pi - dphi)
        delta2 = (rapidity[:, None] - rapidity[None]) ** 2 + dphi**2
        pair = np.minimum(inverse[:, None], inverse[None]) * delta2 / radius**2
        np.fill_diagonal(pair, inverse)
        i, j = np.unravel_index(np.argmin(pair), pair.shape)
        if i == j:
            pt = np.sqrt(pt2[i])
            if pt > least:
                jets.append((pt, np.arcsinh(four[i, 2] / pt), phi[i], members[i]))
            four, members = np.delete(four, i, 0), np.delete(members, i)
        else:
            four[i] += four[j]
            members[i] += members[j]
            four, members = np.delete(four, j, 0), np.delete(members, j)
    return sorted(jets, reverse=True)
