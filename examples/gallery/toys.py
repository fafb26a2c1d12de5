"""Simulated data for what the sample's jets do not have: pulses, wires, hits, missing energy."""

import awkward as ak
import numpy as np

# Calorimeter pulses: how much of a deposit each of eight samples of 25 ns sees.
PULSE = np.array([0.0, 0.02, 0.10, 0.45, 0.27, 0.10, 0.04, 0.02])
PATCH = 48


def pulses(events, seed):
    """``events * hits * {ieta, depth, gain, s0 ... s7, energy}``: GeV, fC, with pileup."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(900, events)
    n = counts.sum()
    energy = rng.exponential(4.0, n) * (rng.random(n) < 0.7)
    early, late = rng.exponential(1.5, n), rng.exponential(1.5, n)
    gain = rng.uniform(0.8, 1.2, n)
    charge = energy[:, None] * PULSE + early[:, None] * np.roll(PULSE, -1)
    charge += late[:, None] * np.roll(PULSE, 1)
    charge = charge * 5.0 * gain[:, None] + rng.normal(0.0, 0.3, (n, 8))
    columns = {"ieta": rng.integers(1, 29, n), "depth": rng.integers(1, 7, n), "gain": gain}
    columns |= {f"s{i}": charge[:, i] for i in range(8)} | {"energy": energy}
    return ak.unflatten(ak.zip({k: v.astype("float32") for k, v in columns.items()}), counts)


def wires(planes, seed, hits=40):
    """Wire images of tracks, showers and Michel electrons, and the hits in them.

    Returns images ``planes * 240 * 240``, and ``planes * hits * {wire, tick, kind}``: kind is 0 for
    a track, 1 for a shower, 2 for a Michel electron.
    """
    rng = np.random.default_rng(seed)
    images = rng.normal(0.0, 0.1, (planes, 240, 240)).astype("float32")
    found = []
    for image in images:
        here = []
        for _ in range(6):
            kind = int(rng.integers(3))
            x, y = rng.uniform(40, 200, 2)
            angle = rng.uniform(0, 2 * np.pi)
            points, spread = {0: (60, 0.3), 1: (120, 4.0), 2: (25, 0.6)}[kind]
            bend = {0: 0.0, 1: 0.0, 2: 0.12}[kind]
            along = np.linspace(0.0, {0: 50.0, 1: 30.0, 2: 12.0}[kind], points)
            turned = angle + bend * along
            wander = rng.normal(0.0, spread, (2, points)) * (
                along / along[-1] if kind == 1 else 1.0
            )
            px = (x + np.cumsum(np.cos(turned)) * along[-1] / points + wander[0]).astype(int)
            py = (y + np.cumsum(np.sin(turned)) * along[-1] / points + wander[1]).astype(int)
            inside = (px >= 0) & (px < 240) & (py >= 0) & (py < 240)
            np.add.at(image, (px[inside], py[inside]), rng.gamma(4.0, 0.25, inside.sum()))
            here += [(a, b, kind) for a, b in zip(px[inside], py[inside], strict=True)]
        chosen = rng.permutation(len(here))[:hits]
        found.append(
            [dict(zip(("wire", "tick", "kind"), map(int, here[i]), strict=True)) for i in chosen]
        )
    return images, ak.Array(found)


def showers(events, seed):
    """``events * hits * {x, y, z, energy, shower}``: a few showers in a calorimeter."""
    rng = np.random.default_rng(seed)
    counts, rows = [], []
    for _ in range(events):
        size = 0
        for shower in range(rng.integers(1, 5)):
            n = int(rng.integers(12, 30))
            centre = rng.uniform(-1, 1, 2)
            z = rng.uniform(0, 1, n)
            xy = centre + rng.normal(0, 0.05, (n, 2)) * (0.5 + z[:, None])
            rows.append(np.c_[xy, z, rng.exponential(1.0, n), np.full(n, shower)])
            size += n
        counts.append(size)
    table = np.concatenate(rows).astype("float32")
    names = ("x", "y", "z", "energy", "shower")
    hits = ak.zip({name: table[:, i] for i, name in enumerate(names)})
    return ak.unflatten(hits, counts)


def candidates(events, seed):
    """``events * cands * {px, py, eta, charge, dz, puppi}``, and the true missing momentum."""
    rng = np.random.default_rng(seed)
    true = rng.normal(0.0, 40.0, (events, 2))
    counts, rows = [], []
    for met in true:
        hard, soft = int(rng.integers(30, 60)), int(rng.integers(60, 140))
        p = rng.normal(0.0, 6.0, (hard, 2))
        p += (-met - p.sum(axis=0)) / hard
        both = np.r_[p, rng.normal(0.0, 3.0, (soft, 2))]
        primary = np.r_[np.ones(hard), np.zeros(soft)]
        charge = (rng.random(len(both)) < 0.6).astype(float)
        dz = np.where(primary == 1, rng.normal(0, 0.05, len(both)), rng.normal(0, 3, len(both)))
        puppi = np.clip(primary * 0.7 + rng.normal(0.15, 0.25, len(both)), 0, 1)
        rows.append(np.c_[both, rng.uniform(-3, 3, len(both)), charge, dz * charge, puppi])
        counts.append(len(both))
    table = np.concatenate(rows).astype("float32")
    names = ("px", "py", "eta", "charge", "dz", "puppi")
    found = ak.zip({name: table[:, i] for i, name in enumerate(names)})
    return ak.unflatten(found, counts), ak.zip({"px": true[:, 0], "py": true[:, 1]})


def elements(events, seed):
    """``events * elements * {track, ecal, hcal, log_e, eta, phi, kind, log_pt}``: tracks, clusters.

    kind is 1 for the track of a charged hadron, 2 for the cluster of a photon, 3 for that of a
    neutral hadron, and 0 for the cluster that a charged hadron leaves, too.
    """
    rng = np.random.default_rng(seed)
    counts, rows = [], []
    for _ in range(events):
        size = 0
        for kind in rng.choice([1, 2, 3], rng.integers(8, 25), p=[0.6, 0.25, 0.15]):
            pt, eta, phi = rng.exponential(8.0) + 1.0, *rng.uniform(-1.5, 1.5, 2)
            place, near = [eta, phi], list(rng.normal([eta, phi], 0.02))
            seen = np.log(pt * np.exp(rng.normal(0.0, {1: 0.15, 2: 0.05, 3: 0.2}[kind])))
            if kind == 1:
                rows.append(
                    [1, 0, 0, np.log(pt * np.exp(rng.normal(0, 0.01))), *place, 1, np.log(pt)]
                )
                rows.append([0, 0, 1, seen, *near, 0, np.log(pt)])
            else:
                rows.append([0, kind == 2, kind == 3, seen, *near, kind, np.log(pt)])
            size += 1 + (kind == 1)
        counts.append(size)
    table = np.asarray(rows, np.float32)
    names = ("track", "ecal", "hcal", "log_e", "eta", "phi", "kind", "log_pt")
    return ak.unflatten(ak.zip({n: table[:, i] for i, n in enumerate(names)}), counts)


def displaced(signal, mean, extra, width, rng):
    """``jets * var * {f0 ... , px, py, pz, energy}``: what lies in a jet, some of it displaced.

    f0 is the significance of the displacement, which jets of a heavy quark have; the other numbers
    say nothing. A jet of the signal has `extra` more, on average.
    """
    signal = np.asarray(signal, bool)
    counts = rng.poisson(mean + extra * signal)
    n = counts.sum()
    far = np.repeat(signal, counts) & (rng.random(n) < 0.35)
    columns = {f"f{k}": rng.normal(0, 1, n) for k in range(width)}
    columns["f0"] += far * rng.exponential(3.0, n)
    pt, eta, phi = rng.exponential(5.0, n) + 0.5, rng.normal(0, 0.2, n), rng.normal(0, 0.2, n)
    columns |= {"px": pt * np.cos(phi), "py": pt * np.sin(phi), "pz": pt * np.sinh(eta)}
    columns["energy"] = pt * np.cosh(eta)
    return ak.unflatten(ak.zip({k: v.astype("float32") for k, v in columns.items()}), counts)
