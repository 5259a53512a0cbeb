"""HTML that objects show in notebooks: plain elements, escaped text, no scripts and no style sheets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def text(value: object) -> str:
    return escape("" if value is None else str(value))


def pre(value: object) -> str:
    """Text whose line breaks are kept; long lines are wrapped."""
    return f'<pre style="white-space: pre-wrap">{text(value)}</pre>'


def paragraph(value: object, *, bold: bool = False) -> str:
    return f"<p><b>{text(value)}</b></p>" if bold else f"<p>{text(value)}</p>"


def table(headers: Sequence[object], rows: Iterable[Sequence[object]], caption: object = None) -> str:
    """A table of texts; a cell of None is empty. Without headers, it has no head."""
    title = f"<caption>{text(caption)}</caption>" if caption is not None else ""
    head = f"<thead>{_row('th', headers)}</thead>" if headers else ""
    return f"<table>{title}{head}<tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"


def _row(element: str, cells: Sequence[object]) -> str:
    style = ' style="text-align: left; white-space: pre-wrap"'
    return f"<tr>{''.join(f'<{element}{style}>{text(cell)}</{element}>' for cell in cells)}</tr>"


def progress(done: int, total: int, facts: object) -> str:
    bar = f'<progress value="{int(done)}" max="{int(total)}"></progress> ' if total > 1 else ""
    return f'<div style="white-space: pre-wrap">{bar}{text(facts)}</div>'
