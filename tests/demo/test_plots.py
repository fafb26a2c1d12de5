"""The demo's plots, without a demo."""

from __future__ import annotations

import hist
import numpy as np
from matplotlib.figure import Figure

from sonic_coffea.demo import plots


def test_the_area_under_a_curve_has_its_error() -> None:
    rng = np.random.default_rng(1)
    areas, errors = [], []
    for _ in range(200):
        score = np.concatenate([rng.normal(1.0, 1.0, 60), rng.normal(0.0, 1.0, 90)])
        curve = plots.roc(score, np.arange(150) < 60)
        areas.append(curve.area)
        errors.append(curve.area_error)
    assert abs(np.mean(errors) / np.std(areas) - 1) < 0.2
    three_tops = plots.roc(np.array([3.0, 2.0, 1.0, 0.0, -1.0]), np.arange(5) < 3)
    assert three_tops.area == 1
    assert three_tops.area_error > 0.1


def test_empty_bins_have_no_error_bars() -> None:
    histogram = hist.Hist.new.Reg(50, 0, 300).Weight().fill([103.0, 104.0, 220.0])
    axes = Figure().subplots()
    plots._steps(axes, histogram, color="C0")
    (errors,) = axes.containers
    assert len(errors.lines[2][0].get_segments()) == 2
