"""Running what users run, and scoring without this package's help."""

from __future__ import annotations

import doctest
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.scripts import python

from sonic_coffea.demo.samples import DATA

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Commands that would install or build are compared with what there is to run, not run.
NOT_RUN = ("make ", "pip install ")
# Runs the blocks of pages, each page in its folder, with names of its own; tracebacks point at the
# lines of the page. Read from the command line, so that dask's workers do not run the page again
# when they start. Tests of a page are run by pytest, with the blocks above them. What blocks print
# is kept by their line.
DRIVER = """
import atexit, contextlib, io, json, os, subprocess, sys
page, printed = None, {}
for block in json.load(open(sys.argv[1])):
    if block["page"] != page:
        page, namespace, above = block["page"], {"__name__": "__main__"}, ""
        os.chdir(block["folder"])
    output = io.StringIO()
    if block["language"] == "bash":
        # A file: what a block leaves running would hold a pipe open.
        with open("output.txt", "w+") as out:
            shell = ["bash", "-euo", "pipefail", "-c", block["text"]]
            subprocess.run(shell, check=True, stdout=out)
        output.write(open("output.txt").read())
    else:
        text = "\\n" * (block["line"] - 1) + block["text"]
        try:
            with contextlib.redirect_stdout(output):
                exec(compile(text, block["page"], "exec"), namespace)
        except BaseException:
            sys.stderr.write(output.getvalue())
            raise
        above += block["text"]
        if "def test_" in block["text"]:
            open("test_page.py", "w").write(above)
            subprocess.run([sys.executable, "-m", "pytest", "-q", "test_page.py"], check=True)
    printed[block["at"]] = output.getvalue()
    json.dump(printed, open(sys.argv[2], "w"))
# pyarrow's threads abort one in ten processes that end right after ak.from_parquet.
atexit._run_exitfuncs()
os._exit(0)
"""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        return [line for line in self.text.splitlines() if line and not line.startswith("#")]

    @property
    def installs(self) -> bool:
        return self.language == "bash" and any(c.startswith(NOT_RUN) for c in self.commands)


def blocks_of(page: Path) -> list[Block]:
    blocks, opened = [], None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number, line.removeprefix("```").strip()
        else:
            text = "\n".join(lines[opened[0] : number - 1])
            blocks.append(Block(page, opened[0] + 1, opened[1], f"{text}\n"))
            opened = None
    assert opened is None, f"{page}: the block of line {opened} is not closed"
    return blocks


def to_run(page: Path) -> list[Block]:
    return [b for b in blocks_of(page) if b.language in ("python", "bash") and not b.installs]


def clean_environment(state: Path) -> dict[str, str]:
    """Return a user's: this Python first, no display, a place of its own for state."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DASK_SONIC", "PYTEST"))}
    return {
        **clean,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "MPLBACKEND": "Agg",
        "SONIC_COFFEA_STATE_DIR": str(state),
    }


def run_pages(
    pages: Sequence[Path], folder: Path, environment: dict[str, str], *, language: str = ""
) -> dict[str, str]:
    """Run the blocks of pages, each in a folder of its stem, beside the sample and the example.

    Each page has names of its own, and all run in one process. `language` chooses blocks.

    Returns
    -------
    dict
        What the blocks printed, by page and line.
    """
    blocks = []
    for page in pages:
        work = folder / page.stem
        work.mkdir(exist_ok=True)
        shutil.copy(DATA / "toptagger.onnx", work)
        shutil.copy(DATA / "toptagger.preprocess.json", work / "preprocess.json")
        shutil.copy(DATA / "TTbar_1.root", work / "nano.root")
        shutil.copy(ROOT / "examples" / "top_analysis.py", work)
        chosen = (b for b in to_run(page) if language in ("", b.language))
        of_page = {"page": str(page), "folder": str(work)}
        blocks += [
            {"line": b.line, "language": b.language, "text": b.text, "at": str(b), **of_page}
            for b in chosen
        ]
    assert blocks
    listed, printed = folder / "blocks.json", folder / "printed.json"
    listed.write_text(json.dumps(blocks), encoding="utf-8")
    python("-c", DRIVER, listed, printed, cwd=folder, env=environment, timeout_s=500)
    return json.loads(printed.read_text(encoding="utf-8"))


def outputs_of(page: Path) -> list[tuple[Block, Block]]:
    """Return the blocks that show what the block above them prints, with that block."""
    return [(a, b) for a, b in pairwise(blocks_of(page)) if b.language == "output"]


def check_outputs(page: Path, printed: dict[str, str]) -> None:
    """Compare what blocks printed with what the page shows, where `...` stands for anything."""
    for block, shown in outputs_of(page):
        got, expected = of_any_run(printed[str(block)]), of_any_run(shown.text)
        same = doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS)
        assert same, f"{block} prints\n{got}\nand the page shows\n{expected}"


def of_any_run(text: str) -> str:
    """Return an output without what another run has otherwise: bars, ports, times, widths."""
    text = re.sub(r"unix:/[\w./-]+/grpc(:1)?", "unix:PATH", text)
    kept = [line for line in text.splitlines() if not re.match(r"(Prep|P)rocessing .*\]$", line)]
    for i, line in enumerate(kept):
        if "│" in line:  # of a table, the words count
            kept[i] = re.sub(r"\d[\d,.]*( ?(ms|s|µs|MB|%))?\b%?", "N", line)
    text = "\n".join(kept)
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)
    text = re.sub(r"\d[\d.]* (ms|s|µs)\b", "N", text)
    return re.sub(r"\s+", " ", re.sub(r"[─━]+", "─", text)).strip() + "\n"
