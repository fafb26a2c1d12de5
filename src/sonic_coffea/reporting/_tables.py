"""HTML: small tables for notebooks, and a report as a page of its own."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#012345"
"""Colour of texts and lines in plots, which the page replaces by that of its text."""

_PAGE_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --line: #d0d7de; --soft: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181d; --ink: #e6e9ee; --line: #3a4049; --soft: #9aa4b0; }
}
* { box-sizing: border-box; }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .25rem; }
dl { display: grid; gap: .15rem 1.25rem; grid-template-columns: max-content 1fr; margin: 0 0 2rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.tables { align-items: start; display: flex; flex-wrap: wrap; gap: 1.5rem 3rem; overflow-x: auto; }
.tables p { flex-basis: 100%; margin: 0; }
table { border-collapse: collapse; }
td:first-child { min-width: 8.5rem; }
tr { border-bottom: 1px solid var(--line); }
caption { font-size: 1.1rem; }
svg { display: block; height: auto; margin-top: 2rem; max-width: 50rem; width: 100%; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
"""

_CELL = "padding:2px 10px;vertical-align:top;white-space:pre-wrap"
_LEFT = f'style="text-align:left;{_CELL}"'
_RIGHT = f'style="text-align:right;{_CELL}"'
# Of the theme's own size of text: notebooks have tables smaller than paragraphs.
_NOTE = 'style="margin:2px 10px;font-size:90%"'


def table(
    title: str,
    rows: Iterable[Sequence[Any]],
    *,
    header: Sequence[str] = (),
    notes: Iterable[str] = (),
    numbers: bool = False,
) -> str:
    """Return a table as HTML, with sentences below; everything in it is escaped.

    With `numbers`, all but the first column hold numbers, which are aligned.
    """

    def line(tag: str, row: Sequence[Any]) -> str:
        cells = "".join(
            f"<{tag} {_RIGHT if numbers and place else _LEFT}>{_escaped(cell)}</{tag}>"
            for place, cell in enumerate(row)
        )
        return f"<tr>{cells}</tr>"

    head = line("th", header) if header else ""
    body = "".join(line("td", row) for row in rows)
    caption = f"<caption {_LEFT}><b>{escape(printable(title))}</b></caption>"
    return f"<table>{caption}{head}{body}</table>{notes_below(notes)}"


def notes_below(sentences: Iterable[str]) -> str:
    """Return sentences as paragraphs that stand below a table."""
    return "".join(f"<p {_NOTE}>{_escaped(sentence)}</p>" for sentence in sentences)


def page(title: str, context: Iterable[tuple[str, str]], tables: str, plots: Figure | None) -> str:
    """Return the page: its heading, names and values, tables as HTML, and plots below."""
    heading = escape(printable(title))
    terms = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(printable(value))}</dd>" for name, value in context
    )
    drawing = ""
    if plots is not None:
        written = io.StringIO()
        plots.savefig(written, format="svg", transparent=True)
        drawing = written.getvalue().replace(INK, "currentColor")
        drawing = drawing[drawing.index("<svg") :].replace(
            "<svg", '<svg role="img" aria-label="times of requests"', 1
        )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{_PAGE_STYLE}</style></head>"
        f'<body><h1>{heading}</h1><dl>{terms}</dl><div class="tables">{tables}</div>'
        f"{drawing}</body></html>\n"
    )


def _escaped(content: Any) -> str:
    return escape(printable(str(content), lines=True))
