"""Write the documentation's page of benchmarks, ``docs/benchmarks.md``, from their JSON.

``python benchmarks/document.py FOLDER`` takes the results of ``make bench``, keeps them beside this
file in ``results``, puts them into the places of ``page.md`` that name them, and draws the pictures
into ``docs/benchmarks``. Without a folder, it takes the results that are kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
WAYS = ("onnxruntime on the worker", "service, blocking", "service, suspended chunks")


class Number(float):
    """A number as the page shows it.

    By ``%`` in percent, by ``s`` with its unit of time, and by ``x`` over the time of its peer.
    """

    ratio: float | None = None

    def __format__(self, spec: str) -> str:
        if spec.endswith("%"):
            return f"{100 * self:{spec[:-1] or '.0'}f} %"
        if spec == "x":
            return f"{self.ratio:.2g}"
        if spec != "s":
            return super().__format__(spec)
        for unit, size in (("s", 1.0), ("ms", 1e-3)):
            if self >= size:
                return f"{self / size:.3g} {unit}"
        return f"{self * 1e6:.0f} µs"


class Results(dict[str, Any]):
    """The results of a benchmark; the page finds each by its name, or by its path in the JSON."""

    def __missing__(self, name: str) -> Number:
        for result in self["results"]:
            if result["name"] == name:
                number = Number(result["value"])
                number.ratio = result["ratio"]
                return number
        group, _, member = name.partition("/")
        if not member:
            raise KeyError(name)
        return Number(self[group][member])

    def among(self, words: str) -> list[Number]:
        """Return all results that have words in their names."""
        return [Number(r["value"]) for r in self["results"] if words in r["name"]]


def machine(results: Results) -> str:
    """Return what it was measured on."""
    on = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in results["packages"].items())
    return (
        f"{on['cores']} cores of a machine with “{on['processor']}”, {on['memory_gb']} GB, "
        f"Python {on['python']}; {packages}"
    )


def missed(all_of: Mapping[str, Results]) -> str:
    """Return the targets that were missed; of those that code for one model sets, the worst."""
    rows = [m for results in all_of.values() for m in results["results"] if m["met"] is False]
    loops = [m for m in rows if m["against"].startswith("numpy and one loop")]
    worst = max(loops, key=lambda m: m["ratio"], default=None)
    lines = ["|  | target | reached |", "|---|---:|---:|"]
    lines += [
        f"| {m['name']} | {m['target']} | {reached(m)} |"
        for m in rows
        if m not in loops or m is worst
    ]
    return "\n".join(lines)


def reached(result: Mapping[str, Any]) -> str:
    """Return what stands beside a target."""
    if (ratio := result["ratio"]) is None:
        return format(Number(result["value"]), "s" if result["repeats"] else ".2g")
    return f"{1 / ratio:.2g} x faster" if "faster" in result["target"] else f"{ratio:.2g} x"


def page(all_of: Mapping[str, Results]) -> str:
    """Return the page: its text, with the results in the places that name them."""
    layouts = all_of["layouts"]
    loops = [m for m in layouts["results"] if m["against"].startswith("numpy and one loop")]
    links = all_of["distance"].among("4 connections: part")
    return (
        (HERE / "page.md")
        .read_text(encoding="utf-8")
        .format(
            **all_of,
            machine=machine(all_of["pool"]),
            slowest_recovery=max(all_of["failover"].among("until 90 %")),
            slowest=max(loops, key=lambda m: m["ratio"]),
            awkward_by_hand=1 / layouts["Padded, over awkward by hand"].ratio,
            by_requests=1 / layouts["Padded by requests, over awkward by hand"].ratio,
            least_of_a_link=min(links),
            most_of_a_link=max(links),
            worst_plan=max(all_of["facility"].among("planned")),
            missed=missed(all_of),
        )
    )


def draw_pool(results: Results) -> Figure:
    """Draw what part of the saturated server each way gets."""
    share = results["share of the saturated server"]
    figure = Figure(figsize=(7, 1 + 0.3 * len(share)), layout="constrained")
    axes = figure.subplots()
    colors = ["C1" if "sonic" in name else "C0" for name in share]
    axes.barh(list(share), list(share.values()), color=colors)
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_xlabel("rows a second over those of the saturated server")
    axes.invert_yaxis()
    return figure


def draw_workflow(results: Results) -> Figure:
    """Draw what part of the ideal each way reaches."""
    shares = results["throughput over the ideal, by the tagger's part"]
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(shares))
    for shift, way in enumerate(WAYS):
        heights = [ratios[way] for ratios in shares.values()]
        axes.bar(places + 0.27 * (shift - 1), heights, 0.25, label=way)
    axes.axhline(1.0, color="gray", linewidth=1)
    axes.set_xticks(places, [f"{float(part):.0%}" for part in shares])
    axes.set(
        xlabel="the tagger's part of a chunk on the worker's core",
        ylabel="throughput over the ideal",
    )
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    return figure


def draw_failover(results: Results) -> Figure:
    """Draw the rows a second, and what happened when."""
    times, rows = np.array(results["course"]).T
    width = int(np.searchsorted(times - times[0], 0.5))
    rates = (rows[width:] - rows[:-width]) / (times[width:] - times[:-width])
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(times[width:], rates / 1e3)
    axes.set(xlabel="time (s)", ylabel="thousand rows a second, of two servers", ylim=0)
    for name, mark in results["marks"].items():
        axes.axvline(mark, color="gray", linewidth=1)
        axes.text(mark, 0, f" {name}", rotation=90, va="bottom")
    return figure


PICTURES = {"pool": draw_pool, "workflow": draw_workflow, "failover": draw_failover}


def load(folder: Path) -> dict[str, Results]:
    """Read results, by the names of benchmarks."""
    paths = sorted(folder.glob("*.json"))
    return {path.stem: Results(json.loads(path.read_text(encoding="utf-8"))) for path in paths}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args().folder
    all_of = load(folder)
    try:
        text = page(all_of)
    except KeyError as lacking:
        sys.exit(f"{folder} lacks results of {lacking}; `make bench` writes them")
    pictures = DOCS / "benchmarks"
    pictures.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        # Without the date, and with the same identifiers, a picture changes with its numbers only.
        mpl.rcParams["svg.hashsalt"] = name
        draw(all_of[name]).savefig(pictures / f"{name}.svg", metadata={"Date": None})
    if folder.resolve() != RESULTS:
        RESULTS.mkdir(exist_ok=True)
        for name in all_of:
            shutil.copy(folder / f"{name}.json", RESULTS)
    (DOCS / "benchmarks.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
