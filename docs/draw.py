"""Draws the pictures of the documentation that are more than boxes and arrows.

``python docs/draw.py`` writes them to ``docs/pictures``. What they show comes from the package: the
tensors from its layouts, the curves from its limits in a simulation, the house from its imports.
"""

from __future__ import annotations

import ast
import inspect
import sys
import tempfile
from functools import cache
from graphlib import TopologicalSorter
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
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gallery"))
import antikt
import sample
import toys
from simulation import Accelerator, Simulation, Work

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "pictures"
# Readable on white and on black.
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
LEGEND = {"frameon": False, "labelcolor": INK, "fontsize": SMALL, "borderaxespad": 0}


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
    """Draw the events: a list of numbers and a word for each jet."""
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
    """Draw the tensors that layouts make of three events, and where the scores go."""
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
    """Return a client's requests in flight over time, and their RTTs; others come at 3 s."""
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
    """Yield the steps of chunks that keep the thread while they wait, with start and end."""
    now = 0.0
    for chunk in range(chunks):
        for what, took_s in (("work", CPU_S), ("wait", INFERENCE_S), ("work", REST_S)):
            yield chunk, what, now, now + took_s
            now += took_s


def seceding(chunks: int) -> Iterator[tuple[int, str, float, float]]:
    """Yield the steps of chunks that leave the thread while they wait."""
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
    """Draw four chunks on one thread, with and without suspension."""
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


@cache
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


def panel(**settings: Any) -> tuple[Figure, Any]:
    """Return a figure as wide as half a page, or as a phone."""
    figure = Figure(figsize=(3.6, 3.1))
    ax = figure.subplots()
    figure.subplots_adjust(left=0.16, right=0.96, top=0.97, bottom=0.15)
    ax.set(yscale="log", **settings)
    return figure, ax


def scores() -> Figure:
    """Draw the scores of the sample's jets."""
    score, _, truth = scored()
    figure, ax = panel(xlabel="top score", ylabel="jets per 0.04", xlim=(0, 1))
    for name, chosen, colour in kinds(truth):
        ax.hist(
            score[chosen], bins=25, range=(0, 1), label=name, color=colour, lw=1.6, histtype="step"
        )
    ax.legend(**LEGEND, loc="upper center")
    return figure


def masses() -> Figure:
    """Draw the jets' mass before and after a cut on the score."""
    score, mass, truth = scored()
    figure, ax = panel(
        xlabel="soft-drop mass [GeV]", ylabel="jets per 10 GeV", xlim=(0, 250), ylim=(0.7, 2e5)
    )
    for name, chosen, colour in kinds(truth):
        ax.hist(
            mass[chosen], bins=25, range=(0, 250), label=name, color=colour, lw=1.6, histtype="step"
        )
        passes = chosen & (score > 0.9)
        filled = {"label": "with a score above 0.9", "color": colour, "alpha": 0.35}
        ax.hist(mass[passes], bins=25, range=(0, 250), **filled)
    ax.legend(**LEGEND, loc="upper right")
    return figure


def kinds(truth: Any) -> tuple[tuple[str, Any, str], ...]:
    """Return name, choice and colour of signal and background."""
    return (("merged top quarks", truth, COLOURS[1]), ("other jets", ~truth, COLOURS[0]))


def small(**settings: Any) -> tuple[Figure, Any]:
    """Return a figure as wide as a third of a page."""
    figure = Figure(figsize=(2.35, 2.1))
    ax = figure.subplots()
    figure.subplots_adjust(left=0.25, right=0.96, top=0.95, bottom=0.22)
    ax.set(**settings)
    return figure, ax


def gallery_images() -> Figure:
    """Draw the mean image of a top quark's jet."""
    figure, ax = small(xlabel="Δη", ylabel="Δφ")
    found = sample.jets(2)
    image = sample.grids(found[found.is_top > 0]).mean(axis=(0, 1))
    ax.imshow(image.T, extent=(-0.8, 0.8, -0.8, 0.8), origin="lower", cmap="inferno")
    return figure


def gallery_pulses() -> Figure:
    """Draw the samples of some calorimeter hits."""
    figure, ax = small(xlabel="sample of 25 ns", ylabel="charge [fC]")
    for hit, colour in zip(toys.pulses(1, 4)[0][:3], COLOURS, strict=True):
        ax.step(range(8), [hit[f"s{i}"] for i in range(8)], where="mid", color=colour)
    return figure


def gallery_showers() -> Figure:
    """Draw the hits of an event's showers."""
    figure, ax = small(xlabel="x", ylabel="y", xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
    hits = toys.showers(4, 3)[3]
    for shower in sorted(set(hits.shower.tolist())):
        chosen = hits[hits.shower == shower]
        ax.scatter(chosen.x, chosen.y, s=6 + 6 * chosen.energy, alpha=0.6, lw=0)
    return figure


def gallery_tracks() -> Figure:
    """Draw hits, and the edges of true tracks."""
    figure, ax = small(xlabel="x", ylabel="y", aspect="equal")
    hits = toys.spacepoints(1, 3)[0]
    x, y = (hits.r * function(hits.phi) for function in (np.cos, np.sin))
    ax.plot(x, y, ".", ms=2.5, color=INK)
    for track in range(int(ak.max(hits.track)) + 1):
        chosen = ak.argsort(hits.r[hits.track == track])
        ax.plot(x[hits.track == track][chosen], y[hits.track == track][chosen], lw=0.9)
    return figure


def gallery_clusters() -> Figure:
    """Draw an event's candidates, and the jets clustered from them."""
    figure, ax = small(xlabel="η", ylabel="φ", xlim=(-3, 3), ylim=(-3.2, 3.2))
    top, _ = sample.events(2)
    pt, eta, phi = (ak.to_numpy(top.PFCand[name][0]) for name in ("pt", "eta", "phi"))
    four = np.stack([pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta), pt * np.cosh(eta)], 1)
    ax.scatter(eta, phi, s=2 * pt, color=COLOURS[0], alpha=0.6, lw=0)
    for _, jet_eta, jet_phi, _ in antikt.cluster(four, [0, len(four)])["jets"]:
        circle = mpl.patches.Circle((jet_eta, jet_phi), 0.8, fc="none", ec=COLOURS[1])
        ax.add_patch(circle)
    return figure


def gallery_assignment() -> Figure:
    """Draw an event's jets, and the three that come from a top quark."""
    figure, ax = small(xlabel="η", ylabel="φ", xlim=(-3, 3), ylim=(-3.4, 3.4))
    event = toys.tops(3, 2)[0]
    jets = event.Jet
    phi = np.arctan2(jets.sin_phi, jets.cos_phi)
    q1, q2, b = event.true
    for place, (eta, angle, pt) in enumerate(zip(jets.eta, phi, jets.pt, strict=True)):
        colour = {q1: COLOURS[1], q2: COLOURS[1], b: COLOURS[2]}.get(place, FAINT)
        ax.scatter([eta], [angle], s=2 * pt, color=colour, lw=0)
    return figure


def imports() -> dict[str, set[str]]:
    """Return which folders each folder of the package imports, also in functions and for types."""
    root = Path(sonic.__file__).parent
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    imported: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for path in (root / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            names = [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
            # Of the package's own names, such as sonic.Model.
            attributes = [n for n in nodes if isinstance(n, ast.Attribute)]
            used = [
                n.attr
                for n in attributes
                if isinstance(n.value, ast.Name) and n.value.id == "sonic"
            ]
            names += [
                getattr(inspect.getmodule(getattr(sonic, name)), "__name__", "") for name in used
            ]
            parts = [name.split(".") for name in names if name.startswith("sonic_coffea.")]
            imported[folder] |= {part[1] for part in parts} & folders - {folder}
    return imported


# Positions of folders from left to right, so that no arrow crosses a name; others in the middle.
COLUMNS = {
    "layouts": 1,
    "reuse": 3,
    "processor": 2,
    "scoring": 2,
    "demo": 7,
    "dask": 8,
    "tools": 6.5,
}


def house() -> Figure:
    """Draw which folder of the package imports which; imports point down."""
    imported = imports()
    heights: dict[str, int] = {}
    below: dict[str, set[str]] = {}
    for folder in TopologicalSorter(imported).static_order():
        heights[folder] = max((heights[name] + 1 for name in imported[folder]), default=0)
        below[folder] = imported[folder].union(*(below[name] for name in imported[folder]))
    floors = [
        sorted(f for f in heights if heights[f] == h) for h in range(max(heights.values()) + 1)
    ]
    figure = Figure(figsize=(7.4, 0.62 * len(floors)))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 9), ylim=(-0.6, len(floors) - 0.4))
    ax.axis("off")
    places = {
        name: (COLUMNS.get(name, 4.5), height)
        for height, floor in enumerate(floors)
        for name in floor
    }
    for name, (x, y) in places.items():
        # Leave out arrows that others imply.
        implied = set().union(*(below[other] for other in imported[name]))
        for other in sorted(imported[name] - implied):
            style = {"arrowstyle": "-|>", "color": FAINT, "shrinkA": 11, "shrinkB": 14}
            ax.annotate("", places[other], (x, y), arrowprops=style)
        box = {"boxstyle": "round,pad=0.35", "fc": COLOURS[0], "ec": "none"}
        ax.text(x, y, name, ha="center", va="center", color="white", bbox=box, zorder=3)
    return figure


PICTURES = {
    "scores": scores,
    "masses": masses,
    "tensors": tensors,
    "limits": limits,
    "threads": threads,
    "house": house,
    "gallery-images": gallery_images,
    "gallery-pulses": gallery_pulses,
    "gallery-showers": gallery_showers,
    "gallery-tracks": gallery_tracks,
    "gallery-clusters": gallery_clusters,
    "gallery-assignment": gallery_assignment,
}


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
