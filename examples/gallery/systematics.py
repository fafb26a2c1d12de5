"""Variations in one call, and scores on disk: rows that did not change are not sent again."""

import tempfile
from pathlib import Path

import awkward as ak
import numpy as np
import rich
from common import NETWORKS, main, serving
from sample import grids, jets

import sonic_coffea as sonic


def collections(found):
    """Return the images of nominal jets and of five variations, two of which change no input."""
    grid = grids(found)
    images = ak.zip({"grid": grid}, depth_limit=1)
    hard = ak.to_numpy(found.pt > 400)
    shifted = {}
    for name, scale in (("jes_up", 1.02), ("jes_down", 0.98), ("jer_up", 1.05)):
        moved = np.where(hard[:, None, None, None], grid * scale, grid)
        shifted[name] = ak.zip({"grid": moved.astype(np.float32)}, depth_limit=1)
    return sonic.Variations(nominal=images, btag_up=images, btag_down=images, **shifted)


def run():
    """Score all variations at once, twice."""
    model = sonic.Model("tau_images", {"grid": sonic.Dense("grid")}, {"scores": ["qcd", "top"]})
    varied = collections(jets(2))
    with (
        tempfile.TemporaryDirectory() as folder,
        serving({model.name: NETWORKS / "tau_images.onnx"}) as pool,
    ):
        apart = {name: model(variation) for name, variation in varied.items()}
        with sonic.connect(pool.settings.servers, cache=Path(folder) / "scores"):
            first = model.submit(varied)
            scores = first.result()
            again = model.submit(varied)
            again.result()
    for name, variation in scores.items():
        np.testing.assert_allclose(variation.top, apart[name].top, rtol=1e-5, atol=1e-6)
    rich.print(sonic.report(first), sonic.report(again))
    rows, sent = first.statistics.objects, first.statistics.total().rows
    assert again.statistics.total().rows == 0
    return {"rows": rows, "sent": sent, "saved": 1 - sent / rows, "sent again": 0}


if __name__ == "__main__":
    main(run)
