"""Everything that the README, the documentation and the examples say is run as it stands."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA, sample_files

from .support import execute, scored_directly

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMUNITY = sorted((ROOT / ".github").glob("*.md"))
LINKED = [*PAGES, *COMMUNITY, *sorted(EXAMPLES.rglob("*.md")), ROOT / "CHANGELOG.md"]
# What runs in an environment of its own, with `make test-lazy`.
ELSEWHERE = [] if find_spec("dask_awkward") else [ROOT / "docs/how-to/use-dask-awkward.md"]
PARSERS = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}
SHOWN_ONLY = {"text", "mermaid"}
# Commands that would install or build are compared with what there is to run, not run.
NOT_RUN = ("make ", "pip install ")
# What the tests run by themselves, and `.ci/run` need not run again: target and its command.
RUN_BY_TESTS = {"demo": "sonic-coffea demo"}

# Runs the blocks of a page in one namespace; tracebacks point at the lines of the page. Read from
# the command line, so that dask's workers do not run the page again when they start. Tests of a
# page are run by pytest, with the blocks above them.
DRIVER = """
import json, subprocess, sys
namespace, above = {"__name__": "__main__"}, ""
for block in json.load(open(sys.argv[1])):
    if block["language"] == "bash":
        subprocess.run(["bash", "-euo", "pipefail", "-c", block["text"]], check=True)
    else:
        text = "\\n" * (block["line"] - 1) + block["text"]
        exec(compile(text, block["page"], "exec"), namespace)
        above += block["text"]
        if "def test_" in block["text"]:
            open("test_page.py", "w").write(above)
            subprocess.run([sys.executable, "-m", "pytest", "-q", "test_page.py"], check=True)
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
    found, opened = [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number, line.removeprefix("```").strip()
        else:
            lines = page.read_text(encoding="utf-8").splitlines()[opened[0] : number - 1]
            found.append(Block(page, opened[0] + 1, opened[1], "\n".join(lines) + "\n"))
            opened = None
    assert opened is None, f"{page}: the block of line {opened} is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def to_run(page: Path) -> list[Block]:
    chosen = [b for b in blocks_of(page) if b.language in ("python", "bash")]
    return [b for b in chosen if not b.installs]


def needs_server(page: Path) -> bool:
    """Whether the code of a page starts a Triton, or a dask cluster of processes."""
    starts = ("LocalServer(", "Client(", "sonic-coffea ")
    return any(start in block.text for block in to_run(page) for start in starts)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.server] if needs_server(page) else [],
        )
        for page in PAGES
        if to_run(page) and page not in ELSEWHERE
    ],
)
def test_page_runs(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(DATA / "toptagger.onnx", work / "toptagger.onnx")
    shutil.copy(DATA / "toptagger.preprocess.json", work / "preprocess.json")
    shutil.copy(DATA / "TTbar_1.root", work / "nano.root")
    blocks = [
        {"page": str(b.page), "line": b.line, "language": b.language, "text": b.text}
        for b in to_run(page)
    ]
    listed = tmp_path / "blocks.json"
    listed.write_text(json.dumps(blocks), encoding="utf-8")
    execute(["-c", DRIVER, listed], work, environment)


def test_blocks_are_of_known_languages() -> None:
    known = {"python", "bash", *PARSERS, *SHOWN_ONLY}
    strange = [f"{b}: {b.language or 'none'}" for b in BLOCKS if b.language not in known]
    assert not strange
    assert len(BLOCKS) > 20


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in PARSERS], ids=str)
def test_data_is_well_formed(block: Block) -> None:
    assert PARSERS[block.language](block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.installs], ids=str)
def test_installing_is_as_documented(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z]+):(.*)\n((?:\t.*\n)*)", makefile, re.MULTILINE)
    prerequisites = {target: needed.split() for target, needed, _ in rules}
    recipes = {target: recipe for target, _, recipe in rules}
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    checked = " ".join(re.findall(r"^make (.*)$", script, re.MULTILINE)).split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for command in block.commands:
        program, _, rest = command.partition(" ")
        if program == "make":
            assert rest in recipes, command
            if rest in RUN_BY_TESTS:
                assert recipes[rest] == f"\t$(BIN)/{RUN_BY_TESTS[rest]}\n"
            else:
                parts = [rest] if recipes[rest] else prerequisites[rest]
                assert set(parts) <= set(checked), f"{command} is not what .ci/run calls"
        else:
            extras = re.fullmatch(r'pip install "(?:\.|sonic-coffea)(?:\[([a-z,]+)\])?"', command)
            assert extras is not None, command
            assert set((extras[1] or "").split(",")) <= {"", *project["optional-dependencies"]}


def links(page: Path) -> list[str]:
    """Return the links of a page to pages of this repository."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not target.startswith("https://")]


def test_pages_are_linked() -> None:
    assert sum(len(links(page)) for page in LINKED) > 50


@pytest.mark.parametrize(
    "page", list(filter(links, LINKED)), ids=lambda p: str(p.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "index.md" or f"({name})" in index


def test_reference_has_every_public_name_and_option() -> None:
    from sonic_coffea.pool import Settings

    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    names = [n for n in sonic.__all__ if not n.startswith("__")]
    names += [n for n in sonic.errors.__all__ if n != "nearest"]
    names += Settings(servers=()).options()
    assert [n for n in names if not re.search(rf"`[^`\n]*\b{n}\b", reference)] == []


def test_pages_name_nothing_that_is_not_there() -> None:
    names = {
        (page.name, name)
        for page in [*PAGES, EXAMPLES / "README.md"]
        for name in re.findall(r"\bsonic\.([A-Za-z]\w*)[(.]", page.read_text(encoding="utf-8"))
    }
    assert len(names) > 50
    assert [(page, name) for page, name in names if not hasattr(sonic, name)] == []


def test_settings_in_the_reference_are_the_defaults() -> None:
    from sonic_coffea.pool import Settings

    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    options = Settings(servers=()).options().items()
    numbers = {name: value for name, value in options if isinstance(value, (int, float))}
    assert len(numbers) >= 10
    for name, value in numbers.items():
        shown = str(value) if isinstance(value, bool) else f"{value:_}".removesuffix(".0")
        assert f"| `{name}` | {shown} |" in reference


def test_the_scenario_in_the_guide_is_that_of_a_test() -> None:
    guide = ROOT / "docs" / "contributing.md"
    (block,) = (b for b in blocks_of(guide) if "def test_" in b.text and "Scenario(" in b.text)
    _, define, test = block.text.partition("def test_")
    source = (ROOT / "tests" / "pool" / "test_core.py").read_text(encoding="utf-8")
    assert define + test in source


def modules_with_examples() -> list[str]:
    source = ROOT / "src"
    return [
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(source.rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("module", modules_with_examples())
def test_docstring_examples(module: str) -> None:
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.fixture(scope="session")
def analysed(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], installation: Any
) -> dict[str, Any]:
    """What the analysis of the examples makes of two files, on a dask cluster."""
    from coffea.util import load

    work = tmp_path_factory.mktemp("analysis")
    files = [sample_files()[name][0] for name in ("TTbar", "QCD")]
    arguments = [*files, "--workers", "2", "--output", "top.coffea"]
    execute([EXAMPLES / "top_analysis.py", *arguments], work, environment)
    return dict(load(work / "top.coffea"))


def test_analysis_scores_every_jet(analysed: dict[str, Any]) -> None:
    sample = json.loads((DATA / "sample.json").read_text(encoding="utf-8"))["files"]
    for name in ("TTbar_1", "QCD_1"):
        assert analysed["jets"][name] == sample[f"{name}.root"]["fatjets"]
        counted = analysed["top"][name, :].values(flow=True).sum()
        assert counted == sample[f"{name}.root"]["fatjets"]
    # Most jets of QCD are below 0.5, most jets with a high score are from top quarks.
    top, qcd = (analysed["top"][n, :].values() for n in ("TTbar_1", "QCD_1"))
    assert qcd[: len(qcd) // 2].sum() > 0.8 * qcd.sum()
    assert top[-2:].sum() > 10 * qcd[-2:].sum()


def test_analysis_equals_direct_inference(analysed: dict[str, Any]) -> None:
    expected = np.histogram(scored_directly(DATA / "TTbar_1.root"), bins=20, range=(0, 1))[0]
    found = analysed["top"]["TTbar_1", :].values()
    # A score at the edge of a bin may fall to either side.
    assert np.abs(found - expected).sum() <= 4


def test_model_by_hand_equals_the_mixin(
    analysed: dict[str, Any], tmp_path: Path, environment: dict[str, str]
) -> None:
    printed = execute([EXAMPLES / "by_hand.py", DATA / "TTbar_1.root"], tmp_path, environment)
    counts = [int(n) for n in printed.splitlines()[-1].split()]
    assert np.abs(np.asarray(counts) - analysed["top"]["TTbar_1", :].values()).sum() <= 4
