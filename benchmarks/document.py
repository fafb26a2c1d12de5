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

HERE = Path(__file__).parent
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
    "shared_memory",
    "chunk",
    "startup",
    "gpu",
)
SUSPENDED = "service, suspended chunks"
SATURATING = "the same, over the clients that saturate it"
Found = dict[str, Any]

_HEAD = """# Benchmarks

How fast is it, compared with what? Each figure is measured in one run with its peers (coffea's
`triton_wrapper`, the loop that analyses have by hand, PyTriton's client, onnxruntime on the worker)
or its limit (a copy of the same memory, a load generator on the same server). Ratios carry over to
other machines; times do not.

"""
_MEASURED = """{machine}.

An accelerator is a stand-in here: a model in a real Triton that sleeps for as long as a GPU works,
2 ms and 5 µs a row, so that the two cores are left to the clients.

`make bench` measures all of it again, and `make bench-page` writes this page from the results. Two
results, files or folders, are compared by `python benchmarks/compare.py BEFORE AFTER`: it says what
got slower beyond the noise.

What was reported for SONIC, in the software of CMS and of others, is of other workflows and
machines: it says what has been reached, not what to expect here."""
_GPU = """
No accelerator was at hand for these figures, so only the CPU is shown. On a machine with a GPU and
a container engine, one command measures both:

```text
python benchmarks/gpu.py --runtime docker --json gpu.json --figure gpu.png
```
"""

# What the figures show, and why.
_NOTES = {
    "pool": """\
What a call of 100 rows takes beyond a blocking one, whose tensor is ready, is the time of its own
Python, some 2 ms on the machine above: before the message is sent (arrays are bound, the model is
compared), for the tensor and the message, to take the answer, and to put the scores back. The
chunk of 100 jets below shows the parts. To wait for the answer on gRPC's own thread costs little
more than to block. A chunk of some thousand jets does not notice.

The limit is that of messages; a share a little above it is noise. With a server on its own machine,
sonic-coffea puts large tensors into shared memory if nobody tells it not to, and may then be above
the limit.""",
    "balancer": """\
Triton's batcher sleeps for half a second after a refusal, so that the call which meets one takes
2 s. Eight processes that do not know of each other are refused more often than bare clients, of
which the best number, four, was started; a dask cluster gives its workers quotas instead. The tasks
of dask compare their scores on the same two cores, so they have the slower accelerators.""",
    "cluster": """\
The limit of real workers is one warm process that sends prebuilt tensors, the best of several turns
with 2 to 16 requests in flight, before and after; more such processes at a time did not get more
out of the server. Workers send messages as it does, and their rows count while all of them are at
it. They share the machine's cores with the server, which the limit's one process does, too, but it
neither packs nor unpacks.

Suspended chunks hide the wait for scores, but not what it costs the CPU to pack, to send and to
change threads. This comes on top of the CPU's work, and shows unless inference takes longer.""",
    "layouts": """\
Of the time of `Padded` for 100 rows, most is that of Python, which looks the arrays up: two rows
take nearly as long.""",
    "chunk": """\
Of a large chunk, nearly half is gRPC's, which copies the message on its way into the socket: most
of it in the call that takes the message over, a fifth in threads of its own. Layouts, which pack
and put the scores back, take well under half as much. Shared memory does without both of gRPC's on
one machine; over a network, smaller types and `Bucketed` or `Flat` send less. Of a small chunk, no
part is much more than a fifth, and a jet costs several times what it does in a large one: large
chunks are better.""",
    "startup": """\
The first scores of a process do not wait for numba: compiled code is on disk, and loaded
without it. To import the package takes less than a tenth of what awkward takes, as nothing is
loaded before it is used.""",
    "wire": """\
Half precision halves the bytes, and what a flat tensor saves is what is padding in the others.
Over loopback, bytes cost next to nothing, so that the times here are those of the CPUs at both
ends, and the plainest format is the fastest: a cast has to be made and undone, buckets make more
requests, all flat rows go in a single one, beside which nothing is packed, and compression takes
more than all else together. To send less pays where the network is slow.""",
}


def value(found: Found, name: str) -> float:
    """Return one of the numbers."""
    return next(f["value"] for f in found["figures"] if f["name"] == name)


def headlines(all_of: Mapping[str, Found]) -> Iterator[tuple[str, str, str]]:
    """Yield what a physicist asks, the answer, and what it is to be compared with."""
    share = all_of["pool"]["share of the saturated server"]
    best = {
        name: max(s for way, s in share.items() if way.startswith(name))
        for name in ("coffea's triton_wrapper", "loop by hand", "PyTriton's client")
    }
    yield (
        "How much of an accelerator can one process use?",
        f"{percent(share['sonic-coffea'])} of what the server can do",
        ", ".join(f"{name}: {percent(part)}" for name, part in best.items()),
    )
    flow = all_of["workflow"]
    parts = [float(p) for p in flow["throughput over the ideal, by the tagger's part"]]
    gain = "tagger {:.0%} of a chunk: gain of the whole workflow"
    yield (
        (
            f"The network takes {percent(*parts)} of an analysis on the worker's CPU: how much "
            "faster is the whole analysis with a service?"
        ),
        f"by {percent(*(value(flow, gain.format(p)) for p in parts))}",
        "reported for SONIC: by 12 %, on 10,000 cores",
    )
    ideal = f"tagger {{:.0%}} of a chunk: {SUSPENDED}, throughput over the ideal"
    yield (
        "The same: how fast is it beside an analysis without any network?",
        percent(*(value(flow, ideal.format(p)) for p in parts)),
        "reported for SONIC: 60 %; with inference on the worker, 10 to 20 %",
    )
    packing = {
        m["against"]: m["ratio"]
        for m in all_of["layouts"]["measurements"]
        if m["target"] and m["name"] in ("Padded", "Padded, over awkward by hand")
    }
    yield (
        "How long does it take to make tensors of jagged jets?",
        f"{packing['copy of the tensor']:.2g} times as long as to copy the tensors",
        f"{1 / packing['awkward by hand']:.0f} times faster than awkward by hand",
    )
    cluster = all_of["cluster"]
    clients = "clients until a request takes 10 % longer (0.5 s of CPU, 1,000 rows)"
    yield (
        (
            "How many workers share an accelerator before a request takes 10 % longer? Each "
            "chunk has 0.5 s of CPU and 1,000 rows; simulated"
        ),
        f"{value(cluster, clients):.0f}, which use {percent(value(cluster, SATURATING))} of it",
        "reported for SONIC, of other workflows: 300 or more",
    )
    rates = {
        int(f["name"].split()[0]): f["value"]
        for f in cluster["figures"]
        if "simulated workers: rows" in f["name"]
    }
    yield (
        f"How much of the servers do {max(rates):,} workers use at a time? Simulated",
        f"{percent(rates[max(rates)])} of what the servers can do",
        "",
    )
    recoveries = [f["value"] for f in all_of["failover"]["figures"] if "until 90 %" in f["name"]]
    yield (
        "A server is killed, started again, or stopped: when is the rate back at 90 %?",
        f"within {max(recoveries):.1f} s",
        "",
    )
    wire = all_of["wire"]["MB for 1,000 jets"]
    yield (
        "How much is sent for 1,000 jets with 13 features of each constituent?",
        "; ".join(f"{way}: {size:.2g} MB" for way, size in wire.items()),
        "reported for SONIC: up to 12 GiB/s, of 10,000 cores",
    )
    errors = [f["value"] for f in all_of["facility"]["figures"] if "planned" in f["name"]]
    yield "How far is `sonic-coffea plan` off?", f"by {percent(max(errors))} at most", ""


def percent(*parts: float) -> str:
    """Return parts of one in percent: "10, 25 and 50 %"."""
    *first, last = (f"{100 * part:.0f}" for part in parts)
    return f"{', '.join(first)} and {last} %" if first else f"{last} %"


def machine(found: Found) -> str:
    """Return what it was measured on."""
    on = found["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return (
        f"Measured on {on['cores']} cores of a machine that calls itself “{on['processor']}”, "
        f"{on['memory_gb']} GB, Python {on['python']}; {packages}"
    )


def tables(found: Found) -> Iterator[str]:
    """Yield a benchmark's tables in Markdown."""
    if found["measurements"]:
        yield "| | median | middle half | ratio | to | target |"
        yield "|---|---:|---:|---:|---|---|"
        for m in found["measurements"]:
            yield row(
                m["name"],
                duration(m["median_s"]),
                f"{duration(m['lower_s'])} to {duration(m['upper_s'])}",
                "" if m["ratio"] is None else f"{m['ratio']:.3g}",
                m["against"],
                aim(m),
            )
        yield ""
    if found["figures"]:
        yield "| | | target |"
        yield "|---|---:|---|"
        for f in found["figures"]:
            number = f"{f['value']:,.0f}" if f["value"] >= 1000 else f"{f['value']:.3g}"
            yield row(f["name"], number, aim(f))
        yield ""


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def aim(one: Mapping[str, Any]) -> str:
    """Return the target and whether it is met."""
    return f"{one['target']}: {'met' if one['met'] else '**missed**'}" if one["target"] else ""


def duration(seconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def about(name: str) -> str:
    """Return what a benchmark says of itself."""
    return ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""


def folded(title: str, text: str) -> Iterator[str]:
    """Yield text below a line that opens it."""
    yield from ("<details>", f"<summary>{title}</summary>", "", text.strip(), "", "</details>", "")


def page(all_of: Mapping[str, Found]) -> str:
    """Return the page."""
    lines = [_HEAD, "| | answer | compared with |", "|---|---|---|"]
    lines += [row(*cells) for cells in headlines(all_of)]
    lines.append("")
    lines += folded("How this was measured", _MEASURED.format(machine=machine(all_of["pool"])))
    for name, found in all_of.items():
        lines += [f"## {found['benchmark']}", "", about(name), ""]
        lines += [f"![{found['benchmark']}](benchmarks/{name}.svg)", ""]
        details = [_NOTES[name], ""] if name in _NOTES else []
        details += tables(found)
        lines += folded("All figures", "\n".join(details))
        if name == "gpu" and not any("accelerator" in f["name"] for f in found["figures"]):
            lines.append(_GPU)
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
    for name, found in all_of.items():
        # Without the date, and with the same identifiers, a figure changes with its numbers only.
        mpl.rcParams["svg.hashsalt"] = name
        figure = importlib.import_module(name).draw(found)
        figure.savefig(pictures / f"{name}.svg", metadata={"Date": None})
        if folder != RESULTS:
            RESULTS.mkdir(exist_ok=True)
            shutil.copy(folder / f"{name}.json", RESULTS)
    (DOCS / "benchmarks.md").write_text(page(all_of), encoding="utf-8")


if __name__ == "__main__":
    main()
