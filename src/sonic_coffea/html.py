"""Small tables for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["escape", "table"]

_CELL = 'style="text-align:left;padding:2px 10px;vertical-align:top"'


def table(
    title: str,
    rows: Iterable[Sequence[Any]],
    *,
    header: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> str:
    """Return a table as HTML; everything in it is escaped."""
    lines = [f"<table><caption {_CELL}><b>{escape(title)}</b></caption>"]
    if header:
        cells = "".join(f"<th {_CELL}>{escape(one)}</th>" for one in header)
        lines.append(f"<tr>{cells}</tr>")
    for row in rows:
        cells = "".join(f"<td {_CELL}>{escape(str(one))}</td>" for one in row)
        lines.append(f"<tr>{cells}</tr>")
    lines.append("</table>")
    lines += [f"<p>{escape(note)}</p>" for note in notes]
    return "".join(lines)
