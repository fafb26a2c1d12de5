"""Train the gallery's networks again, on the package's sample and on simulated data: minutes.

python train.py [name ...]        # needs the group training, and xgboost for event_classifier
"""

import json
import sys
import time
from pathlib import Path

import awkward as ak
import networks
import numpy as np
import onnx
import sample
import torch
import toys
from torch.nn import functional as f

HERE = Path(__file__).parent / "networks"


def fit(net, data, loss, epochs, batch=128, rate=2e-3):
    """Train, and return the network for use."""
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    n = len(data[0])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * (n // batch + 1))
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(n).split(batch):
            optimizer.zero_grad()
            loss(net, *(tensor[rows] for tensor in data)).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def export(name, net, inputs, outputs, free):
    """Write an ONNX file; ``free`` names the axes of any length, by input."""
    shapes = {
        key: {axis: torch.export.Dim(n) for axis, n in axes.items()} for key, axes in free.items()
    }
    program = torch.onnx.export(
        net, tuple(inputs.values()), dynamo=True, opset_version=18,
        input_names=list(inputs), output_names=outputs, verbose=False,
        dynamic_shapes=tuple(shapes[key] for key in inputs),
    )  # fmt: skip
    program.save(HERE / f"{name}.onnx", external_data=False)
    strip(HERE / f"{name}.onnx")


def strip(path):
    """Leave out what the exporter notes of this machine: where each line of code is."""
    model = onnx.load(path)
    parts = [model, model.graph, *model.graph.node, *model.graph.value_info, *model.functions]
    parts += [*model.graph.input, *model.graph.output, *model.graph.initializer]
    parts += [node for function in model.functions for node in function.node]
    for part in parts:
        part.doc_string = ""
        del part.metadata_props[:]
    onnx.save(model, path)


def jets(number):
    """Return a set of jets, and which of them are of a top quark."""
    records = sample.jets(number)
    return records, torch.tensor(ak.to_numpy(records.is_top).astype(np.int64))


def tau_images():
    records, top = jets(1)
    images = torch.tensor(sample.grids(records))
    net = fit(networks.tau_images(), (images, top), classes, epochs=10)
    export("tau_images", net, {"grid": images[:9]}, ["scores"], {"grid": {0: "rows"}})


def classes(net, x, y):
    return f.nll_loss(torch.log(net(x) + 1e-6), y)


def facile():
    hits = ak.flatten(toys.pulses(150, 1))
    names = ["ieta", "depth", "gain", *(f"s{i}" for i in range(8))]
    x = torch.tensor(np.stack([ak.to_numpy(hits[n]) for n in names], 1))
    scale = torch.tensor([0.05, 0.2, 1.0, *([0.1] * 8)])
    y = torch.tensor(ak.to_numpy(hits.energy))[:, None]
    net = networks.facile()
    net = fit(net, (x * scale, y), lambda n, x, y: (n(x) - y).abs().mean(), epochs=20, batch=512)
    with torch.no_grad():
        net[0].weight *= scale
    export("facile", net, {"hits": x[:9]}, ["energy"], {"hits": {0: "rows"}})


def gravnet():
    hits = toys.showers(700, 1)
    events = [
        torch.tensor(np.stack([ak.to_numpy(e[n]) for n in ("x", "y", "z", "energy")], 1))
        for e in hits
    ]
    showers = [torch.tensor(ak.to_numpy(e.shower).astype(np.int64)) for e in hits]
    net = networks.GravNet()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    net.train()
    for _ in range(4):
        for i in torch.randperm(len(events)).split(8):
            x = torch.cat([events[j] for j in i])
            counts = torch.tensor([len(events[j]) for j in i])
            splits = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
            beta, place = net(x, splits)
            total = torch.zeros(())
            for j, a, b in zip(i, splits[:-1], splits[1:], strict=True):
                total = total + condensation(beta[a:b, 0], place[a:b], showers[j])
            optimizer.zero_grad()
            (total / len(i)).backward()
            optimizer.step()
    net.eval()
    inputs = {"hits": events[0], "row_splits": torch.tensor([0, 20, len(events[0])])}
    export("gravnet", net, inputs, ["beta", "place"],
           {"hits": {0: "hits"}, "row_splits": {0: "splits"}})  # fmt: skip


def condensation(beta, place, shower):
    """Return object condensation's loss: charged hits draw their own, and push others away."""
    charge = torch.atanh(beta.clamp(max=0.999)) ** 2 + 0.1
    loss = torch.zeros(())
    for label in shower.unique():
        own = shower == label
        centre = torch.argmax(charge * own)
        distance = ((place - place[centre]) ** 2).sum(1)
        pull = (distance[own] * charge[own]).mean()
        push = ((1.0 - torch.sqrt(distance + 1e-9)).clamp(min=0) * charge)[~own]
        moved = charge[centre] * (pull + (push.mean() if len(push) else 0.0))
        loss = loss + moved + (1 - beta[own].max())
    return loss


def fixed_point():
    """Train a perceptron, and round it to 16 bits, 10 of them behind the point."""
    records, top = jets(1)
    from fixed_point import FIELDS

    x = torch.tensor(np.stack([ak.to_numpy(records[n]) for n in FIELDS], 1)) / 512.0
    net = torch.nn.Sequential(
        torch.nn.Linear(len(FIELDS), 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    )
    net = fit(net, (x, top), lambda n, x, y: f.cross_entropy(n(x), y), epochs=20, rate=1e-2)
    whole = {k: np.round(v.numpy() * 1024).astype(np.int16) for k, v in net.state_dict().items()}
    np.savez(HERE / "fixed_point.npz", **{k.replace(".", "_"): v for k, v in whole.items()})


def event_classifier():
    """Train a boosted forest for each fold of events, on those of the others."""
    import xgboost
    from event_classifier import FEATURES, FOLDS, fold, objects

    records = objects(1)
    x, y = FEATURES.pack(records), ak.to_numpy(records.is_top)
    for number in range(1, FOLDS + 1):
        others = fold(records) != number
        rows = xgboost.DMatrix(x[others], y[others])
        options = {"max_depth": 3, "eta": 0.2, "objective": "binary:logistic"}
        forest = xgboost.train(options, rows, 40)
        forest.save_model(HERE / f"event_classifier_{number}.ubj")


TRAINED = (tau_images, facile, gravnet, fixed_point, event_classifier)

if __name__ == "__main__":
    torch.manual_seed(1)
    HERE.mkdir(exist_ok=True)
    seconds = {}
    for train in TRAINED:
        if len(sys.argv) == 1 or train.__name__ in sys.argv:
            begun = time.perf_counter()
            train()
            seconds[train.__name__] = round(time.perf_counter() - begun, 1)
            print(train.__name__, seconds[train.__name__], "s", flush=True)
    print(json.dumps({"torch": torch.__version__, "seconds": seconds}))
