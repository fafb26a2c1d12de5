"""Small tables for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    """Return a table as HTML; everything in it is escaped.

    Parameters
    ----------
    title : str
        Stands above it.
    rows : iterable of sequences
        What stands in the cells.
    header : sequence of str
        Names of the columns.
    notes : iterable of str
        Sentences below.
    numbers : bool
        Whether all but the first column hold numbers, which are aligned.
    """

    def line(tag: str, row: Sequence[Any]) -> str:
        styles = [_LEFT, *([_RIGHT if numbers else _LEFT] * (len(row) - 1))]
        cells = zip(styles, row, strict=True)
        return f"<tr>{''.join(f'<{tag} {s}>{escape(str(cell))}</{tag}>' for s, cell in cells)}</tr>"

    lines = [f"<table><caption {_LEFT}><b>{escape(title)}</b></caption>"]
    lines += [line("th", header)] if header else []
    lines += [line("td", row) for row in rows]
    return "".join([*lines, "</table>", notes_below(notes)])


def notes_below(sentences: Iterable[str]) -> str:
    """Return sentences as paragraphs that stand below a table."""
    return "".join(f"<p {_NOTE}>{escape(sentence)}</p>" for sentence in sentences)
