"""Draws mermaid diagrams when the site is built, without a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mermaidx
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx


class Mermaid(SphinxDirective):
    """Draws a block of mermaid into the page, without a browser; ``site.css`` has its colours."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the picture, or the text outside of HTML."""
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
        # As wide as it is, or as the page, if that is narrower.
        svg = svg.replace('width="100%"', "", 1).replace("max-width:", "width:", 1)
        # Without mermaid's own colours, which are those of a light page.
        head, _, rest = svg.partition("<style>")
        picture = f'<div class="mermaid">{head}{rest.partition("</style>")[2]}</div>'
        return [nodes.raw("", picture, format="html"), nodes.raw("", text, format="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Draw blocks of mermaid."""
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True}
