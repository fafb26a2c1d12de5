"""The networks of the gallery: small, but built as the real ones are (torch)."""

import torch
from torch import nn


def tau_images():
    """Dense grids, as those of DeepTau, through convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 32), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(-1),
    )  # fmt: skip


def facile():
    """Return a tiny network for a hit (https://arxiv.org/abs/2007.10359)."""
    return nn.Sequential(
        nn.Linear(11, 36), nn.ReLU(), nn.Linear(36, 11), nn.ReLU(), nn.Linear(11, 1), nn.ReLU()
    )


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
