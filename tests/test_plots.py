"""Plots of scores: efficiencies, areas and bins with their errors."""

from __future__ import annotations

from typing import Any

import awkward as ak
import hist
import numpy as np
import pytest
from matplotlib.figure import Figure

from sonic_coffea import errors, plots


def two_classes(rng: np.random.Generator, signal: int, background: int) -> tuple[Any, Any]:
    score = np.concatenate([rng.normal(1.0, 1.0, signal), rng.normal(0.0, 1.0, background)])
    return score, np.arange(signal + background) < signal


def test_errors_are_those_of_many_samples() -> None:
    """Weighted, too: half of the objects count three times as much."""
    rng = np.random.default_rng(1)
    areas, errors_of_area, signals, errors_of_signal = [], [], [], []
    for number in range(300):
        score, truth = two_classes(rng, 60, 90)
        weight = None if number % 2 else np.where(np.arange(150) % 2, 1.0, 3.0)
        curve = plots.roc(score, truth, weight=weight)
        point = curve.at_background(0.2)
        areas.append(curve.area)
        errors_of_area.append(curve.area_error)
        signals.append(np.interp(-0.5, -curve.cut[1:], curve.signal[1:]))
        errors_of_signal.append(np.interp(-0.5, -curve.cut[1:], curve.signal_error[1:]))
        assert point["background"] <= 0.2 < point["background"] + 0.1
    for part in (slice(0, None, 2), slice(1, None, 2)):
        assert abs(np.mean(errors_of_area[part]) / np.std(areas[part]) - 1) < 0.2
        assert abs(np.mean(errors_of_signal[part]) / np.std(signals[part]) - 1) < 0.2


def test_efficiencies_are_those_of_the_cuts() -> None:
    score, truth = np.array([0.9, 0.8, 0.8, 0.3, 0.1]), np.array([1, 1, 0, 0, 1], bool)
    curve = plots.roc(score, truth)
    for cut, signal, background in zip(curve.cut, curve.signal, curve.background, strict=True):
        assert signal == (score[truth] >= cut).mean()
        assert background == (score[~truth] >= cut).mean()
    pairs = score[truth][:, None] - score[~truth][None]
    assert curve.area == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    assert (curve.n_signal, curve.n_background) == (3, 2)
    # A binomial error; with all or none, there is nothing to vary.
    assert curve.signal_error[1] == pytest.approx(np.sqrt(1 / 3 * 2 / 3 / 3))
    assert curve.signal_error[-1] == 0
    assert curve.at_background(0.5)["cut"] == 0.8
    three_tops = plots.roc(np.array([3.0, 2.0, 1.0, 0.0, -1.0]), np.arange(5) < 3)
    assert three_tops.area == 1
    assert three_tops.area_error > 0.1


def test_jagged_scores_and_weights_of_events() -> None:
    scores = ak.Array([[0.9, None], [], [0.2, 0.7]])
    is_top = ak.Array([[True, False], [], [False, True]])
    curve = plots.roc(scores, is_top, weight=ak.Array([2.0, 5.0, 1.0]))
    flat = plots.roc([0.9, 0.2, 0.7], [True, False, True], weight=[2.0, 1.0, 1.0])
    assert curve.signal.tolist() == flat.signal.tolist() == [0.0, 2 / 3, 1.0, 1.0]
    histogram = plots.score_histogram(scores, {"tt": [True, True, False], "QCD": ~is_top}, bins=10)
    assert histogram[{"class": "tt"}].values().sum() == 1
    assert histogram[{"class": "QCD"}].values()[2] == 1
    # A score of 1 is in the last bin.
    assert plots.score_histogram([1.0], {"a": [True]}).values()[0, -1] == 1


@pytest.mark.parametrize(
    ("scores", "truth", "options", "message"),
    [
        ([0.1, 0.2], [True, True], {}, "got 2 objects, no background"),
        ([0.1, np.nan], [True, False], {}, "1 of 2 scores are NaN"),
        ([0.1, 0.2, 0.3], [True, False], {}, "do not fit together"),
        ([0.1, 0.2], [True, False], {"weight": [-1.0, 1.0]}, "weights whose sum is positive"),
    ],
)
def test_what_has_no_curve(scores: Any, truth: Any, options: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        plots.roc(np.array(scores), np.array(truth), **options)


def test_empty_bins_have_no_error_bars() -> None:
    histogram = hist.Hist.new.Reg(50, 0, 300).Weight().fill([103.0, 104.0, 220.0])
    axes = Figure().subplots()
    plots.draw_histogram(histogram, axes)
    (bars,) = axes.containers
    assert len(bars.lines[2][0].get_segments()) == 2


def test_what_is_drawn_has_words_and_areas() -> None:
    score, truth = two_classes(np.random.default_rng(1), 500, 500)
    histogram = plots.score_histogram(score, {"top": truth, "QCD": ~truth}, limits=(-4, 5))
    axes = plots.draw_scores(histogram, Figure().subplots())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["top", "QCD"]
    for patch in axes.patches:  # of area 1
        values, edges, _ = patch.get_data()
        assert np.sum(values * np.diff(edges)) == pytest.approx(1)
    curve = plots.roc(score, truth)
    axes = plots.draw_roc({"all": curve}, Figure().subplots())
    (text,) = axes.get_legend().get_texts()
    assert text.get_text() == f"all: AUC = {curve.area:.3f} ± {curve.area_error:.3f}"
    assert (axes.get_xlabel(), axes.get_yscale()) == ("signal efficiency", "log")
