"""The documentation as a site: ``make docs``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

from sonic_coffea import __version__, errors

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "extensions"))
elsewhere = importlib.import_module("elsewhere")

project = "sonic-coffea"
version = release = __version__
root_doc = "index"
extensions = [
    "examples",
    "mermaid",
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]

html_theme = "furo"
html_show_copyright = False
html_title = "sonic-coffea"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": "https://github.com/sonic-coffea/sonic-coffea",
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#0b66a8", "color-brand-content": "#0b66a8"},
    "dark_css_variables": {"color-brand-primary": "#6cb6ff", "color-brand-content": "#6cb6ff"},
}
pygments_dark_style = "github-dark"

# The pages in `api/` name what is public; autosummary makes a page of each docstring.
autosummary_generate = True
autosummary_context = {
    # The members that users call, of classes that have others, too.
    "shown": {
        **dict.fromkeys(("Row", "Mask", "Bucketed", "Flat", "Dense", "Pairwise"), "pack"),
        **dict.fromkeys(("Padded", "Tokens"), "pack, unpack"),
        "Checks": "ok, rows, to_dict",
        "FakeServer": "start, stop, url, inject, fail, answer_wrongly, refuse, accept, hold, "
        "release, unload, load",
        "Layout": "columns, bind, row_shape, write, pack, unpack",
        "Model": "from_weaver, from_yaml, config_hash, check, pack, submit",
        "Pending": "done, cancel, result, statistics, provenance",
        "Pool": "close, servers, set_servers, contract, statistics",
        "Settings": "make, options, with_options, from_config",
        "SonicProcessor": "acquire, overlap, produce",
        "Statistics": "scored, total, to_plain, from_plain",
        "Tally": "latency_s",
    }
}
# `Output` in a docstring links to its page, and is code where it has none.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
numpydoc_xref_aliases = elsewhere.WORDS | {
    **{name: f"sonic_coffea.errors.{name}" for name in vars(errors) if name.endswith("Error")},
    "Ensemble": "sonic_coffea.server.Ensemble",
    "Model": "sonic_coffea.Model",
    "Report": "sonic_coffea.Report",
    "ScoredFiles": "sonic_coffea.scoring.ScoredFiles",
    "Served": "sonic_coffea.server.Served",
    "Settings": "sonic_coffea.pool.Settings",
    "Statistics": "sonic_coffea.reporting.Statistics",
}
# Words in types that are not names of types, and types without a page.
numpydoc_xref_ignore = {
    *("a", "coffea", "default", "mapping", "matplotlib", "number", "of", "optional", "or"),
    *("output", "path", "path-like", "them", "to"),
    *("hist.Hist", "Part", "Received", "ServerInstall", "Span", "Step"),
}
# Inventories of other packages are made here, so a build needs no network.
intersphinx_mapping = elsewhere.inventories(HERE / "_build" / "inventories")

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
# The site shows notebooks as they are in the repository; `python docs/notebooks.py` runs them.
nb_execution_mode = "off"
# Quotes often enclose a value that readers copy: leave them straight.
smartquotes = False
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = ":not(.highlight-output, .highlight-text, .output) > div.highlight > pre"


def setup(app: Sphinx) -> None:
    """Show what a block prints without highlighting."""
    app.add_lexer("output", TextLexer)
