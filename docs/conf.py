"""The documentation as a site: ``make docs``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mermaidx
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from sonic_coffea import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "sonic-coffea"
version = release = __version__
root_doc = "contents"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_show_copyright = False
html_title = f"sonic-coffea {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
# Names are looked up in the analysis' own pages only: a build needs no network.
numpydoc_show_class_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
# Pages link to files of the repository, too, which a test checks.
suppress_warnings = ["myst.xref_missing"]


class Mermaid(SphinxDirective):
    """Draws a block of mermaid into the page, without a browser; ``site.css`` has its colours."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the picture; in what is not HTML, the text."""
        text = "\n".join(self.content)
        config = {
            "htmlLabels": False,
            "themeVariables": {"fontSize": "14px", "fontFamily": "Arial, sans-serif"},
            "flowchart": {
                "htmlLabels": False,
                "wrappingWidth": 280,
                "padding": 12,
                "rankSpacing": 30,
            },
            "sequence": {"mirrorActors": False, "width": 110, "height": 40, "actorMargin": 30},
        }
        svg = mermaidx.render(text, theme="base", config=config).svg()
        svg = svg.replace("my-svg", f"mermaid-{self.env.new_serialno('mermaid')}")
        # As wide as it is: a page that is narrower lets it be scrolled.
        svg = svg.replace('width="100%"', "", 1).replace("max-width:", "width:", 1)
        # Without mermaid's own colours, which are those of a light page.
        head, _, rest = svg.partition("<style>")
        picture = f'<div class="mermaid">{head}{rest.partition("</style>")[2]}</div>'
        return [nodes.raw("", picture, format="html"), nodes.raw("", text, format="text")]


def setup(app: Sphinx) -> None:
    """Have blocks of mermaid drawn."""
    app.add_directive("mermaid", Mermaid)
