"""Makes pages of the examples, and points links at them or at the repository."""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
EXAMPLES, PAGES = ROOT / "examples", DOCS / "examples"
_LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
_SHOWN = {".py": "python", ".yaml": "yaml", ".json": "json", ".conf": "nginx"}
# Long, and read only by programs.
_FOLDED = {"grafana.json"}


def pages() -> dict[Path, Path]:
    """Return the pages of the site, by the files of the repository that they show."""
    page_of = {ROOT / "README.md": DOCS / "index.md", ROOT / "CHANGELOG.md": DOCS / "changelog.rst"}
    for readme in sorted(EXAMPLES.rglob("README.md")):
        page_of[readme] = PAGES / readme.relative_to(EXAMPLES).with_name("index.md")
        for link in _LINK.finditer(readme.read_text(encoding="utf-8")):
            file = (readme.parent / link[1]).resolve()
            if not file.is_relative_to(EXAMPLES):
                continue
            page = PAGES / file.relative_to(EXAMPLES)
            if file.suffix == ".ipynb":
                page_of[file] = page
            elif file.suffix in _SHOWN and file.name not in _FOLDED:
                page_of[file] = page.with_suffix(".md")
    return page_of


def write(_app: Sphinx, _config: Any) -> None:
    """Write the pages of the examples."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for file, page in pages().items():
        if not page.is_relative_to(PAGES):
            continue
        page.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            text = file.read_text(encoding="utf-8").replace("```console", "```text")
            page.write_text(_led(text, file, page) + _contents(page), encoding="utf-8")
        elif file.suffix == ".ipynb":
            notebook = nbformat.read(file, as_version=4)
            for cell in notebook.cells:
                if cell.cell_type == "markdown":
                    cell.source = _led(cell.source, file, page)
            nbformat.write(notebook, page)
        else:
            page.write_text(_listing(file, page), encoding="utf-8")


def _contents(page: Path) -> str:
    """Return a hidden table of contents of the pages in a folder, and of those below it."""
    here = [p for p in pages().values() if p != page and p.is_relative_to(page.parent)]
    inner = {p.parent for p in here if p.name == "index.md"}
    lines = [
        p.relative_to(page.parent).with_suffix("").as_posix()
        for p in here
        if p.name == "index.md" or p.parent not in inner
    ]
    if not lines:
        return ""
    return "\n".join(["", "```{toctree}", ":hidden:", "", *lines, "```", ""])


def _listing(file: Path, page: Path) -> str:
    """Return a page with the text of a file, below a program's own description."""
    about, lines = "", ""
    if file.suffix == ".py":
        module = ast.parse(file.read_text(encoding="utf-8"))
        about = re.sub(
            r"\n\n(python .*)",
            r"\n\n```text\n\1\n```",
            ast.get_docstring(module) or "",
            flags=re.DOTALL,
        )
        lines = f":lines: {module.body[0].end_lineno + 1}-\n"
    source = os.path.relpath(file, page.parent)
    block = f"```{{literalinclude}} {source}\n:language: {_SHOWN[file.suffix]}\n{lines}```\n"
    return f"# {file.name}\n\n{about}\n\n{block}"


def _led(text: str, file: Path, page: Path) -> str:
    """Return the text of a file as a page elsewhere, with links to the same targets."""
    known = pages()

    def lead(link: re.Match[str]) -> str:
        target = (file.parent / link[1]).resolve()
        target = known.get(target, target)
        if target.is_dir() and (target / "README.md") in known:
            target = known[target / "README.md"]
        if target.is_relative_to(DOCS):
            return os.path.relpath(target, page.parent) + (link[2] or "")
        kind = "tree" if target.is_dir() else "blob"
        return f"{_HOME}/{kind}/main/{target.relative_to(ROOT)}"

    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(p if p.startswith("```") else _LINK.sub(lead, p) for p in parts)


_HOME = "https://github.com/sonic-coffea/sonic-coffea"


def lead_links(app: Sphinx, name: str, source: list[str]) -> None:
    """Point a page's links to files of the repository at the site's pages of them."""
    page = Path(app.env.doc2path(name))
    if page.suffix == ".md" and not page.is_relative_to(PAGES):
        source[0] = _led(source[0], page, page)


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages before any is read."""
    app.connect("config-inited", write)
    app.connect("source-read", lead_links)
    return {"parallel_read_safe": True}
