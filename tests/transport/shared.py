"""Large tensors, certificates, and a model of fake servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import trustme

import sonic_coffea as sonic
from sonic_coffea.pool import Pool
from sonic_coffea.server import Served
from sonic_coffea.testing import FakeModel

# What a fake server has, and what it is asked.
MODEL = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
SERVED = {"m": FakeModel.of(MODEL)}
EVENTS = ak.Array([[{"pt": 0.0}], []])


def score(pool: Pool) -> None:
    """Score these events, and compare the scores."""
    assert MODEL(EVENTS, pool=pool).top.tolist() == [[0.5], []]


# Of two inputs of different types and widths, in the time that some work takes for each batch.
_FUNCTION = """
import os
import time
import numpy as np

def {name}(x, n):
    {work}
    return {{"y": np.stack([x.sum(axis=1), x[:, 0] * n[:, 0]], axis=1).astype("float32")}}
"""
_TENSORS: dict[str, Any] = {
    "inputs": {"x": ("float32", ["N", 256]), "n": ("int64", ["N", 3])},
    "outputs": {"y": ("float32", ["N", 2])},
}


def model(name: str = "one") -> sonic.Model:
    return sonic.Model(
        name,
        {"x": sonic.Dense("x", (256,)), "n": sonic.Dense("n", (3,), dtype="int64")},
        {"y": ["total", "product"]},
    )


def objects(rows: int, seed: int = 1) -> ak.Array:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 100, (rows, 256)).astype(np.float32)
    return ak.zip({"x": x, "n": rng.integers(0, 100, (rows, 3))}, depth_limit=1)


def check(scores: ak.Array, sent: ak.Array) -> None:
    x, n = ak.to_numpy(sent.x), ak.to_numpy(sent.n)
    np.testing.assert_array_equal(scores.total, x.sum(axis=1))
    np.testing.assert_array_equal(scores["product"], x[:, 0] * n[:, 0])


def write_models(
    repository: Path,
    *names: str,
    work: str = "time.sleep(0.01)",
    rows: int = 2048,
    dynamic_batching: Any = False,
) -> None:
    """Build models, each of which works for a while on each batch."""
    for name in names:
        code = repository.parent / f"{name}.py"
        code.write_text(_FUNCTION.format(name=name, work=work))
        sonic.build_repository(
            repository,
            {name: Served(f"{code}:{name}", **_TENSORS)},
            max_batch_size=rows,
            dynamic_batching=dynamic_batching,
        )


def write_certificate(folder: Path, issued: trustme.LeafCert, name: str) -> tuple[Path, Path]:
    """Write a certificate and its key; return their paths."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    return cert, key
