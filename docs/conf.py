"""The documentation as a site: ``make docs``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

from sonic_coffea import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "sonic-coffea"
version = release = __version__
root_doc = "contents"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"sonic-coffea {version}"
# Names are looked up in the analysis' own pages only: a build needs no network.
numpydoc_show_class_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
myst_heading_anchors = 3
# Pages link to files of the repository, too, which a test checks.
suppress_warnings = ["myst.xref_missing"]


def setup(app: Sphinx) -> None:
    """Show what the site draws no picture of as the text that it is."""
    app.add_lexer("mermaid", TextLexer)
