"""Objects for notebooks: progress that is updated in place, pictures, and tables."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from assay.runs.console import Console, Operation, make_console

PAUSE_S = 0.3  # between two updates of the display


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


class Picture:
    """A picture in a file, which a notebook shows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"picture {self.path}"

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()

    def html(self) -> str:
        data = base64.b64encode(self._repr_png_()).decode()
        return f'<img alt="" style="max-width: 100%" src="data:image/png;base64,{data}">'


class NotebookConsole(Console):
    """Shows progress in the output of the cell, and prints messages and results of evaluations."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet, live=False)
        self._handle: Any = None
        self._lines: list[str] = []
        self._shown_at = 0.0

    def _show_step(self, step: int, facts: str, evaluated: bool) -> None:
        if evaluated:
            self._print(facts)
        self._show(0, html_progress(step, self._total, facts), step == self._total)

    def _show_operation(
        self, operation: Operation, done: int, total: int, unit: str, tokens: int, most_tokens: int
    ) -> None:
        facts = operation.facts(done, total, unit, tokens, self._now(), most_tokens)
        value, most = (tokens, most_tokens) if most_tokens else (done, total)
        self._show(1, html_progress(value, most, f"{operation.what}  {facts}"))

    def end_operation(self) -> None:
        super().end_operation()
        if len(self._lines) > 1 and self._lines[1]:
            self._show(1, "", True)

    def stop(self) -> None:
        super().stop()
        self._handle, self._lines = None, []  # what is shown stays; the next run has a display of its own

    def _show(self, line: int, text: str, at_once: bool = False) -> None:
        """Replace a line of the display."""
        self._lines = [*self._lines, "", ""][:2]
        self._lines[line] = text
        now = self._now()
        if self._quiet or (now - self._shown_at < PAUSE_S and not at_once):
            return
        from IPython.display import HTML, display

        self._shown_at, content = now, HTML("".join(self._lines))
        if self._handle is None:
            self._handle = display(content, display_id=True)
        else:
            self._handle.update(content)


def new_console(quiet: bool) -> Console:
    return NotebookConsole(quiet=quiet) if in_notebook() else make_console(quiet)


# HTML that objects show: plain elements, escaped text, no scripts and no style sheets


def html_text(value: object) -> str:
    return escape("" if value is None else str(value))


def html_pre(value: object) -> str:
    """Text whose line breaks are kept; long lines are wrapped."""
    return f'<pre style="white-space: pre-wrap">{html_text(value)}</pre>'


def html_paragraph(value: object, *, bold: bool = False) -> str:
    return f"<p><b>{html_text(value)}</b></p>" if bold else f"<p>{html_text(value)}</p>"


def html_table(headers: Sequence[object], rows: Iterable[Sequence[object]], caption: object = None) -> str:
    """A table of texts; a cell of None is empty. Without headers, it has no head."""
    title = f"<caption>{html_text(caption)}</caption>" if caption is not None else ""
    head = f"<thead>{_row('th', headers)}</thead>" if headers else ""
    return f"<table>{title}{head}<tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"


def _row(element: str, cells: Sequence[object]) -> str:
    style = ' style="text-align: left; white-space: pre-wrap"'
    return f"<tr>{''.join(f'<{element}{style}>{html_text(cell)}</{element}>' for cell in cells)}</tr>"


def html_progress(done: int, total: int, facts: object) -> str:
    bar = f'<progress value="{int(done)}" max="{int(total)}"></progress> ' if total > 1 else ""
    return f'<div style="white-space: pre-wrap">{bar}{html_text(facts)}</div>'
