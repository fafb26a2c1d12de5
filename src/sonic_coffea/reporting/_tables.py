"""Tables from one description: in terminals by rich, in notebooks and pages as HTML."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

_PAGE_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
.tables { align-items: start; display: flex; flex-wrap: wrap; gap: 1.5rem 3rem; overflow-x: auto; }
.tables p { flex-basis: 100%; margin: 0; }
table { border-collapse: collapse; }
tr { border-bottom: 1px solid #8886; }
svg { display: block; height: auto; margin-top: 2rem; max-width: 50rem; width: 100%; }
@media (prefers-color-scheme: dark) { svg { filter: invert(1) hue-rotate(180deg); } }
"""
_CELL = "padding:2px 10px;vertical-align:top;white-space:pre-wrap;text-align:"
# Of the theme's own size of text: notebooks have tables smaller than paragraphs.
_NOTE = 'style="margin:2px 10px;font-size:90%"'


@dataclass(frozen=True, slots=True)
class Table:
    """A table, whose texts are shown as they are: no markup, control characters written out.

    A cell is a text, or a list of names, of which each is one line. With `numbers`, all but the
    first column hold numbers, which are aligned.
    """

    title: str
    rows: Sequence[Sequence[Any]]
    header: Sequence[Any] = ()
    numbers: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or, where it is too wide for a terminal, each row as lines."""
        from rich.table import Table as RichTable
        from rich.text import Text

        title = printable(self.title)
        table = RichTable(
            title=Text(title) if title else None, title_justify="left", show_header=any(self.header)
        )
        for place in range(max(map(len, [self.header, *self.rows]))):
            name = Text(_text(self.header[place])) if self.header else ""
            align = "right" if self.numbers and place else "left"
            table.add_column(name, justify=align, overflow="fold")  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(Text(_text(cell)) for cell in row))
        unlimited = options.update(max_width=100_000)
        if console.measure(table, options=unlimited).maximum <= options.max_width:
            yield table
            return
        yield Text(title, style="italic")
        labels = [_text(name).replace("\n", " on ") for name in self.header[1:]]
        for first, *cells in self.rows:
            yield Text(_text(first), style="bold")
            for label, cell in zip(labels or [""] * len(cells), cells, strict=False):
                for number, line in enumerate(_text(cell).split("\n")):
                    shown = "" if number else label
                    yield Text(f"  {shown:<{max(map(len, labels), default=0)}}  {line}")

    def html(self) -> str:
        """Return the table as HTML, in which everything is escaped."""

        def line(tag: str, row: Sequence[Any]) -> str:
            cells = "".join(
                f'<{tag} style="{_CELL}{"right" if self.numbers and place else "left"}">'
                f"{escape(_text(cell))}</{tag}>"
                for place, cell in enumerate(row)
            )
            return f"<tr>{cells}</tr>"

        head = line("th", self.header) if self.header else ""
        body = "".join(line("td", row) for row in self.rows)
        caption = f'<caption style="{_CELL}left"><b>{escape(printable(self.title))}</b></caption>'
        return f"<table>{caption}{head}{body}</table>"


def table(
    title: str, rows: Iterable[Sequence[Any]], *, notes: Iterable[str] = (), **options: Any
) -> str:
    """Return a `Table` as HTML, with sentences below."""
    return Table(title, [*rows], **options).html() + notes_below(notes)


def duration(seconds: float) -> str:
    """Return a time with the unit that suits it."""
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
    unit, unit_s = next((unit for unit in units if seconds >= unit[1]), ("µs", 1e-6))
    return f"{seconds / unit_s:.2f} {unit}"


def notes_below(sentences: Iterable[str]) -> str:
    """Return sentences as paragraphs that stand below a table."""
    return "".join(f"<p {_NOTE}>{escape(_text(sentence))}</p>" for sentence in sentences)


def page(title: str, tables: str, plots: Figure | None) -> str:
    """Return a page: its heading, tables as HTML, and plots below."""
    heading, drawing = escape(printable(title)), ""
    if plots is not None:
        written = io.StringIO()
        plots.savefig(written, format="svg", transparent=True)
        drawing = written.getvalue()
        drawing = drawing[drawing.index("<svg") :].replace(
            "<svg", '<svg role="img" aria-label="times of requests"', 1
        )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{_PAGE_STYLE}</style></head>"
        f'<body><h1>{heading}</h1><div class="tables">{tables}</div>{drawing}</body></html>\n'
    )


def _text(cell: Any) -> str:
    if isinstance(cell, list):
        return "\n".join(map(printable, cell))
    return printable(str(cell), lines=True)
