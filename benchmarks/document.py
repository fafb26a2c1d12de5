"""Write the documentation's page of benchmarks, ``docs/benchmarks.md``, from their JSON.

``python benchmarks/document.py FOLDER`` takes the results of ``make bench``, keeps them beside this
file in ``results``, and draws the figures into ``docs/benchmarks``. Without a folder, it takes what
is kept.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
ORDER = (
    "pool",
    "workflow",
    "cluster",
    "facility",
    "failover",
    "balancer",
    "layouts",
    "wire",
    "distance",
    "shared_memory",
    "chunk",
    "startup",
)
SUSPENDED = "service, suspended chunks"
SATURATING = "the same, over the clients that saturate it"
Found = dict[str, Any]

_HEAD = """# Benchmarks

Each figure is a comparison, measured in one run: with other ways to do the same (coffea's
`triton_wrapper`, a loop written by hand, PyTriton's client, onnxruntime on the worker), or with a
limit (a copy of the same memory, a load generator on the same server). Ratios carry over to other
machines; times do not.

"""
_MEASURED = """{machine}. Sections that were measured on another machine say so.

The accelerator is a stand-in: a model in a real Triton that sleeps for as long as a GPU would
compute, 2 ms per request and 5 µs per row. So the machine's two cores are left to the clients.

`make bench` measures everything again, and `make bench-page` writes this page from the results.
`python benchmarks/compare.py BEFORE AFTER` compares two results, files or folders, and lists what
became slower by more than the noise.

The figures reported for SONIC, in the software of CMS and of other experiments, are for other
workflows and machines. They show what was reached elsewhere, not what to expect here."""


def value(results: Found, name: str) -> float:
    """Return one of the numbers."""
    return next(f["value"] for f in results["figures"] if f["name"] == name)


def headlines(all_of: Mapping[str, Found]) -> Iterator[tuple[str, str, str]]:
    """Yield a physicist's question, the answer, and what to compare it with."""
    share = all_of["pool"]["share of the saturated server"]
    best = {
        name: max(s for way, s in share.items() if way.startswith(name))
        for name in ("coffea's triton_wrapper", "loop by hand", "PyTriton's client")
    }
    yield (
        "How much of an accelerator can one process use?",
        f"{percent(share['sonic-coffea'])} of the saturated server's rate",
        ", ".join(f"{name}: {percent(part)}" for name, part in best.items()),
    )
    flow = all_of["workflow"]
    parts = [float(p) for p in flow["throughput over the ideal, by the tagger's part"]]
    gain = "tagger {:.0%} of a chunk: gain of the whole workflow"
    yield (
        (
            f"A network takes {percent(*parts)} of an analysis' CPU time: how much faster is the "
            "whole analysis with a service?"
        ),
        f"by {percent(*(value(flow, gain.format(p)) for p in parts))}",
        "reported for SONIC: by 12 %, on 10,000 cores",
    )
    ideal = f"tagger {{:.0%}} of a chunk: {SUSPENDED}, throughput over the ideal"
    yield (
        "The same analyses with a service: how fast are they, compared with no network at all?",
        percent(*(value(flow, ideal.format(p)) for p in parts)),
        "reported for SONIC: 60 %; with inference on the worker, 10 to 20 %",
    )
    ratios = {m["name"]: m["ratio"] for m in all_of["layouts"]["measurements"]}
    weaver, hand = "weaver, from a file, FL, 20,000 rows", "Padded, over awkward by hand"
    yield (
        "How long does it take to make tensors from 20,000 jagged jets of a file, as weaver does?",
        f"{ratios[weaver]:.2g} times as long as numpy and one compiled loop",
        (
            f"without operations, {ratios['Padded, over a copy']:.2g} times as long as a copy; "
            f"{1 / ratios[hand]:.0f} times faster than awkward by hand"
        ),
    )
    cluster = all_of["cluster"]
    clients = "clients until a request takes 10 % longer (0.5 s of CPU, 1,000 rows)"
    yield (
        (
            "How many workers share an accelerator before a request takes 10 % longer? Each "
            "chunk has 0.5 s of CPU and 1,000 rows; simulated"
        ),
        f"{value(cluster, clients):.0f}; they use {percent(value(cluster, SATURATING))} of it",
        "reported for SONIC, for other workflows: 300 or more",
    )
    rates = {
        int(f["name"].split()[0]): f["value"]
        for f in cluster["figures"]
        if "simulated workers: rows" in f["name"]
    }
    yield (
        f"How much of the servers do {max(rates):,} workers use? Simulated",
        f"{percent(rates[max(rates)])} of the saturated servers' rate",
        "",
    )
    recoveries = [f["value"] for f in all_of["failover"]["figures"] if "until 90 %" in f["name"]]
    yield (
        "A server is killed, restarted or stopped: after what time is the rate back at 90 %?",
        f"within {max(recoveries):.1f} s",
        "",
    )
    wire = all_of["wire"]["MB for 1,000 jets"]
    yield (
        "How much is sent for 1,000 jets with 13 features of each constituent?",
        "; ".join(f"{way}: {size:.2g} MB" for way, size in wire.items()),
        "reported for SONIC: up to 12 GiB/s, from 10,000 cores",
    )
    parts = {
        n: [f["value"] for f in all_of["distance"]["figures"] if f"{n}: part" in f["name"]]
        for n in ("1 connection", "4 connections")
    }
    several, alone = sorted(parts["4 connections"]), sorted(parts["1 connection"])
    yield (
        "How much of a link with 20 or 80 ms does one client use?",
        f"{percent(several[0])[:-2]} to {percent(several[-1])} with four connections",
        f"{percent(alone[0])[:-2]} to {percent(alone[-1])} with one connection",
    )
    errors = [f["value"] for f in all_of["facility"]["figures"] if "planned" in f["name"]]
    yield "How far is `sonic-coffea plan` off?", f"by {percent(max(errors))} at most", ""


def percent(*parts: float) -> str:
    """Return parts of one in percent: "10, 25 and 50 %"."""
    *first, last = (f"{100 * part:.0f}" for part in parts)
    return f"{', '.join(first)} and {last} %" if first else f"{last} %"


def machine(results: Found) -> str:
    """Return what it was measured on."""
    on = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in results["packages"].items())
    return (
        f"Measured on {on['cores']} cores of a machine with the processor “{on['processor']}”, "
        f"{on['memory_gb']} GB, Python {on['python']}; {packages}"
    )


def tables(results: Found) -> Iterator[str]:
    """Yield a benchmark's tables in Markdown."""
    if results["measurements"]:
        yield "| | median | middle half | ratio | to | target |"
        yield "|---|---:|---:|---:|---|---|"
        for m in results["measurements"]:
            yield row(
                m["name"],
                duration(m["median_s"]),
                f"{duration(m['lower_s'])} to {duration(m['upper_s'])}",
                "" if m["ratio"] is None else f"{m['ratio']:.3g}",
                m["against"],
                aim(m),
            )
        yield ""
    if results["figures"]:
        yield "| | | target |"
        yield "|---|---:|---|"
        for f in results["figures"]:
            number = f"{f['value']:,.0f}" if f["value"] >= 1000 else f"{f['value']:.3g}"
            yield row(f["name"], number, aim(f))
        yield ""


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def aim(figure: Mapping[str, Any]) -> str:
    """Return the target and whether it is met."""
    if not figure["target"]:
        return ""
    return f"{figure['target']}: {'met' if figure['met'] else '**missed**'}"


def duration(seconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def about(name: str) -> tuple[str, str]:
    """Return what a benchmark says of itself, and its notes: what the figures show, and why."""
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    summary, _, notes = text.partition("\n\nNotes\n-----\n")
    return summary, notes


def folded(title: str, text: str) -> Iterator[str]:
    """Yield text below a line that opens it."""
    yield from ("<details>", f"<summary>{title}</summary>", "", text.strip(), "", "</details>", "")


def page(all_of: Mapping[str, Found]) -> str:
    """Return the page."""
    lines = [_HEAD, "| question | answer | compared with |", "|---|---|---|"]
    lines += [row(*cells) for cells in headlines(all_of)]
    lines.append("")
    lines += folded("How this was measured", _MEASURED.format(machine=machine(all_of["pool"])))
    for name, results in all_of.items():
        summary, notes = about(name)
        lines += [f"## {results['benchmark']}", "", summary, ""]
        lines += [f"![{results['benchmark']}](benchmarks/{name}.svg)", ""]
        details = [notes, ""] if notes else []
        if results["machine"] != all_of["pool"]["machine"]:
            details += [f"{machine(results)}.", ""]
        details += tables(results)
        lines += folded("All figures", "\n".join(details))
    return "\n".join(lines).rstrip() + "\n"


def load(folder: Path) -> dict[str, Found]:
    """Read results, in the order of the page."""
    return {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ORDER
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args().folder
    missing = [name for name in ORDER if not (folder / f"{name}.json").is_file()]
    if missing:
        sys.exit(f"{folder} lacks results of {', '.join(missing)}; `make bench` writes them")
    all_of = load(folder)
    pictures = DOCS / "benchmarks"
    pictures.mkdir(exist_ok=True)
    for name, results in all_of.items():
        # Without the date, and with the same identifiers, a figure changes with its numbers only.
        mpl.rcParams["svg.hashsalt"] = name
        figure = importlib.import_module(name).draw(results)
        figure.savefig(pictures / f"{name}.svg", metadata={"Date": None})
        if folder.resolve() != RESULTS:
            RESULTS.mkdir(exist_ok=True)
            shutil.copy(folder / f"{name}.json", RESULTS)
    (DOCS / "benchmarks.md").write_text(page(all_of), encoding="utf-8")


if __name__ == "__main__":
    main()
