"""Compare two results of the benchmarks: list what became slower, or faster, beyond the noise.

A measurement with a peer or a limit is compared by its ratio, because a machine that is slower
today is slower for both; any other measurement is compared by its time. It has changed if the
middle halves of both runs do not overlap and the medians differ by more than 5 %. Numbers that are
not times are compared by their targets. Measurements that are missing, or have another peer, are
named. The exit code is 1 if a measurement became slower, or misses a target that it met.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAST, FEWEST = 1.05, 5
SLOWER, FASTER, SAME = "[red]slower[/]", "[green]faster[/]", ""
TOO_FEW = "measured too few times to tell"
GONE = "[yellow]not measured any more[/]"
MISSES, MEETS = "[red]misses its target now[/]", "[green]meets its target now[/]"


def spread(result: dict[str, Any]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of a ratio, or else of a time."""
    if result["ratio"] is not None:
        return result["lower_ratio"], result["ratio"], result["upper_ratio"]
    return result["lower_s"], result["median_s"], result["upper_s"]


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each earlier number, its ratio, and how it has changed."""
    later = {(m["name"], m["against"]): m for m in after["measurements"]}
    for result in before["measurements"]:
        name, other = result["name"], later.get((result["name"], result["against"]))
        if other is None:
            yield name, "", GONE
            continue
        then, now = spread(result), spread(other)
        ratio = now[1] / then[1]
        verdict = SAME
        if min(result["repeats"], other["repeats"]) < FEWEST:
            verdict = TOO_FEW
        elif now[0] > then[2] and ratio > LEAST:
            verdict = SLOWER
        elif now[2] < then[0] and ratio < 1 / LEAST:
            verdict = FASTER
        yield name, f"{ratio:.2f}", verdict
    met = {f["name"]: f for f in before["figures"]}
    for now in after["figures"]:
        then = met.get(now["name"])
        if then is None or not now["target"]:
            continue
        verdict = SAME if now["met"] == then["met"] else MEETS if now["met"] else MISSES
        yield now["name"], f"{then['value']:.3g} to {now['value']:.3g}", verdict


def files(before: Path, after: Path) -> list[tuple[Path, Path]]:
    """Return the pairs of files to compare, of two files or two folders."""
    if not (before.is_dir() and after.is_dir()):
        return [(before, after)]
    names = sorted({p.name for p in before.glob("*.json")} & {p.name for p in after.glob("*.json")})
    return [(before / name, after / name) for name in names]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="a file that a benchmark wrote, or their folder")
    parser.add_argument("after", type=Path, help="a later one")
    parser.add_argument("--all", action="store_true", help="show also what is as before")
    options = parser.parse_args()
    pairs = files(options.before, options.after)
    if not pairs:
        sys.exit(f"{options.before} and {options.after} have no results of the same benchmark")
    console, worse, compared = Console(), 0, 0
    for old, new in pairs:
        try:
            before, after = (json.loads(p.read_text(encoding="utf-8")) for p in (old, new))
            verdicts = list(changes(before, after))
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"{old} or {new} is not what a benchmark writes: {error!r}")
        if before["machine"] != after["machine"]:
            console.print(f"{new.name}: [yellow]measured on another machine[/]")
        compared += sum(verdict != GONE for *_, verdict in verdicts)
        worse += sum(verdict in (SLOWER, MISSES) for *_, verdict in verdicts)
        shown = [row for row in verdicts if options.all or row[2]]
        if shown:
            table = Table(title=after["benchmark"], title_justify="left")
            for column in ("", "after over before", ""):
                table.add_column(column)
            for row in shown:
                table.add_row(*row)
            console.print(table)
    console.print(f"{compared} compared; {worse} got worse")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
