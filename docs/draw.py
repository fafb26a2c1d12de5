"""Draws the pictures of the documentation that are more than boxes and arrows.

``python docs/draw.py`` writes them to ``docs/pictures``. What they show comes from the package: the
tensors from its layouts, the curves from its limits in a simulation.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import awkward as ak
import matplotlib as mpl
import numpy as np
from coffea.nanoevents import NanoAODSchema, NanoEventsFactory
from matplotlib.figure import Figure

import sonic_coffea as sonic
from sonic_coffea.demo.features import constituent_features, is_merged_top
from sonic_coffea.demo.samples import DATA

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from simulation import Accelerator, Simulation, Work

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "pictures"
# Read well on white and on black.
INK, FAINT = "#7d858f", "#7d858f55"
COLOURS = ("#2f81d6", "#d9742b", "#3c9d5d")
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Arial", "Helvetica", "DejaVu Sans"],
    "font.size": 9.5,
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "sonic-coffea",  # the same drawing gives the same file
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
}

# Three events with 2, 0 and 1 jets; the pt of the constituents of each.
JETS = ak.Array(
    [
        [{"pf": [{"pt": 40}, {"pt": 30}, {"pt": 20}]}, {"pf": [{"pt": 25}]}],
        [],
        [{"pf": [{"pt": 60}, {"pt": 10}]}],
    ]
)
SCORES = ("0.9", "0.1", "0.7")
STEP, SMALL = 0.85, 8.5


def cells(ax: Any, x: float, y: float, row: Any, colour: str, counts: int | None = None) -> None:
    """Draw a row of numbers, of which the first `counts` are not padding."""
    for i, value in enumerate(row):
        real = counts is None or i < counts
        ax.add_patch(
            mpl.patches.Rectangle(
                (x + STEP * i, y), STEP, 0.8, fc=colour if real else "none", ec=INK, lw=0.8
            )
        )
        ax.text(
            x + STEP * (i + 0.5), y + 0.38, value, ha="center", va="center", fontsize=SMALL,
            color="white" if real else INK,
        )  # fmt: skip


def jagged(ax: Any, x: float, of_jet: Any) -> None:
    """Draw the events with what each of their jets has: a list of numbers, and a word."""
    y, row = 9.5, 0
    for event, number in enumerate(ak.num(JETS, axis=1)):
        height = 0.95 * max(number, 1)
        corners = "round,pad=0,rounding_size=.15"
        ax.add_patch(
            mpl.patches.FancyBboxPatch(
                (x, y - height), 4.3, height + 0.65, boxstyle=corners, fc="none", ec=FAINT
            )
        )
        words = f"event {event}" + ("" if number else ": no jets")
        ax.text(x + 0.15, y + 0.08, words, fontsize=SMALL)
        for i in range(number):
            numbers, word = of_jet[row]
            below = y - 0.95 * (i + 1) + 0.08
            cells(ax, x + 0.2, below, numbers, COLOURS[row])
            ax.text(x + 0.4 + STEP * len(numbers), below + 0.37, word, va="center", fontsize=SMALL)
            row += 1
        y -= height + 1.15 - 0.2 * (number == 0)


def tensors() -> Figure:
    """Draw what the layouts make of three events, and where the scores go."""
    rows = ak.flatten(JETS)
    counts = ak.num(rows.pf).to_list()
    figure = Figure(figsize=(7.4, 3.9))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-0.3, 20.3), ylim=(0.8, 11.5))
    ax.axis("off")
    titles = {
        (0, 10.7): "jagged array",
        (6.2, 10.7): "Padded(…, 4)",
        (10.4, 10.7): "Mask(4)",
        (6.2, 6.8): "Bucketed(…, lengths=(2, 4))",
        (6.2, 2.9): "Flat(…)",
        (15.6, 10.7): "scores, jagged again",
    }
    for at, title in titles.items():
        ax.text(*at, title, weight="bold")
    for begin, end in ((4.6, 5.8), (14.1, 15.3)):
        arrow = {"arrowstyle": "-|>", "color": INK}
        ax.annotate("", (end, 6.2), (begin, 6.2), arrowprops=arrow)
    jagged(ax, 0, [(pt, f"row {row}") for row, pt in enumerate(rows.pf.pt.to_list())])
    jagged(ax, 15.6, [([score], "") for score in SCORES])

    bucketed = sonic.Bucketed("pf.pt", lengths=(2, 4))
    rectangles = (
        (6.2, 9.7, [0, 1, 2], sonic.Padded("pf.pt", 4).pack(JETS)),
        (10.4, 9.7, [0, 1, 2], sonic.Mask(4, of="pf.pt").pack(JETS)),
        (6.2, 5.8, [1, 2], bucketed.pack(rows[[1, 2]])),
        (10.4, 5.8, [0], bucketed.pack(rows[[0]])),
    )
    for x, y, chosen, tensor in rectangles:
        for i, row in enumerate(chosen):
            cells(ax, x, y - 0.8 * i, tensor[i, 0].astype(int), COLOURS[row], counts[row])
    ax.text(6.2, 4.45, "one request", fontsize=SMALL)
    ax.text(10.4, 4.45, "another one", fontsize=SMALL)
    splits = [0, *np.cumsum(counts)]
    flat = sonic.Flat("pf.pt").pack(JETS)[:, 0].astype(int)
    for row, begin in enumerate(splits[:-1]):
        cells(ax, 6.2 + STEP * begin, 1.9, flat[begin : splits[row + 1]], COLOURS[row])
    ax.text(6.2, 1.35, f"row_splits: {', '.join(map(str, splits))}", fontsize=SMALL)
    return figure


def trips(network_s: float, until: float) -> tuple[Any, Any, Any, Any]:
    """Return a client's requests in flight over time, and their RTTs, as others come at 3 s."""
    server = Accelerator(launch_s=10e-3, row_s=5e-6)
    run = Simulation(
        [server], Work(rows=256, max_suspended_chunks=300, network_s=network_s), schedulers=0
    )
    run.join(1)
    run.join(3, 3.0)
    run.run(until + 1)
    sent, at = np.asarray([(a.sent_at, a.at) for a in run.answered if a.worker == 0]).T
    times = np.arange(0, until, 0.02)
    in_flight = (sent <= times[:, np.newaxis]).sum(axis=1) - (at <= times[:, np.newaxis]).sum(
        axis=1
    )
    seen = at < until
    return times, in_flight, at[seen], 1e3 * (at - sent)[seen]


def limits() -> Figure:
    """Draw how the in-flight limits of a near and of a far client adapt."""
    figure = Figure(figsize=(7.4, 3.6))
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.97, bottom=0.12, hspace=0.14)
    for (name, network_s), colour in zip(
        {"near the server": 2e-4, "20 ms away": 20e-3}.items(), COLOURS, strict=False
    ):
        times, in_flight, at, rtt_ms = trips(network_s, 5.0)
        (line,) = upper.plot(times, in_flight, color=colour, lw=1.6, label=name)
        line.set_gid(f"in-flight-{network_s * 1e3:g}-ms")
        lower.plot(at[::4], rtt_ms[::4], ".", ms=2, color=colour)
    upper.set_ylabel("requests in flight")
    upper.legend(frameon=False, labelcolor=INK, loc="upper left")
    lower.set(ylabel="RTT [ms]", xlabel="seconds", xlim=(0, 5))
    for ax in (upper, lower):
        ax.set_ylim(0)
        ax.axvline(3.0, color=FAINT, ls="--")
    upper.text(3.04, 2, "three other clients come", fontsize=SMALL)
    return figure


CPU_S, INFERENCE_S, REST_S = 1.0, 3.0, 0.4


def keeping(chunks: int) -> Iterator[tuple[int, str, float, float]]:
    """Yield what each chunk does from when to when, if it keeps the thread while it waits."""
    now = 0.0
    for chunk in range(chunks):
        for what, took_s in (("work", CPU_S), ("wait", INFERENCE_S), ("work", REST_S)):
            yield chunk, what, now, now + took_s
            now += took_s


def seceding(chunks: int) -> Iterator[tuple[int, str, float, float]]:
    """Yield the same if the next chunk starts meanwhile, or goes on if two wait at the servers."""
    now, started, waiting = 0.0, 0, []
    while started < chunks or waiting:
        ready = [w for w in waiting if w[0] <= now]
        if started < chunks and not (ready and len(waiting) - len(ready) >= 2):
            yield started, "work", now, now + CPU_S
            now += CPU_S
            waiting.append((now + INFERENCE_S, started))
            started += 1
            continue
        at, chunk = waiting.pop(0)
        now = max(now, at)
        yield chunk, "wait", at - INFERENCE_S, now
        yield chunk, "work", now, now + REST_S
        now += REST_S


def threads() -> Figure:
    """Draw what one thread does with four chunks, in both ways."""
    figure = Figure(figsize=(7.4, 3.2))
    axes = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.1, right=0.98, top=0.92, bottom=0.13, hspace=0.32)
    for ax, name, spans in zip(
        axes, ("keeping", "seceding"), (keeping(4), seceding(4)), strict=False
    ):
        for chunk, what, begun, ended in spans:
            works = what == "work"
            ax.barh(
                chunk, ended - begun, left=begun, height=0.62 if works else 0.14,
                color=COLOURS[0] if works else COLOURS[1],
            )  # fmt: skip
        ax.set_yticks(range(4), [f"chunk {n}" for n in range(4)])
        ax.tick_params(left=False)
        ax.invert_yaxis()
        words = {
            "keeping": "a chunk keeps the thread while it waits",
            "seceding": "a chunk secedes while it waits",
        }[name]
        ax.set_title(words, fontsize=9.5, loc="left", color=INK, weight="bold")
    axes[0].text(1.05, 0.85, "waiting for scores", color=COLOURS[1], fontsize=SMALL, va="center")
    axes[0].text(4.5, 0.0, "on the thread", color=COLOURS[0], fontsize=SMALL, va="center")
    axes[1].set_xlabel("time")
    axes[1].set_xticks([])
    return figure


def scored() -> tuple[Any, Any, Any]:
    """Return score, mass and truth of each jet in two files of the sample."""
    NanoAODSchema.warn_missing_crossrefs = False
    columns = []
    model = sonic.Model.from_weaver("toptagger", DATA / "toptagger.preprocess.json")
    with tempfile.TemporaryDirectory() as folder:
        sonic.build_repository(folder, {"toptagger": DATA / "toptagger.onnx"})
        with sonic.connect(folder):
            for name in ("TTbar_1", "QCD_1"):
                file = {str(DATA / f"{name}.root"): "Events"}
                events = NanoEventsFactory.from_root(file).events()
                jets = events.FatJet
                score = model(constituent_features(jets, sonic.constituents(events))).Top
                truth = is_merged_top(jets, events.GenPart)
                columns.append([ak.to_numpy(ak.flatten(a)) for a in (score, jets.msoftdrop, truth)])
    score, mass, truth = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return score, mass, truth.astype(bool)


def scores() -> Figure:
    """Draw what the demo's network says of the sample, and what a cut on it does to the mass."""
    score, mass, truth = scored()
    figure = Figure(figsize=(7.4, 3.1))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.08, right=0.97, top=0.97, bottom=0.15, wspace=0.28)
    kinds = (("merged top quarks", truth, COLOURS[1]), ("other jets", ~truth, COLOURS[0]))
    for name, chosen, colour in kinds:
        line = {"label": name, "color": colour, "lw": 1.6, "histtype": "step"}
        left.hist(score[chosen], bins=25, range=(0, 1), **line)
        right.hist(mass[chosen], bins=25, range=(0, 250), **line)
        passes = chosen & (score > 0.9)
        filled = {"label": "with a score above 0.9", "color": colour, "alpha": 0.35}
        right.hist(mass[passes], bins=25, range=(0, 250), **filled)
    left.set(xlabel="top score", ylabel="jets per 0.04", yscale="log", xlim=(0, 1))
    right.set(xlabel="soft-drop mass [GeV]", ylabel="jets per 10 GeV", yscale="log")
    right.set(xlim=(0, 250), ylim=(0.7, 2e5))
    style = {"frameon": False, "labelcolor": INK, "fontsize": SMALL, "borderaxespad": 0}
    left.legend(**style, loc="upper center")
    right.legend(**style, loc="upper right")
    return figure


PICTURES = {"scores": scores, "tensors": tensors, "limits": limits, "threads": threads}


def draw(folder: Path = FOLDER) -> None:
    """Write the pictures."""
    folder.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, picture in PICTURES.items():
            picture().savefig(
                folder / f"{name}.svg", transparent=True, metadata={"Date": None, "Creator": None}
            )


if __name__ == "__main__":
    draw()
