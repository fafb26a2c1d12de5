"""The networks of the gallery: small, but built as the real ones are (torch)."""

import torch
from torch import nn


class PairBias(nn.Module):
    """What ParticleTransformer tells its attention of each pair: kt, z, deltaR, mass; in logs."""

    def __init__(self, heads):
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(4, 16, 1), nn.GELU(), nn.Conv2d(16, heads, 1))

    def forward(self, p):
        px, py, pz, e = p.unbind(1)
        pt = torch.sqrt((px * px + py * py).clamp(min=1e-4))
        rapidity = 0.5 * torch.log(
            (e + pz + 1e-6).clamp(min=1e-6) / (e - pz + 1e-6).clamp(min=1e-6)
        )
        unit = torch.stack([px, py], 1) / pt[:, None]
        cos = torch.einsum("bci,bcj->bij", unit, unit).clamp(-1 + 1e-6, 1 - 1e-6)
        dphi2 = 2.0 * (1.0 - cos)
        delta2 = (rapidity[:, :, None] - rapidity[:, None, :]) ** 2 + dphi2 + 1e-6
        least = torch.minimum(pt[:, :, None], pt[:, None, :])
        z = least / (pt[:, :, None] + pt[:, None, :] + 1e-6)
        total = p[:, :, :, None] + p[:, :, None, :]
        mass2 = total[:, 3] ** 2 - (total[:, :3] ** 2).sum(1)
        pair = [torch.log(least * torch.sqrt(delta2) + 1e-6), torch.log(z + 1e-6)]
        pair += [0.5 * torch.log(delta2), torch.log(mass2.clamp(min=1e-4))]
        return self.embed(torch.stack(pair, 1))


class Block(nn.Module):
    """Attention with a bias for each pair, and a feed-forward network, both beside a shortcut."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def split(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x, context, bias):
        keys, values = self.kv(self.before(context)).chunk(2, -1)
        q, k, v = self.split(self.q(self.before(x))), self.split(keys), self.split(values)
        weights = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + bias, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        return x + self.feed(self.after(x))


class ParticleTransformer(nn.Module):
    """https://arxiv.org/abs/2202.03772, with a second head that regresses the mass."""

    def __init__(self, features=13, width=32, heads=4):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width))
        self.pairs = PairBias(heads)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.classes = nn.ModuleList([Block(width, heads)])
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.head, self.mass = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, pf_features, pf_vectors, pf_mask):
        x = self.embed(pf_features.transpose(1, 2))
        hidden = (1.0 - pf_mask[:, :, None, :]) * -1e9
        bias = self.pairs(pf_vectors) + hidden
        for block in self.blocks:
            x = block(x, x, bias)
        token = self.token.expand(x.shape[0], -1, -1)
        for block in self.classes:
            token = block(token, x, hidden)
        return torch.softmax(self.head(token[:, 0]), -1), 100.0 * torch.exp(self.mass(token[:, 0]))


def tau_images():
    """Dense grids, as those of DeepTau, through convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 32), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(-1),
    )  # fmt: skip


class DeepMET(nn.Module):
    """A weight for each candidate (https://arxiv.org/abs/2509.12012)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 32),
            nn.ReLU(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 1),
            nn.Sigmoid(),
        )

    def forward(self, candidates):
        return self.layers(candidates.transpose(1, 2))


def facile():
    """Return a tiny network for a hit (https://arxiv.org/abs/2007.10359)."""
    return nn.Sequential(
        nn.Linear(11, 36), nn.ReLU(), nn.Linear(36, 11), nn.ReLU(), nn.Linear(11, 1), nn.ReLU()
    )


def michel():
    """48 by 48 wires and ticks around a hit, three classes (https://arxiv.org/abs/2009.04509)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 144, 32), nn.ReLU(), nn.Linear(32, 3), nn.Softmax(-1),
    )  # fmt: skip


class GravNet(nn.Module):
    """GravNet with the outputs of object condensation (1902.07987, 2002.03605), on flat hits."""

    def __init__(self, width=32, near=8):
        super().__init__()
        self.near = near
        self.first = nn.Sequential(nn.Linear(4, width), nn.ReLU())
        self.space = nn.ModuleList(nn.Linear(width, 3) for _ in range(2))
        self.message = nn.ModuleList(nn.Linear(width, 16) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(width + 32, width) for _ in range(2))
        self.beta, self.place = nn.Linear(width, 1), nn.Linear(width + 4, 2)

    def forward(self, hits, row_splits):
        number = torch.arange(hits.shape[0])
        event = (number[:, None] >= row_splits[None, 1:]).sum(1)
        apart = (event[:, None] != event[None, :]) * 1e6
        x = self.first(hits)
        for space, message, mix in zip(self.space, self.message, self.mix, strict=True):
            s, m = space(x), message(x)
            distance = ((s[:, None] - s[None]) ** 2).sum(-1) + apart
            nearest, index = torch.topk(-distance, self.near, dim=1)
            heard = m[index] * torch.exp(10.0 * nearest.clamp(min=-1e5))[:, :, None]
            x = torch.relu(mix(torch.cat([x, heard.mean(1), heard.amax(1)], 1)))
        return torch.sigmoid(self.beta(x)), self.place(torch.cat([x, hits], 1))


class MLPF(nn.Module):
    """As machine-learned particle flow (2101.08578): a class and a momentum for each element."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.near = nn.Parameter(torch.tensor([5.0, 50.0, 500.0, 0.5]))
        self.kinds, self.momentum = nn.Linear(width + 6, 4), nn.Linear(width + 6, 1)

    def forward(self, elements, row_splits):
        number = torch.arange(elements.shape[0])
        event = (number[:, None] >= row_splits[None, 1:]).sum(1)
        place = elements[:, 4:6]
        far = ((place[:, None] - place[None]) ** 2).sum(-1)
        apart = (event[:, None] != event[None, :]) * -1e9
        bias = apart[None, None] - self.near[None, :, None, None] * far[None, None]
        x = self.first(elements)[None]
        for block in self.blocks:
            x = block(x, x, bias)
        x = torch.cat([x[0], elements], 1)
        return torch.softmax(self.kinds(x), 1), elements[:, 3:4] + self.momentum(x)


class GraphAttention(nn.Module):
    """Graph attention (https://arxiv.org/abs/1710.10903) over several graphs at once."""

    def __init__(self, features=13, width=32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(features, width), nn.Linear(width, width)])
        self.scores = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(2))
        self.head = nn.Linear(width, 2)

    def forward(self, nodes, node_splits, edges, edge_splits):
        number = torch.arange(edges.shape[0])
        graph = (number[:, None] >= edge_splits[None, 1:]).sum(1)
        source, target = (edges + node_splits[graph][:, None]).unbind(1)
        x = nodes
        for layer, score in zip(self.layers, self.scores, strict=True):
            x = layer(x)
            weight = score(torch.cat([x[source], x[target]], 1))
            weight = torch.exp(torch.nn.functional.leaky_relu(weight, 0.2).clamp(-20, 20))
            total = torch.zeros_like(x[:, :1]).index_add(0, target, weight)
            heard = torch.zeros_like(x).index_add(0, target, weight * x[source])
            x = torch.relu(heard / (total + 1e-9) + x)
        place = torch.arange(nodes.shape[0])
        owner = (place[:, None] >= node_splits[None, 1:]).sum(1)
        blank = torch.zeros_like(node_splits[1:], dtype=torch.float32)
        count = blank.index_add(0, owner, torch.ones_like(x[:, 0]))
        pooled = torch.zeros_like(blank[:, None] * x[:1]).index_add(0, owner, x)
        return torch.softmax(self.head(pooled / count.clamp(min=1)[:, None]), -1)


class Bottleneck(nn.Module):
    """The block of which ResNet-50 has sixteen."""

    def __init__(self, into, width, stride):
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = into == out and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(self.path(x) + self.skip(x))


def resnet50(width=8):
    """ResNet-50 (https://arxiv.org/abs/1512.03385), an eighth as wide."""
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    into = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            layers.append(Bottleneck(into, width * 2**stage, stride))
            into = 4 * width * 2**stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 2), nn.Softmax(-1)]
    return nn.Sequential(*layers)
