"""Everything that the README, the documentation and the examples say is run as it stands."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from coffea.util import load
from tests.direct import direct_scores
from tests.scripts import python

import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA, sample_files

from .support import (
    PROJECT,
    ROOT,
    Block,
    blocks_of,
    check_outputs,
    outputs_of,
    run_pages,
    to_run,
    tomllib,
)

pytestmark = pytest.mark.timeout(600)

EXAMPLES = ROOT / "examples"
# Those that `make docs` makes of the examples are tested as examples.
MADE = ROOT / "docs" / "examples", ROOT / "docs" / "_build"
DOCS = (p for p in (ROOT / "docs").rglob("*.md") if not any(map(p.is_relative_to, MADE)))
PAGES = [ROOT / "README.md", *sorted(DOCS)]
COMMUNITY = sorted((ROOT / ".github").glob("*.md"))
LINKED = [*PAGES, *COMMUNITY, *sorted(EXAMPLES.rglob("*.md")), ROOT / "CHANGELOG.md"]
# What `tests/facilities` runs, on a real Slurm and a real dask-gateway.
ELSEWHERE = [ROOT / "docs/facilities" / f"{name}.md" for name in ("slurm", "purdue-af")]
ELSEWHERE.append(ROOT / "docs/how-to/use-coffea-0.7.md")  # in an environment of coffea 0.7
# Run in environments of their own, by `make image` and by `nox -s pages`.
OTHER_PACKAGES = {
    "use-dask-awkward": ("dask_awkward",),
    "export-a-network": ("torch", "keras", "skl2onnx", "catboost"),
    "use-columnflow": ("columnflow",),
    "use-graphed": ("graphed",),
}
for name, packages in OTHER_PACKAGES.items():
    if not all(map(find_spec, packages)):
        ELSEWHERE.append(ROOT / "docs/how-to" / f"{name}.md")
PARSERS = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}
SHOWN_ONLY = {"text", "mermaid", "output"}

BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def starts(page: Path, *calls: str) -> bool:
    """Whether the code of a page starts a Triton or a dask cluster by one of these."""
    return any(call in block.text for block in to_run(page) for call in calls)


# With PAGE=docs/tutorial.md in the environment, one page.
RUN = [page for page in PAGES if to_run(page) and page not in ELSEWHERE]
RUN = [page for page in RUN if os.environ.get("PAGE", "") in str(page)]
ALONE = [page for page in RUN if page.stem in OTHER_PACKAGES]
TOGETHER = [page for page in RUN if page not in ALONE]
CLUSTERS = [page for page in TOGETHER if starts(page, "Client(")]
SERVERS = [page for page in TOGETHER if starts(page, "LocalServer(", "sonic-coffea ")]
KINDS = {
    **{str(page.relative_to(ROOT)): [page] for page in ALONE},
    "dask": CLUSTERS,
    "a Triton": [page for page in SERVERS if page not in CLUSTERS],
    "neither": [page for page in TOGETHER if page not in (*CLUSTERS, *SERVERS)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(pages, id=kind, marks=[pytest.mark.server] if kind != "neither" else [])
        for kind, pages in KINDS.items()
        if pages
    ],
)
def test_page_runs(pages: list[Path], tmp_path: Path, environment: dict[str, str]) -> None:
    """All of a kind in one process, which spares the others' imports."""
    printed = run_pages(pages, tmp_path, environment)
    for page in pages:
        check_outputs(page, printed)


def test_blocks_are_of_known_languages() -> None:
    known = {"python", "bash", *PARSERS, *SHOWN_ONLY}
    strange = [f"{b}: {b.language or 'none'}" for b in BLOCKS if b.language not in known]
    assert not strange
    assert len(BLOCKS) > 20


def test_outputs_stand_below_blocks_that_run() -> None:
    pairs = [pair for page in PAGES for pair in outputs_of(page)]
    assert len(pairs) == sum(b.language == "output" for b in BLOCKS) > 0
    assert [f"{shown}" for block, shown in pairs if block not in to_run(block.page)] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in PARSERS], ids=str)
def test_data_is_well_formed(block: Block) -> None:
    assert PARSERS[block.language](block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.installs], ids=str)
def test_installing_is_as_documented(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in block.commands:
        program, _, rest = command.partition(" ")
        if program == "make":
            assert re.search(rf"^{rest}:", makefile, re.MULTILINE), command
        else:
            extras = re.fullmatch(r'pip install "(?:\.|sonic-coffea)(?:\[([a-z,]+)\])?"', command)
            assert extras is not None, command
            known = PROJECT["project"]["optional-dependencies"]
            assert set((extras[1] or "").split(",")) <= {"", *known}


def links(page: Path) -> list[str]:
    """Return the links of a page to pages of this repository."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not target.startswith("https://")]


@pytest.mark.parametrize(
    "page", list(filter(links, LINKED)), ids=lambda p: str(p.relative_to(ROOT))
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_reference_has_every_public_name_and_option() -> None:
    from sonic_coffea.pool import Settings

    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    names = [n for n in sonic.__all__ if not n.startswith("__")]
    names += ["find", *(n for n in vars(sonic.errors) if n.endswith("Error"))]
    names += Settings(servers=()).options()
    assert [n for n in names if not re.search(rf"`[^`\n]*\b{n}\b", reference)] == []


def test_pages_name_public_names_only() -> None:
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
    known = {name: value for name, value in options if isinstance(value, (int, float, str))}
    assert len(known) >= 11
    for name, value in known.items():
        words = f'"{value}"' if isinstance(value, str) else str(value)
        is_number = not isinstance(value, (bool, str))
        shown = f"{value:_}".removesuffix(".0") if is_number else words
        assert f"| `{name}` | {shown} |" in reference


def test_the_scenario_in_the_guide_is_that_of_a_test() -> None:
    guide = ROOT / "docs" / "request.md"
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
def test_docstring_examples_run(module: str) -> None:
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.slow
@pytest.mark.server
def test_the_analysis_scores_every_jet_as_direct_inference(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """That of the examples, on a dask cluster."""
    files = [sample_files()[name][0] for name in ("TTbar", "QCD")]
    arguments = [*files, "--workers", "1", "--output", "top.coffea"]
    script = EXAMPLES / "top_analysis.py"
    python(script, *arguments, cwd=tmp_path, env=environment, timeout_s=500)
    analysed = load(tmp_path / "top.coffea")
    sample = json.loads((DATA / "sample.json").read_text(encoding="utf-8"))["files"]
    for file in files:
        assert analysed["jets"][str(file)] == sample[file.name]["fatjets"]
        counted = analysed["top"][str(file), :].values(flow=True).sum()
        assert counted == sample[file.name]["fatjets"]
    direct = [top for tops in direct_scores("TTbar_1").values() for top in tops]
    expected = np.histogram(direct, bins=20, range=(0, 1))[0]
    counts = analysed["top"][str(files[0]), :].values()
    # A score at the edge of a bin may fall to either side.
    assert np.abs(counts - expected).sum() <= 4


PAGE = ROOT / "docs" / "how-to" / "use-coffea-0.7.md"
UV = shutil.which(
    "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)


def python_3_10() -> str | None:
    """Return a Python of this machine that coffea 0.7 runs on."""
    if UV is None:
        return None
    environment = dict(os.environ)
    if shutil.which("pyenv"):  # its commands fail for every Python but the chosen ones
        listed = subprocess.run(
            ["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False
        )
        environment["PYENV_VERSION"] = ":".join(listed.stdout.split())
    find = [UV, "python", "find", "--no-project", "--no-python-downloads", "3.10"]
    found = subprocess.run(find, env=environment, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


@pytest.mark.slow
def test_scores_join_in_an_environment_of_coffea_0_7(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    old = python_3_10()
    if UV is None or old is None:
        pytest.skip("needs uv and Python 3.10")
    run_pages([PAGE], tmp_path, environment, language="bash")
    packages = ["coffea==0.7.31", "pyarrow", "setuptools<80"]
    for command in (["venv", "-qp", old, "old"], ["pip", "install", "-qp", "old", *packages]):
        subprocess.run([UV, *command], cwd=tmp_path, check=True)
    (block,) = (block for block in blocks_of(PAGE) if block.language == "python")
    done = subprocess.run(
        [tmp_path / "old" / "bin" / "python", "-W", "ignore", "-c", block.text],
        cwd=tmp_path / PAGE.stem,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


def words(text: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", text)


def curves(text: str) -> dict[str, Any]:
    paths = re.findall(r'<g id="(in-flight-[^"]+)">\s*<path d="([^"]+)"', text)
    return {name: np.asarray(re.findall(r"[\d.]+", path), float) for name, path in paths}


@pytest.mark.slow
def test_pictures_are_as_they_would_be_drawn(tmp_path: Path) -> None:
    """If not, run ``python docs/draw.py``; other versions of matplotlib may draw a little off."""
    from docs import draw  # which imports much

    draw.draw(tmp_path)
    assert sorted(draw.PICTURES) == [p.stem for p in PICTURES]
    for picture in PICTURES:
        then = picture.read_text(encoding="utf-8")
        now = (tmp_path / picture.name).read_text(encoding="utf-8")
        assert words(now) == words(then) != [], picture
        assert list(curves(now)) == list(curves(then)), picture
        for name, curve in curves(now).items():
            np.testing.assert_allclose(curve, curves(then)[name], atol=1.0)
        assert bool(curves(now)) == (picture.stem == "limits")
