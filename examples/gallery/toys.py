"""Simulated data that the sample lacks: pulses, hits, missing energy."""

import awkward as ak
import numpy as np

# Calorimeter pulses: the fraction of a deposit in each of eight samples of 25 ns.
PULSE = np.array([0.0, 0.02, 0.10, 0.45, 0.27, 0.10, 0.04, 0.02])


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
    return _records(rows, ("x", "y", "z", "energy", "shower"), counts)


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
    records = _records(rows, ("px", "py", "eta", "charge", "dz", "puppi"), counts)
    return records, ak.zip({"px": true[:, 0], "py": true[:, 1]})


def with_categories(cands, seed):
    """Return candidates with a charge of -1, 0 or 1, and the pdgId of a particle."""
    rng = np.random.default_rng(seed)
    charged = np.asarray(ak.flatten(cands.charge)) != 0
    sign = rng.choice([-1, 1], len(charged))
    kind = rng.choice([211, 11, 13], len(charged), p=[0.9, 0.05, 0.05])
    pdg_id = np.where(charged, sign * kind, rng.choice([22, 130], len(charged)))
    counts = ak.num(cands)
    columns = {name: cands[name] for name in ("px", "py", "eta", "dz", "puppi")}
    columns |= {"charge": ak.unflatten(np.where(charged, sign, 0), counts)}
    return ak.zip({**columns, "pdgId": ak.unflatten(pdg_id, counts)})


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


def tops(events, seed):
    """``events * {Jet, Lepton, Met, Event, true}``: a hadronic top among other jets.

    true has the places of the two quarks of the W and of the b among the jets.
    """
    rng = np.random.default_rng(seed)
    jets, true = [], []
    for _ in range(events):
        top = np.r_[rng.normal(0.0, 80.0, 2), rng.normal(0.0, 120.0)]
        w, b = _decay(np.r_[np.sqrt(top @ top + 172.5**2), top], 80.4, 5.0, rng)
        q1, q2 = _decay(w, 1.0, 1.0, rng)
        others = [rng.normal(0.0, 60.0, 3) for _ in range(rng.integers(1, 7))]
        four = [q1, q2, b, *(np.r_[np.sqrt(p @ p + 25.0), p] for p in others)]
        four = np.asarray(four) * rng.normal(1.0, 0.05, (len(four), 1))
        tagged = np.r_[False, False, True, rng.random(len(others)) < 0.2]
        btag = np.clip(rng.normal(np.where(tagged, 0.8, 0.2), 0.15), 0, 1)
        order = np.argsort(-np.hypot(four[:, 1], four[:, 2]))
        jets.append(_jets(four[order], btag[order]))
        true.append([int(np.flatnonzero(order == n)[0]) for n in range(3)])
    jet = ak.Array(jets)
    angle, kinds = rng.uniform(-np.pi, np.pi, (2, events)), rng.random(events) < 0.5
    alone = [{"sin_phi": np.sin(a), "cos_phi": np.cos(a)} for a in angle]
    for one, eta in zip(alone, (rng.normal(0, 1, events), np.zeros(events)), strict=True):
        one |= {"pt": rng.exponential(40.0, events), "eta": eta}
    lepton, met = ak.zip(alone[0] | {"is_e": kinds}), ak.zip(alone[1])
    event = ak.zip({"ht": ak.sum(jet.pt, axis=1)})
    parts = {"Jet": jet, "Lepton": lepton, "Met": met, "Event": event, "true": np.asarray(true)}
    return ak.zip(parts, depth_limit=1)


def _decay(parent, mass, other, rng):
    """Return the four-vectors (E, p) of an isotropic two-body decay, at rest."""
    m2 = parent[0] ** 2 - parent[1:] @ parent[1:]
    k2 = (m2 - (mass + other) ** 2) * (m2 - (mass - other) ** 2) / (4 * m2)
    n = rng.normal(size=3)
    p = np.sqrt(k2) * n / np.linalg.norm(n)
    beta, gamma = parent[1:] / parent[0], parent[0] / np.sqrt(m2)
    bodies = []
    for m, q in ((mass, p), (other, -p)):
        e = np.sqrt(k2 + m * m)
        along = gamma * (e + gamma / (gamma + 1) * (beta @ q))
        bodies.append(np.r_[gamma * (e + beta @ q), q + along * beta])
    return bodies


def _jets(four, btag):
    e, px, py, pz = four.T
    pt = np.hypot(px, py)
    mass = np.sqrt(np.maximum(e**2 - pt**2 - pz**2, 0))
    columns = {"mass": mass, "pt": pt, "eta": np.arcsinh(pz / pt), "sin_phi": py / pt}
    columns |= {"cos_phi": px / pt, "btag": btag, "tagged": (btag > 0.5).astype(float)}
    return [
        dict(zip(columns, map(float, row), strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def spacepoints(events, seed):
    """``events * hits * {r, phi, z, layer, track}``: tracks, and noise of track < 0."""
    rng = np.random.default_rng(seed)
    counts, rows = [], []
    for _ in range(events):
        n = int(rng.integers(5, 15))
        phi, bend, slope = rng.uniform(-2.5, 2.5, n), rng.normal(0, 0.15, n), rng.normal(0, 1.0, n)
        z0 = rng.normal(0, 0.05, n)
        here = []
        for layer in range(8):
            r = 0.1 + 0.1 * layer
            noise = int(rng.poisson(4))
            places = np.r_[phi + bend * r + rng.normal(0, 5e-4, n), rng.uniform(-2.5, 2.5, noise)]
            z = np.r_[z0 + slope * r + rng.normal(0, 2e-3, n), rng.normal(0, 2 * r, noise)]
            track = np.r_[np.arange(n), -1 - np.arange(noise) - 100 * layer]
            shared = np.full(len(z), r), places, z, np.full(len(z), layer), track
            here.append(np.column_stack(shared))
        table = np.concatenate(here)
        rows.append(table[rng.permutation(len(table))])
        counts.append(len(table))
    return _records(rows, ("r", "phi", "z", "layer", "track"), counts)


def _records(rows, names, counts):
    table = np.concatenate(rows).astype("float32")
    records = ak.zip({name: table[:, i] for i, name in enumerate(names)})
    return ak.unflatten(records, counts)
