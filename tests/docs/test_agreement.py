"""Pages quote the tables and messages of the code, and what package indices read agrees with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from typing import Any

import pytest
import typer
import yaml

import sonic_coffea
from sonic_coffea.cli._main import app
from sonic_coffea.layouts._expressions import FUNCTIONS, REDUCTIONS
from sonic_coffea.reporting import Statistics, Tally
from sonic_coffea.transport._failures import FAILURES, SILENT, Failure

from .support import PROJECT, ROOT

DOCS = ROOT / "docs"


def kin(row: Failure) -> Any:
    return row.codes, row.phase, row.error


def signs(row: Failure) -> list[str]:
    """Return how a row is known: by words, by a trailer, or by its status alone."""
    if row.trailer:
        return [f"trailer `{row.trailer}`"]
    return [{"": "others", SILENT: "none"}.get(words, f"`{words}`") for words in row.words]


def table() -> str:
    lines = ["| status | words | from | error |", "|---|---|---|---|"]
    for (codes, phase, error), rows in groupby(FAILURES, kin):
        status = ", ".join(code.name for code in codes) or "any"
        words = ", ".join(sign for row in rows for sign in signs(row))
        lines.append(f"| {status} | {words} | {phase} | `{error.__name__}` |")
    return "\n".join(lines)


def test_the_page_has_the_table_of_failures() -> None:
    page = (DOCS / "facilities" / "grpc-failures.md").read_text(encoding="utf-8")
    assert table() in page, f"expected:\n{table()}"


def test_every_error_of_the_table_says_what_the_pool_does() -> None:
    page = (DOCS / "how-to" / "handle-failures.md").read_text(encoding="utf-8")
    assert {row.error.__name__ for row in FAILURES} <= set(re.findall(r"`(\w+Error)`", page))


def texts_of_the_package() -> Iterator[str]:
    """Yield all texts of the package, where `…` stands for what is filled in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_listed_messages_are_what_the_package_says() -> None:
    page = (DOCS / "errors-by-message.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 20
    texts = "\0".join(texts_of_the_package())
    for message in quoted:
        pattern = "[^\0]*".join(map(re.escape, message.strip("…").split("…")))
        assert re.search(pattern, texts), message


def test_the_reference_lists_the_functions_of_expressions() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    _, _, listed = page.partition("An expression has")
    listed, _, _ = listed.partition("`function` may be")
    assert {*FUNCTIONS, *REDUCTIONS} <= set(re.findall(r"\w+", listed))


def test_the_reference_lists_the_statistics() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    _, _, listed = page.partition("have these counts:")
    names = {field.name for kind in (Statistics, Tally) for field in fields(kind) if field.init}
    assert names - {"latencies", "tallies", "digests"} <= set(re.findall(r"\w+", listed))


def test_the_reference_lists_the_commands() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    top: Any = typer.main.get_command(app)
    inner = {name: getattr(each, "commands", [""]) for name, each in top.commands.items()}
    known = {f"{name} {each}".strip() for name, of in inner.items() for each in of}
    listed = re.findall(r"^\| `([a-z ]*[a-z])", page.partition("## Commands")[2], re.MULTILINE)
    assert known <= {*listed}


@pytest.mark.parametrize("name", ["contributing", "extending", "packing", "request"])
def test_guides_name_files_and_tables_that_are_there(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    folders = [ROOT / folder for folder in ("src", "tests", "docs", "benchmarks")]
    files = [path.as_posix() for folder in folders for path in folder.rglob("*")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in folders[0].rglob("*.py"))
    named = re.findall(r"`([\w/.]+\.(?:pyi?|yaml|md|rst))`", page)
    missing = [path for path in named if not any(file.endswith(f"/{path}") for file in files)]
    missing += [
        table for table in re.findall(r"`(_?[A-Z_]{5,})`", page) if f"\n{table}" not in code
    ]
    assert [name for name in missing if "NAME" not in name] == []


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == sonic_coffea.__version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_recipe_for_conda_needs_what_the_package_needs() -> None:
    recipe = yaml.safe_load((ROOT / ".ci" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == sonic_coffea.__version__
    run = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    extras = r"\[[a-z,]+\]"
    needed = {re.sub(extras, "", line) for line in PROJECT["project"]["dependencies"]}
    assert run == needed | {f"python{PROJECT['project']['requires-python']}"}


def test_links_of_the_readme_lead_to_the_repository() -> None:
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for rule in hook["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    links = re.findall(r"\]\(([^)]+)\)", text)
    home = PROJECT["project"]["urls"]["Homepage"]
    assert sum(link.startswith(f"{home}/blob/main/") for link in links) > 10
    assert all(link.startswith(("https://", "#")) for link in links)


def test_workflows_call_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = path.read_text(encoding="utf-8")
        assert yaml.safe_load(workflow)["jobs"]
        for target in re.findall(r"\bmake (?:--directory \S+ )?([a-z-]+)", workflow):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (path.name, target)
