"""Tables by rich: in terminals as they are, in notebooks and pages as HTML."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

_PAGE_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
svg { display: block; height: auto; margin-top: 2rem; max-width: 50rem; width: 100%; }
@media (prefers-color-scheme: dark) { svg { filter: invert(1) hue-rotate(180deg); } }
"""
_PRE = '<pre style="line-height:1.2;overflow-x:auto;white-space:pre">{code}</pre>'


def described(
    title: str, rows: Iterable[Sequence[Any]], *, header: Sequence[Any] = (), numbers: bool = False
) -> Table:
    """Return a table whose texts are shown unchanged: no markup, control characters written out.

    A cell is a text, or a list of names, of which each is one line. With `numbers`, all but the
    first column hold numbers, which are aligned.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(_text(cell)) for cell in row] for row in rows]
    names = [Text(_text(cell)) for cell in header] or [Text()] * max(map(len, cells), default=0)
    title_text = Text(printable(title)) if title else None
    table = Table(title=title_text, title_justify="left", show_header=bool(header))
    for place, name in enumerate(names):
        align: Any = "right" if numbers and place else "left"
        table.add_column(name, justify=align, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def html(*tables: Any, notes: Iterable[str] = ()) -> str:
    """Return tables as HTML, in which everything is escaped, with sentences below."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=100_000, force_jupyter=False)
    console.print(*tables)
    shown = console.export_html(inline_styles=True, code_format=_PRE)
    return shown + "".join(f"<p>{escape(_text(sentence))}</p>" for sentence in notes)


def duration(seconds: float) -> str:
    """Return a time with the unit that suits it."""
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
    unit, unit_s = next((unit for unit in units if seconds >= unit[1]), ("µs", 1e-6))
    return f"{seconds / unit_s:.2f} {unit}"


def page(title: str, tables: str, plots: Figure | None) -> str:
    """Return a page: its heading, tables as HTML, and plots below."""
    heading, drawing = escape(printable(title)), io.StringIO()
    if plots is not None:
        plots.savefig(drawing, format="svg", transparent=True)
    _, svg, drawn = drawing.getvalue().partition("<svg")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{_PAGE_STYLE}</style></head>"
        f"<body><h1>{heading}</h1>{tables}{svg}{drawn}</body></html>\n"
    )


def _text(cell: Any) -> str:
    if isinstance(cell, list):
        return "\n".join(map(printable, cell))
    return printable(str(cell), lines=True)
