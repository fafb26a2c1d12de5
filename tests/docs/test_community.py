"""What contributors and package indices read is there, and agrees with the package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

import sonic_coffea

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


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
