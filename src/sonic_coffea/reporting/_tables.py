"""Small tables for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import printable

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


def _escaped(content: Any) -> str:
    return escape(printable(str(content), lines=True))
