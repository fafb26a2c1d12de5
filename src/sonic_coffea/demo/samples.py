"""The files that come with the package: a simulated sample, two networks, their preprocessing."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
"""Directory of the sample's ROOT files, ``toptagger.onnx``, ``substructure.onnx`` and
``toptagger.preprocess.json``."""


def sample_files() -> dict[str, list[Path]]:
    """Return the sample's files by dataset."""
    return {name: sorted(DATA.glob(f"{name}_*.root")) for name in ("TTbar", "QCD")}
