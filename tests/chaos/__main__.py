"""``python -m tests.chaos --seconds 600 --seed 7``: see `tests.chaos.run`."""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tests.chaos.run import run

if TYPE_CHECKING:
    from tests.chaos.run import Outcome


def shown(outcome: Outcome) -> Table:
    """Return a summary."""
    faults = ", ".join(f"{number} {kind}" for kind, number in outcome.faults.most_common())
    table = Table(title=f"Chaos, seed {outcome.seed}", show_header=False, title_justify="left")
    for label, value in (
        ("options", ", ".join(f"{name}={value}" for name, value in outcome.options.items())),
        ("calls of threads", f"{outcome.calls:,}, and {outcome.cancelled:,} cancelled"),
        ("tasks of workers", f"{outcome.tasks:,}"),
        ("rows, each as by direct inference", f"{outcome.rows:,}"),
        ("retries of the threads' requests", f"{outcome.retries:,}"),
        ("longest call", f"{outcome.longest[0]:.2f} s, {outcome.longest[1]}"),
        ("faults", f"{outcome.faults.total()}: {faults}"),
    ):
        table.add_row(label, value)
    return table


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, help="by default another one each time")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    console = Console()
    console.print(f"seed {seed}; the same again with SEED={seed} SECONDS={options.seconds:g}")
    folder = Path(tempfile.mkdtemp(prefix="sonic-chaos-"))
    os.environ["SONIC_COFFEA_STATE_DIR"] = str(folder)
    # That servers are lost is what is meant.
    os.environ["DASK_LOGGING__SONIC_COFFEA"] = "error"
    logging.basicConfig(
        filename=folder / "client.log", level=logging.INFO, format="%(asctime)s %(message)s"
    )
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(outcome: Outcome, part: float) -> None:
            last = outcome.timeline[-1].split("s  ")[-1] if outcome.timeline else ""
            text = f"{outcome.calls + outcome.tasks} calls, {outcome.rows:,} rows; {last}"
            progress.update(task, completed=part, description=text)

        outcome = run(seed, options.seconds, folder, show)
    console.print(shown(outcome))
    if outcome.problems:
        lines = ["", "what was broken, and when:", *outcome.timeline]
        lines += ["", "what is wrong:", *outcome.problems]
        lines += ["", f"seed {seed}; logs are in {folder}"]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
