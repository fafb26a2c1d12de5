"""Generate boosted top-quark pairs and QCD dijets as small NanoAOD files.

Pythia 8 makes the events, a few lines of numpy stand in for the detector, FastJet finds the jets,
and uproot writes what an analysis reads: FatJet, FatJetPFCand, PFCand, Jet and GenPart as in
NanoAODv15. There is no pileup. The same seed gives the same arrays::

    python generate.py ../../src/sonic_coffea/demo/data     # the sample of the package
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import awkward as ak
import fastjet
import numba
import numpy as np
import pythia8mc
import uproot

if TYPE_CHECKING:
    from collections.abc import Iterator

BEAM_ENERGY_GEV = 13_600
BLOCK_EVENTS = 500  # events in memory at a time, and in one cluster of the file
EVENTS_PER_LUMI_BLOCK = 100

FATJET_RADIUS, FATJET_PT_MIN, FATJET_ETA_MAX = 0.8, 200.0, 2.4
JET_RADIUS, JET_PT_MIN, JET_ETA_MAX = 0.4, 30.0, 4.7
SOFTDROP_ZCUT = 0.1  # with beta = 0: the modified mass-drop tagger, https://arxiv.org/abs/1402.2657
N_SUBJETTINESS = 4

TRACK_PT_MIN, TRACK_ETA_MAX, TRACK_EFFICIENCY, MUON_EFFICIENCY = 0.5, 2.5, 0.95, 0.98
PHOTON_PT_MIN, NEUTRAL_PT_MIN, CALO_ETA_MAX, HF_ETA_MIN = 0.5, 1.0, 5.0, 3.0
ELECTRON_MASS, MUON_MASS, PION_MASS = 0.000511, 0.10566, 0.13957

NEUTRINOS = (12, 14, 16)
# Charge of the particle with a positive code, for every charged particle that reaches the detector.
CHARGES = {11: -1, 13: -1, 211: 1, 321: 1, 2212: 1, 3112: -1, 3222: 1, 3312: -1, 3334: -1}

# GenPart_statusFlags, see https://cms-nanoaod-integration.web.cern.ch/autoDoc
IS_PROMPT, IS_HARD_PROCESS, FROM_HARD_PROCESS, IS_FIRST_COPY, IS_LAST_COPY = 0, 7, 8, 12, 13


class Process(str, Enum):
    """What collides into what."""

    TTBAR = "ttbar"
    QCD = "qcd"


PYTHIA_PROCESS = {
    Process.TTBAR: ("Top:gg2ttbar = on", "Top:qqbar2ttbar = on"),
    Process.QCD: ("HardQCD:all = on",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One output file: everything that its content depends on, versions apart.

    Parameters
    ----------
    process
        The hard process.
    events
        Number of events; none is filtered.
    seed
        Seed of Pythia and of the detector, 1 to 900,000,000.
    pt_hat_min
        Smallest transverse momentum of the hard scattering, in GeV.
    bias_power
        Events are made with a probability multiplied by ``(pt_hat / pt_hat_min) ** bias_power``,
        so that the spectrum falls slowly; ``genWeight`` undoes it.
    """

    process: Process
    events: int
    seed: int
    pt_hat_min: float = 300.0
    bias_power: float = 3.0


# The sample that comes with the package.
SAMPLE = {
    "TTbar_1.root": Job(process=Process.TTBAR, events=1000, seed=13_601),
    "TTbar_2.root": Job(process=Process.TTBAR, events=1000, seed=13_602),
    "QCD_1.root": Job(process=Process.QCD, events=750, seed=13_611),
    "QCD_2.root": Job(process=Process.QCD, events=750, seed=13_612),
}


def start_pythia(job: Job) -> Any:
    """Return Pythia, initialised for ``job``."""
    pythia = pythia8mc.Pythia("", False)  # noqa: FBT003 - no banner
    for setting in (
        *PYTHIA_PROCESS[job.process],
        f"Beams:eCM = {BEAM_ENERGY_GEV}",
        f"PhaseSpace:pTHatMin = {job.pt_hat_min}",
        "PhaseSpace:bias2Selection = on",
        f"PhaseSpace:bias2SelectionPow = {job.bias_power}",
        f"PhaseSpace:bias2SelectionRef = {job.pt_hat_min}",
        "ParticleDecays:limitTau0 = on",  # what flies further than 10 mm is left to the detector
        "ParticleDecays:tau0Max = 10",
        "Random:setSeed = on",
        f"Random:seed = {job.seed}",
        "Print:quiet = on",
    ):
        if not pythia.readString(setting):
            raise ValueError(f"Pythia does not know the setting {setting!r}")
    if not pythia.init():
        raise RuntimeError(f"Pythia could not be initialised for {job}")
    return pythia


def collide(pythia: Any, events: int) -> Iterator[ak.Array]:
    """Yield blocks of Pythia events, ``events`` in all; failed ones are replaced."""
    missing = events
    while missing:
        block = pythia.nextBatch(min(missing, BLOCK_EVENTS))
        if len(block) == 0:
            raise RuntimeError("Pythia failed in every event of a block")
        missing -= len(block)
        yield block


def four_momentum(pt: Any, eta: Any, phi: Any, mass: Any) -> dict[str, Any]:
    """Cartesian components under the names that FastJet asks for."""
    px, py, pz = pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)
    return {"px": px, "py": py, "pz": pz, "E": np.sqrt(px**2 + py**2 + pz**2 + mass**2)}


def pt_eta_phi(px: Any, py: Any, pz: Any) -> tuple[Any, Any, Any]:
    """Collider coordinates; a particle along the beam gets a large, finite eta."""
    pt = np.hypot(px, py)
    return pt, np.arcsinh(pz / np.maximum(pt, 1e-3)), np.arctan2(py, px)


def detect(particles: ak.Array, rng: np.random.Generator) -> ak.Array:
    """Turn generated particles into what a particle-flow reconstruction might see.

    Charged particles inside the tracker become tracks, with some inefficiency; what the tracker
    misses, and what is neutral, is measured by a calorimeter with its resolution and thresholds.

    Parameters
    ----------
    particles
        ``events * var * {id, status, p: {px, py, pz, e}, ...}``
    rng
        Source of every random number.

    Returns
    -------
    ak.Array
        ``events * var * {pt, eta, phi, mass: float64, pdgId: int32}``, with particle-flow codes.
    """
    seen = (particles.status > 0) & (particles.p.px**2 + particles.p.py**2 > 1e-6)
    for neutrino in NEUTRINOS:
        seen = seen & (abs(particles.id) != neutrino)
    particles = particles[seen]
    counts = ak.num(particles)

    pdg_id = ak.to_numpy(ak.flatten(particles.id))
    p = ak.flatten(particles.p)
    pt, eta, phi = pt_eta_phi(*(ak.to_numpy(p[axis]) for axis in ("px", "py", "pz")))
    species = np.abs(pdg_id)
    charge = np.zeros(len(species), np.int32)
    for code, sign in CHARGES.items():
        charge[species == code] = sign
    charge *= np.sign(pdg_id)
    electron, muon, photon = species == 11, species == 13, species == 22

    efficiency = np.where(muon, MUON_EFFICIENCY, TRACK_EFFICIENCY)
    track = (charge != 0) & (np.abs(eta) < TRACK_ETA_MAX) & (rng.random(len(pt)) < efficiency)
    electromagnetic = ~track & (photon | electron)
    energy = pt * np.cosh(eta)

    resolution = np.select(
        [track, electromagnetic],
        [np.hypot(0.01, 1e-4 * pt), np.hypot(0.03 / np.sqrt(energy), 0.007)],
        np.hypot(1.0 / np.sqrt(energy), 0.05),
    )
    granularity = np.select([track, electromagnetic], [0.0, 0.005], 0.025)
    pt = pt * (1 + resolution * rng.standard_normal(len(pt)))
    eta = eta + granularity * rng.standard_normal(len(pt))
    phi = phi + granularity * rng.standard_normal(len(pt))
    phi = np.arctan2(np.sin(phi), np.cos(phi))

    threshold = np.select([track, electromagnetic], [TRACK_PT_MIN, PHOTON_PT_MIN], NEUTRAL_PT_MIN)
    # A muon without a track leaves nothing to speak of.
    kept = (pt > threshold) & (np.abs(eta) < CALO_ETA_MAX) & (track | ~muon)

    forward = np.abs(eta) > HF_ETA_MIN
    code = np.select(
        [track & (electron | muon), track, electromagnetic & forward, electromagnetic, forward],
        [pdg_id, 211 * charge, 2, 22, 1],
        130,
    )
    mass = np.select(
        [track & electron, track & muon, track], [ELECTRON_MASS, MUON_MASS, PION_MASS], 0.0
    )
    candidates = ak.zip(
        {"pt": pt, "eta": eta, "phi": phi, "mass": mass, "pdgId": code.astype(np.int32)}
    )
    return ak.unflatten(candidates, counts)[ak.unflatten(kept, counts)]


def find_jets(
    candidates: ak.Array, *, radius: float, pt_min: float, eta_max: float
) -> tuple[ak.Array, ak.Array]:
    """Cluster with anti-kT, https://arxiv.org/abs/0802.1189, in descending pt.

    Returns
    -------
    jets
        ``events * var * {pt, eta, phi, mass: float64}``
    members
        ``events * var * var * int32``: indices into ``candidates``, in descending pt as well.
    """
    momenta = ak.zip(
        four_momentum(candidates.pt, candidates.eta, candidates.phi, candidates.mass),
        with_name="Momentum4D",
    )
    definition = fastjet.JetDefinition(fastjet.antikt_algorithm, radius)
    sequence = fastjet.ClusterSequence(momenta, definition)
    clustered, members = sequence.inclusive_jets(pt_min), sequence.constituent_index(pt_min)

    pt, eta, phi = pt_eta_phi(clustered.px, clustered.py, clustered.pz)
    mass2 = clustered.E**2 - clustered.px**2 - clustered.py**2 - clustered.pz**2
    jets = ak.zip({"pt": pt, "eta": eta, "phi": phi, "mass": np.sqrt(np.maximum(mass2, 0))})

    central = abs(jets.eta) < eta_max
    jets, members = jets[central], members[central]
    order = ak.argsort(jets.pt, ascending=False)
    jets, members = jets[order], members[order]

    member_pt = candidates.pt[ak.flatten(members, axis=2)]
    member_pt = ak.unflatten(ak.flatten(member_pt), ak.flatten(ak.num(members, axis=2)))
    order = ak.argsort(member_pt, ascending=False, stable=True)
    return jets, ak.unflatten(ak.flatten(members)[order], ak.num(members))


@numba.njit
def _distance2(a: Any, b: Any) -> float:
    """Squared angular distance of two (rapidity, phi) rows."""
    dphi = abs(a[1] - b[1])
    dphi = min(dphi, 2 * np.pi - dphi)
    return (a[0] - b[0]) ** 2 + dphi**2


@numba.njit
def _find_neighbour(node: int, angles: Any, active: Any, stop: int) -> tuple[float, int]:
    """Squared distance and index of the active node, below ``stop``, nearest to ``node``."""
    nearest, neighbour = np.inf, -1
    for other in range(stop):
        if active[other] and other != node:
            distance = _distance2(angles[node], angles[other])
            if distance < nearest:
                nearest, neighbour = distance, other
    return nearest, neighbour


@numba.njit
def _recluster(p4: Any, power: int) -> tuple[Any, Any, Any]:
    """Cluster all of a jet into one binary tree, by kT (power 1) or Cambridge/Aachen (0).

    Node ``i < n`` is constituent ``i``, merge number ``m`` makes node ``n + m``. A node keeps its
    nearest neighbour in angle, which is enough to find the smallest distance of all
    (https://arxiv.org/abs/hep-ph/0512210).
    """
    n = len(p4)
    size = 2 * n - 1
    nodes, angles, weight = np.zeros((size, 4)), np.zeros((size, 2)), np.zeros(size)
    children, active = np.full((size, 2), -1), np.zeros(size, np.bool_)
    nearest, neighbour = np.full(size, np.inf), np.full(size, -1)
    for new in range(size):
        if new < n:
            nodes[new] = p4[new]
        else:
            first = np.argmin(np.where(active, weight * nearest, np.inf)[:new])
            second = neighbour[first]
            children[new, 0], children[new, 1] = first, second
            nodes[new] = nodes[first] + nodes[second]
            active[first] = active[second] = False
            for i in range(new):
                if active[i] and (neighbour[i] == first or neighbour[i] == second):
                    nearest[i], neighbour[i] = _find_neighbour(i, angles, active, new)
        px, py, pz, energy = nodes[new]
        angles[new, 0] = 0.5 * np.log((energy + pz) / (energy - pz))
        angles[new, 1] = np.arctan2(py, px)
        weight[new] = (px**2 + py**2) ** power
        active[new] = True
        nearest[new], neighbour[new] = _find_neighbour(new, angles, active, new)
        for i in range(new):
            distance = _distance2(angles[i], angles[new])
            if active[i] and distance < nearest[i]:
                nearest[i], neighbour[i] = distance, new
    return nodes, angles, children


@numba.njit
def _softdrop_mass(p4: Any, zcut: float) -> float:
    """Mass left after soft drop with beta = 0."""
    nodes, _, children = _recluster(p4, 0)
    node = len(nodes) - 1
    while children[node, 0] >= 0:
        first, second = children[node]
        pt_first = np.hypot(nodes[first, 0], nodes[first, 1])
        pt_second = np.hypot(nodes[second, 0], nodes[second, 1])
        if min(pt_first, pt_second) > zcut * (pt_first + pt_second):
            break
        node = first if pt_first > pt_second else second
    px, py, pz, energy = nodes[node]
    return np.sqrt(max(energy**2 - px**2 - py**2 - pz**2, 0.0))


@numba.njit
def _substructure(p4: Any, offsets: Any, radius: float, zcut: float, n_tau: int) -> tuple[Any, Any]:
    """Soft-drop mass and N-subjettiness (https://arxiv.org/abs/1011.2268) of every jet."""
    jets = len(offsets) - 1
    masses, taus = np.zeros(jets), np.zeros((jets, n_tau))
    for jet in range(jets):
        members = p4[offsets[jet] : offsets[jet + 1]]
        n = len(members)
        masses[jet] = _softdrop_mass(members, zcut)
        nodes, angles, children = _recluster(members, 1)
        pt = np.hypot(members[:, 0], members[:, 1])
        for n_axes in range(1, min(n_tau, n) + 1):
            # The exclusive subjets: what there was before the last n_axes - 1 merges.
            stop = len(nodes) - (n_axes - 1)
            is_axis = np.ones(stop, np.bool_)
            for node in range(n, stop):
                is_axis[children[node, 0]] = is_axis[children[node, 1]] = False
            axes = angles[:stop][is_axis]
            for i in range(n):
                closest = np.inf
                for axis in range(len(axes)):
                    closest = min(closest, _distance2(angles[i], axes[axis]))
                taus[jet, n_axes - 1] += pt[i] * np.sqrt(closest)
        taus[jet] /= radius * pt.sum()
    return masses, taus


def add_substructure(jets: ak.Array, constituents: ak.Array) -> ak.Array:
    """Add msoftdrop, tau1 ... tau4 and nConstituents to jets of radius 0.8.

    Parameters
    ----------
    jets
        ``events * jets * {...}``
    constituents
        ``events * jets * var * {pt, eta, phi, mass}``
    """
    members = ak.flatten(constituents)
    sizes = ak.to_numpy(ak.num(members))
    columns = [ak.to_numpy(ak.flatten(members[axis])) for axis in ("pt", "eta", "phi", "mass")]
    p4 = np.stack(list(four_momentum(*columns).values()), axis=1)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    masses, taus = _substructure(p4, offsets, FATJET_RADIUS, SOFTDROP_ZCUT, N_SUBJETTINESS)
    added = {
        "msoftdrop": masses,
        **{f"tau{i + 1}": taus[:, i] for i in range(N_SUBJETTINESS)},
        "nConstituents": np.minimum(sizes, 255).astype(np.uint8),
    }
    for name, values in added.items():
        jets = ak.with_field(jets, ak.unflatten(values, ak.num(jets)), name)
    return jets


def generator_particles(particles: ak.Array) -> ak.Array:
    """Pick the partons, tops, W bosons and their decay products of the hard process.

    Of the tops and W bosons both the first copy and the last, which decays, are kept; mothers point
    to the nearest kept ancestor.

    Returns
    -------
    ak.Array
        ``events * var * {pt, eta, phi, mass, pdgId, status, statusFlags, genPartIdxMother}``
    """
    counts = ak.to_numpy(ak.num(particles))
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    flat = ak.flatten(particles)
    pdg_id, status = ak.to_numpy(flat.id), np.abs(ak.to_numpy(flat.status))
    # Row 0 of each event stands for the event as a whole and serves as "none".
    mother = starts + ak.to_numpy(flat.mother1)
    daughters = [starts + ak.to_numpy(flat[name]) for name in ("daughter1", "daughter2")]

    hard = (status >= 21) & (status <= 23)
    last_copy = (pdg_id[daughters[0]] != pdg_id) & (pdg_id[daughters[1]] != pdg_id)
    kept = hard | (np.isin(np.abs(pdg_id), (6, 24)) & last_copy & (status > 20))
    while np.any(skipped := (mother != starts) & ~kept[mother]):
        mother = np.where(skipped, mother[mother], mother)

    event = np.repeat(np.arange(len(counts)), counts)
    kept_counts = np.bincount(event[kept], minlength=len(counts))
    position = np.cumsum(kept) - 1 - (np.cumsum(kept_counts) - kept_counts)[event]
    mother_index = np.where(mother == starts, -1, position[mother])

    flags = (1 << IS_PROMPT) | (1 << FROM_HARD_PROCESS)
    flags = (
        flags | (hard << IS_HARD_PROCESS) | (hard << IS_FIRST_COPY) | (last_copy << IS_LAST_COPY)
    )
    momentum = [ak.to_numpy(flat.p[axis])[kept] for axis in ("px", "py", "pz")]
    pt, eta, phi = pt_eta_phi(*momentum)
    chosen = ak.zip(
        {
            "pt": pt,
            "eta": eta,
            "phi": phi,
            "mass": ak.to_numpy(flat.m)[kept],
            "pdgId": pdg_id[kept],
            "status": status[kept],
            "statusFlags": flags[kept].astype(np.uint16),
            "genPartIdxMother": mother_index[kept].astype(np.int16),
        }
    )
    return ak.unflatten(chosen, kept_counts)


MANTISSA_BITS = {"eta": 12, "phi": 12}  # all others: 10, as NanoAOD does


def truncate(values: np.ndarray, bits: int) -> np.ndarray:
    """Round float32 numbers to ``bits`` bits of mantissa, so that they compress well."""
    dropped = 23 - bits
    raw = np.asarray(values, np.float32).view(np.uint32)
    rounded = raw + np.uint32(1 << (dropped - 1))
    return (rounded & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)).view(np.float32)


def truncated(collection: ak.Array) -> ak.Array:
    """Truncate every floating-point field of ``events * var * {...}``."""
    counts = ak.num(collection)
    columns = {}
    for name in collection.fields:
        values = ak.to_numpy(ak.flatten(collection[name]))
        if values.dtype.kind == "f":
            values = truncate(values, MANTISSA_BITS.get(name, 10))
        columns[name] = ak.unflatten(values, counts)
    return ak.zip(columns)


def nanoaod(
    block: ak.Array, first_event: int, seed: int, rng: np.random.Generator
) -> dict[str, ak.Array]:
    """Make the branches of a block of Pythia events, numbered from ``first_event``.

    Luminosity blocks begin at a number of the seed's own, so that no two samples share an event.
    """
    candidates = detect(block.prt, rng)
    fatjets, members = find_jets(
        candidates, radius=FATJET_RADIUS, pt_min=FATJET_PT_MIN, eta_max=FATJET_ETA_MAX
    )
    jets, _ = find_jets(candidates, radius=JET_RADIUS, pt_min=JET_PT_MIN, eta_max=JET_ETA_MAX)

    # Candidates are stored jet after jet, so the link table simply counts.
    used = candidates[ak.flatten(members, axis=2)]
    sizes = ak.num(members, axis=2)
    constituents = ak.unflatten(ak.flatten(used), ak.flatten(sizes))
    constituents = ak.unflatten(constituents, ak.num(fatjets))
    jet_index = ak.flatten(ak.broadcast_arrays(ak.local_index(sizes), members)[0], axis=2)
    links = ak.zip({"jetIdx": jet_index, "pfCandIdx": ak.local_index(used, axis=1)})

    event = np.arange(first_event, first_event + len(block))
    return {
        "run": np.ones(len(block), np.uint32),
        "luminosityBlock": (10_000 * seed + (event - 1) // EVENTS_PER_LUMI_BLOCK).astype(np.uint32),
        "event": event.astype(np.uint64),
        "genWeight": ak.to_numpy(block.info.weights[:, 0]).astype(np.float32),
        "FatJet": truncated(add_substructure(fatjets, constituents)),
        "FatJetPFCand": ak.values_astype(links, np.int32),
        "PFCand": truncated(used),
        "Jet": truncated(jets),
        "GenPart": truncated(generator_particles(block.prt)),
    }


def generate(job: Job, path: Path) -> dict[str, Any]:
    """Write the file of one job, block by block, and return what was made.

    Parameters
    ----------
    job
        What to make.
    path
        Where to write it.

    Returns
    -------
    dict
        The job, the cross section in pb, the sum of weights, the numbers of jets and the versions.
    """
    pythia = start_pythia(job)
    rng = np.random.default_rng([job.seed, 1])
    sum_of_weights, n_fatjets, n_generated = 0.0, 0, 0
    title = f"{job.process.value}, {BEAM_ENERGY_GEV / 1000} TeV, seed {job.seed}"
    with uproot.recreate(path, compression=uproot.LZMA(9)) as file:
        for block in collide(pythia, job.events):
            branches = nanoaod(block, n_generated + 1, job.seed, rng)
            if "Events" not in file:
                file.mktree("Events", {k: _type(v) for k, v in branches.items()}, title=title)
            file["Events"].extend(branches)
            n_generated += len(block)
            sum_of_weights += float(np.sum(branches["genWeight"], dtype=np.float64))
            n_fatjets += int(ak.sum(ak.num(branches["FatJet"])))
        runs = {
            "run": np.uint32(1),
            "genEventCount": np.int64(n_generated),
            "genEventSumw": sum_of_weights,
        }
        file["Runs"] = {name: np.array([value]) for name, value in runs.items()}
    return {
        **asdict(job),
        "process": job.process.value,
        "fatjets": n_fatjets,
        "cross_section_pb": pythia.infoPython().sigmaGen() * 1e9,
        "sum_of_weights": sum_of_weights,
        "bytes": path.stat().st_size,
        "sha256_of_arrays": checksum(path),
    }


def _type(branch: Any) -> Any:
    """Type of a branch for uproot: a numpy dtype, or awkward's ``var * {...}``."""
    return branch.dtype if isinstance(branch, np.ndarray) else branch.type.content


def checksum(path: Path) -> str:
    """Hash the content of all branches; the bytes of the file itself hold its date."""
    digest = hashlib.sha256()
    with uproot.open(path) as file:
        for name, branch in sorted(file["Events"].items()):
            values = branch.array()
            digest.update(f"{name}: {values.type}".encode())
            digest.update(ak.to_numpy(ak.flatten(values, axis=None)).tobytes())
    return digest.hexdigest()


def generate_sample(folder: Path) -> None:
    """Write every file of the sample, and ``sample.json`` that says how it was made."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = ("pythia8mc", "fastjet", "awkward", "numpy", "uproot")
    record = {
        "command": "python examples/simulation/generate.py src/sonic_coffea/demo/data",
        "beam_energy_gev": BEAM_ENERGY_GEV,
        "versions": {name: version(name) for name in packages},
        "files": {name: generate(job, folder / name) for name, job in SAMPLE.items()},
    }
    (folder / "sample.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    generate_sample(Path(sys.argv[1]))
