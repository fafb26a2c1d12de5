"""Train the two top taggers of the demo and export them to ONNX.

``toptagger`` is a small ParticleNet (https://arxiv.org/abs/1902.08570) on a jet's constituents,
``substructure`` a perceptron on nine FatJet branches for files that hold no constituents. The
training jets are generated when they are not there yet; none of them is in the package's sample::

    python train_toptagger.py --data /scratch/toptagger
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import awkward as ak
import numpy as np
import onnx
import onnxruntime
import torch
import typer
import uproot
from rich.console import Console
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

import sonic_coffea as sonic
from sonic_coffea.demo.features import (
    CONSTITUENT_FEATURES,
    SUBSTRUCTURE_FIELDS,
    constituent_features,
    is_merged_top,
)
from sonic_coffea.demo.samples import DATA

sys.path.insert(0, str(Path(__file__).parents[1] / "simulation"))
from generate import SAMPLE, Job, Process, generate

LENGTH = 64  # constituents that the network sees, the hardest ones
NEIGHBOURS = 8
LABELS = ("label_QCD", "label_Top")
TRAINING_BATCH, SCORING_BATCH = 128, 512
RATE = 2e-3
OPSET = 18

SEEDS = {
    "training": {Process.TTBAR: range(2001, 2008), Process.QCD: range(3001, 3004)},
    "validation": {Process.TTBAR: range(2008, 2009), Process.QCD: range(3004, 3005)},
    "test": {Process.TTBAR: range(2009, 2010), Process.QCD: range(3005, 3006)},
}
EVENTS = {Process.TTBAR: 6000, Process.QCD: 5000}  # per seed

FEATURE_CLIP = 5.0
NOT_SCALED = ("part_charge", "part_is")
POINTS = ("part_deta", "part_dphi")
PT_BINS = np.array([200, 300, 400, 500, 600, 800, 1000, 1500, np.inf])

console = Console()


@dataclass(frozen=True, slots=True)
class Jets:
    """Jets of one or more files, row by row.

    Attributes
    ----------
    features
        ``jets * var * {part_deta, ...}``
    substructure
        ``jets * 9`` of `SUBSTRUCTURE_FIELDS`
    is_top
        Truth, ``jets``.
    weight
        Training weight, ``jets``.
    """

    features: ak.Array
    substructure: np.ndarray
    is_top: np.ndarray
    weight: np.ndarray


def read_jets(path: Path, process: Process) -> Jets:
    """Read the merged tops of a ttbar file, or all jets of a QCD file."""
    with uproot.open(path) as file:
        branches = file["Events"].arrays()

    def collection(name: str) -> ak.Array:
        fields = [field for field in branches.fields if field.startswith(f"{name}_")]
        return ak.zip({field.removeprefix(f"{name}_"): branches[field] for field in fields})

    jets = collection("FatJet")
    names = ("FatJet", "FatJetPFCand", "PFCand")
    constituents = sonic.constituents(ak.zip({n: collection(n) for n in names}, depth_limit=1))
    features = ak.flatten(constituent_features(jets, constituents))
    is_top = ak.to_numpy(ak.flatten(is_merged_top(jets, collection("GenPart"))))
    chosen = is_top if process is Process.TTBAR else ~is_top
    columns = [ak.to_numpy(ak.flatten(jets[field])) for field in SUBSTRUCTURE_FIELDS]
    substructure = np.stack(columns, axis=1).astype(np.float32)
    return Jets(features[chosen], substructure[chosen], is_top[chosen], np.ones(np.sum(chosen)))


def join(parts: list[Jets]) -> Jets:
    """Put jets together and weight QCD to the pt spectrum of the tops.

    Without the weights the networks would learn the spectra of two generator settings.
    """
    substructure = np.concatenate([part.substructure for part in parts])
    is_top = np.concatenate([part.is_top for part in parts])
    pt_bin = np.digitize(substructure[:, 0], PT_BINS)
    tops = np.bincount(pt_bin[is_top], minlength=len(PT_BINS) + 1)
    others = np.bincount(pt_bin[~is_top], minlength=len(PT_BINS) + 1)
    ratio = np.clip(tops / np.maximum(others, 1), 0.1, 10)
    return Jets(
        features=ak.concatenate([part.features for part in parts]),
        substructure=substructure,
        is_top=is_top,
        weight=np.where(is_top, 1.0, ratio[pt_bin]),
    )


def load(data: Path) -> dict[str, Jets]:
    """Read the training, validation and test jets; generate the files that are missing."""
    data.mkdir(parents=True, exist_ok=True)
    sets = {}
    for name, seeds in SEEDS.items():
        parts = []
        for process, seed in ((p, seed) for p in Process for seed in seeds[p]):
            path = data / f"{process.value}_{seed}.root"
            if not path.exists():
                job = Job(process=process, events=EVENTS[process], seed=seed)
                partial = path.with_suffix(".partial")
                generate(job, partial)
                partial.rename(path)
            parts.append(read_jets(path, process))
        sets[name] = join(parts)
    return sets


def make_preprocessing(features: ak.Array) -> dict[str, Any]:
    """Choose centre and scale of each feature, in the format of weaver and CMSSW.

    A value enters as ``clip((value - median) * norm_factor, lower_bound, upper_bound)``.
    """

    def info(median: float, norm_factor: float, bound: float) -> dict[str, float]:
        scale = {"median": median, "norm_factor": norm_factor, "replace_inf_value": 0}
        return {**scale, "lower_bound": -bound, "upper_bound": bound, "pad": 0}

    def scaled(name: str) -> dict[str, float]:
        if name.startswith(NOT_SCALED):
            return info(0.0, 1.0, FEATURE_CLIP)
        low, median, high = np.percentile(ak.to_numpy(ak.flatten(features[name])), (16, 50, 84))
        return info(round(float(median), 4), round(float(2 / (high - low)), 4), FEATURE_CLIP)

    as_it_is = info(0, 1, 1e32)
    inputs = {
        "pf_points": dict.fromkeys(POINTS, as_it_is),
        "pf_features": {name: scaled(name) for name in CONSTITUENT_FEATURES},
        "pf_mask": {"part_mask": as_it_is},
    }
    return {
        "output_names": list(LABELS),
        "input_names": list(inputs),
        **{
            name: {"var_names": list(infos), "var_infos": infos, "var_length": LENGTH}
            for name, infos in inputs.items()
        },
    }


def nearest(coordinates: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the neighbours of each constituent, itself included.

    Parameters
    ----------
    coordinates
        ``[N, L, D]``
    mask
        ``[N, L, 1]``

    Returns
    -------
    rows
        ``[N * L * NEIGHBOURS]``: rows of a table ``[N * L, ...]``.
    exists
        ``[N, L, NEIGHBOURS, 1]``: whether there is such a constituent.
    """
    batch, length, _ = coordinates.shape
    square = (coordinates**2).sum(dim=2, keepdim=True)
    distance2 = square + square.transpose(1, 2) - 2 * coordinates @ coordinates.transpose(1, 2)
    distance2 = distance2 + 1e6 * (1 - mask.transpose(1, 2))
    index = distance2.topk(NEIGHBOURS, dim=2, largest=False).indices
    rows = (index + length * torch.arange(batch, device=index.device)[:, None, None]).reshape(-1)
    exists = mask.reshape(-1, 1).index_select(0, rows).reshape(batch, length, NEIGHBOURS, 1)
    return rows, exists


class EdgeConvolution(nn.Module):
    """Average a learned message over the edges to a constituent's neighbours.

    The first layer is linear in the two ends of an edge, so it acts before the gather.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.centre = nn.Linear(inputs, outputs)
        self.neighbour = nn.Linear(inputs, outputs, bias=False)
        self.message = nn.Linear(outputs, outputs)
        self.shortcut = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, coordinates: Tensor, mask: Tensor) -> Tensor:
        """Return ``[N, L, outputs]``; neighbours are those near in ``coordinates``."""
        batch, length, _ = x.shape
        rows, exists = nearest(coordinates, mask)
        sent = self.neighbour(x).reshape(batch * length, -1).index_select(0, rows)
        sent = sent.reshape(batch, length, NEIGHBOURS, -1)
        message = functional.relu(self.centre(x)[:, :, None, :] + sent)
        message = functional.relu(self.message(message)) * exists
        mean = message.sum(dim=2) / exists.sum(dim=2).clamp(min=1)
        return functional.relu(self.shortcut(x) + mean) * mask


class ParticleNet(nn.Module):
    """Score jets from their constituents.

    Only sums and maxima over existing constituents reach the result, and nothing is shared between
    the jets of a batch: neither padding nor company changes a score. An empty jet has one, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(len(CONSTITUENT_FEATURES), 32)
        self.blocks = nn.ModuleList([EdgeConvolution(32, 32), EdgeConvolution(32, 48)])
        self.head = nn.Sequential(
            nn.Linear(2 * 48 + 1, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, len(LABELS))
        )

    def forward(self, pf_points: Tensor, pf_features: Tensor, pf_mask: Tensor) -> Tensor:
        """Return logits ``[N, 2]`` from ``[N, 2, L]``, ``[N, F, L]`` and ``[N, 1, L]``."""
        mask = pf_mask.transpose(1, 2)
        coordinates = pf_points.transpose(1, 2)
        x = functional.relu(self.embed(pf_features.transpose(1, 2))) * mask
        for block in self.blocks:
            x = block(x, coordinates, mask)
            coordinates = x
        count = mask.sum(dim=1)
        mean, highest = x.sum(dim=1) / count.clamp(min=1), x.amax(dim=1)
        return self.head(torch.cat([mean, highest, count / LENGTH], dim=1))


class Substructure(nn.Module):
    """Score jets from `SUBSTRUCTURE_FIELDS` as they are in the file.

    Ratios and scaling are part of the network. A soft-drop mass or an N-subjettiness of zero or -1,
    as CMS writes for jets where it is undefined, gives a finite score.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(9))
        self.register_buffer("scale", torch.ones(9))
        self.layers = nn.Sequential(
            nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, len(LABELS))
        )  # fmt: skip

    def derive(self, features: Tensor) -> Tensor:
        """Turn branches into bounded, dimensionless numbers, ``[N, 9]``."""
        pt, eta, mass, msoftdrop, tau1, tau2, tau3, tau4, count = features.unbind(dim=1)
        derived = [
            pt.clamp(min=1).log(),
            eta.abs(),
            mass.clamp(min=1).log(),
            msoftdrop.clamp(min=1).log(),
            tau1.clamp(0.0, 1.0),
            *(
                (more / fewer.clamp(min=1e-4)).clamp(0.0, 1.5)
                for fewer, more in ((tau1, tau2), (tau2, tau3), (tau3, tau4))
            ),
            count.clamp(min=1).log(),
        ]
        return torch.stack(derived, dim=1)

    def fit_scale(self, features: Tensor) -> None:
        """Choose centre and scale from training jets."""
        derived = self.derive(features)
        self.centre, self.scale = derived.mean(dim=0), 1 / derived.std(dim=0)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``[N, 2]`` from ``[N, 9]``."""
        return self.layers((self.derive(features) - self.centre) * self.scale)


def train(
    network: nn.Module, inputs: dict[str, dict[str, Tensor]], jets: dict[str, Jets], epochs: int
) -> int:
    """Train with AdamW and a one-cycle schedule; keep the epoch with the best validation AUC.

    Returns
    -------
    int
        That epoch, counted from 1.
    """
    label = torch.from_numpy(jets["training"].is_top.astype(np.int64))
    weight = torch.from_numpy(jets["training"].weight.astype(np.float32))
    steps = len(label) // TRAINING_BATCH
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, epochs * steps)
    best_auc, best_epoch, best_state = 0.0, 0, network.state_dict()
    for epoch in range(1, epochs + 1):
        start, total = time.perf_counter(), 0.0
        network.train()
        order = torch.randperm(len(label))
        for step in range(steps):
            rows = order[step * TRAINING_BATCH : (step + 1) * TRAINING_BATCH]
            logits = network(*(tensor[rows] for tensor in inputs["training"].values()))
            losses = functional.cross_entropy(logits, label[rows], reduction="none")
            loss = (losses * weight[rows]).sum() / weight[rows].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() / steps
        scores = torch_scores(network, inputs["validation"])
        auc = roc_auc_score(jets["validation"].is_top, scores)
        took_s = time.perf_counter() - start
        console.print(f"epoch {epoch:2d}: loss {total:.4f}, AUC {auc:.4f}, {took_s:.0f} s")
        if auc > best_auc:
            best_auc, best_epoch = auc, epoch
            best_state = {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(best_state)
    return best_epoch


@torch.no_grad()
def torch_scores(network: nn.Module, inputs: dict[str, Tensor]) -> np.ndarray:
    """Probability of a top for every row."""
    network.eval()
    batches = zip(*(tensor.split(2048) for tensor in inputs.values()), strict=True)
    return np.concatenate([network(*batch).softmax(dim=1)[:, 1].numpy() for batch in batches])


class Softmax(nn.Module):
    """A network whose output is probabilities."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return probabilities ``[N, 2]``."""
        return self.network(*inputs).softmax(dim=1)


def export(network: nn.Module, inputs: dict[str, Tensor], path: Path) -> None:
    """Write a network with its softmax as ONNX, for any number of jets (and of constituents)."""
    axes = {0: torch.export.Dim("jets"), 2: torch.export.Dim("constituents", min=NEIGHBOURS)}
    example = tuple(tensor[:3] for tensor in inputs.values())
    shape = {axis: dim for axis, dim in axes.items() if axis < example[0].ndim}
    program = torch.onnx.export(
        Softmax(network).eval(),
        example,
        input_names=list(inputs),
        output_names=["softmax"],
        dynamic_shapes=(tuple(shape for _ in example),),
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    model = program.model_proto
    for part in (
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
    ):
        del part.metadata_props[:]  # traces of the exporting program, paths included
        part.ClearField("doc_string")
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def onnx_scores(path: Path, inputs: dict[str, Tensor]) -> tuple[np.ndarray, float]:
    """Probability of a top for every row from the exported file, and rows/s on one core."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    rows = len(next(iter(arrays.values())))
    start, parts = time.perf_counter(), []
    for first in range(0, rows, SCORING_BATCH):
        batch = {name: array[first : first + SCORING_BATCH] for name, array in arrays.items()}
        parts.append(session.run(["softmax"], batch)[0][:, 1])
    return np.concatenate(parts), rows / (time.perf_counter() - start)


def evaluate(path: Path, inputs: dict[str, Tensor], jets: Jets) -> dict[str, float]:
    """Measure an exported network on jets that it has not seen."""
    scores, rate = onnx_scores(path, inputs)

    def area(weights: np.ndarray | None) -> float:
        return round(float(roc_auc_score(jets.is_top, scores, sample_weight=weights)), 4)

    return {
        "auc": area(None),
        "auc_pt_weighted": area(jets.weight),
        "jets": len(scores),
        "tops": int(jets.is_top.sum()),
        "jets_per_s_one_core": round(rate),
    }


def main(
    data: Annotated[Path, typer.Option(help="Folder of the generated jets; filled when empty.")],
    output: Annotated[Path, typer.Option(help="Folder for the networks.")] = DATA,
    epochs: Annotated[int, typer.Option(min=1, help="Passes through the training jets.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of the training itself.")] = 1,
) -> None:
    """Train, export and test the two networks."""
    jets = load(data)
    packaged = [read_jets(DATA / name, job.process) for name, job in SAMPLE.items()]
    jets["sample"] = join(packaged)
    preprocessing = make_preprocessing(jets["training"].features)
    torch.manual_seed(seed)

    networks = {"toptagger": ParticleNet(), "substructure": Substructure()}
    inputs: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in networks}
    for name, part in jets.items():
        tensors = sonic.Model.from_weaver("toptagger", preprocessing).pack(part.features)
        inputs["toptagger"][name] = {key: torch.from_numpy(x) for key, x in tensors.items()}
        inputs["substructure"][name] = {"features": torch.from_numpy(part.substructure)}
    networks["substructure"].fit_scale(inputs["substructure"]["training"]["features"])

    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seed": seed,
        "sample_seeds": {
            name: {process.value: list(seeds) for process, seeds in split.items()}
            for name, split in SEEDS.items()
        },
        "jets": {
            name: {"top": int(part.is_top.sum()), "QCD": int((~part.is_top).sum())}
            for name, part in jets.items()
        },
        "versions": {
            name: version(name) for name in ("torch", "onnx", "onnxruntime", "pythia8mc", "fastjet")
        },
        "networks": {},
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, network in networks.items():
        console.rule(name)
        best = train(network, inputs[name], jets, epochs)
        path = output / f"{name}.onnx"
        export(network, inputs[name]["test"], path)
        record["networks"][name] = {
            "epochs": epochs,
            "best_epoch": best,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "bytes": path.stat().st_size,
            "test": evaluate(path, inputs[name]["test"], jets["test"]),
            "sample": evaluate(path, inputs[name]["sample"], jets["sample"]),
        }
    (output / "toptagger.preprocess.json").write_text(json.dumps(preprocessing, indent=1) + "\n")
    (output / "toptagger.training.json").write_text(json.dumps(record, indent=2) + "\n")
    console.print_json(data=record)


if __name__ == "__main__":
    typer.run(main)
