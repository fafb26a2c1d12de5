"""Options of commands do what they say."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import awkward as ak
import grpc
import pytest
import uproot
from tests.commands import run
from tests.ports import held_port

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = DATA / "QCD_1.root"
DECLARATION = {"model": "m", "inputs": {"x": {"layout": "Row", "fields": ["pt"]}}}
REFUSED = grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape"


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Answers with what is sent."""
    model = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
    with FakeServer({"m": FakeModel.of(model, lambda inputs: {"y": inputs["x"]})}) as running:
        yield running


def score(fake: FakeServer, folder: Path, *more: str) -> tuple[dict[str, Any], Any]:
    declared = {**DECLARATION, "outputs": {"y": ["top"]}}
    (folder / "m.yaml").write_text(json.dumps(declared))  # JSON is YAML
    arguments = ["--declare", "m.yaml", "--collection", "FatJet", FILE, "-o", "s.parquet"]
    done = run("score", *arguments, "-s", fake.url, "--json", *more, cwd=folder)
    if done.returncode:
        return {"error": done.stderr}, None
    return json.loads(done.stdout), ak.from_parquet(folder / "s.parquet")


def test_score_keeps_masks_and_restarts(fake: FakeServer, tmp_path: Path) -> None:
    eta = ak.flatten(uproot.open(FILE)["Events"]["FatJet_eta"].array()).tolist()
    fake.fail(*REFUSED, times=2)
    summary, scores = score(fake, tmp_path, "--mask", "--keep", "eta", "--keep", "phi")
    assert summary["rows"] == len(scores) > summary["scored"] > 0
    assert summary["scored"] == len(scores) - ak.sum(ak.is_none(scores.top))
    assert scores.eta.tolist() == eta
    assert scores.fields[-3:] == ["eta", "phi", "top"]
    small = ("--chunksize", "400")
    fake.fail(*REFUSED, every=18)
    kept, error = score(fake, tmp_path, *small)[0]["error"].splitlines()
    assert kept == "WARNING: scored chunks are kept (1); the same call scores the rest"
    assert "unexpected shape" in error
    summary, _ = score(fake, tmp_path, *small, "--restart")
    assert summary["resumed"] == 0


@pytest.mark.server
def test_serve_passes_its_options_to_the_runtime(tmp_path: Path) -> None:
    """A podman that has the image writes down how it is to serve, and fails."""
    podman, launched = tmp_path / "podman", tmp_path / "launched"
    podman.write_text(f'#!/bin/sh\n[ "$1" = run ] || exit 0\necho "$@" >{launched}\nexit 1\n')
    podman.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    sonic.build_repository(tmp_path / "models", {"top": DATA / "toptagger.onnx"})
    with held_port() as port:
        options = ["--port", port, "--threads", 2, "--runtime", "podman", "--image", "site/triton"]
        done = run("serve", tmp_path / "models", *options, PATH=path)
    assert done.returncode == 1
    arguments = launched.read_text().split()
    assert {f"--grpc-port={port}", "--cpus=2", "site/triton"} < set(arguments)
    assert f"--model-repository={tmp_path / 'models'}" in arguments
