"""Console output of a process: a progress bar in a terminal, plain lines elsewhere, nothing on ranks other than 0.

Untrusted text (data, model output, file names) is printed without control sequences of the terminal.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from assay.types import plural

# Control characters become visible symbols, e.g. U+241B for escape; newlines and tabs are kept.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0x2421)
# Bidirectional embeddings, overrides and isolates can reorder the text around them, and right-to-left text does not
# need them. The marks U+200E, U+200F and U+061C, and the joiners of emoji, are kept.
_VISIBLE |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_UNSAFE = re.compile(f"[{re.escape(''.join(map(chr, _VISIBLE)))}]")


def printable(text: str) -> str:
    """Make control characters and bidirectional controls visible. Newlines and tabs are kept."""
    return text.replace("\r\n", "\n").translate(_VISIBLE) if _UNSAFE.search(text) else text


def one_line(text: str, limit: int = 0) -> str:
    """The printable text on one line; with a limit, the middle of a longer text is replaced by dots."""
    line = printable(" ".join(text.split()))
    return f"{line[: limit // 2]} ... {line[-limit // 2 :]}" if 0 < limit < len(line) else line


class PrintableStream:
    """A text stream that makes its text printable. Libraries that write terminal codes need the inner `stream`."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def raw_stream(stream: Any) -> Any:
    """The unfiltered stream, for libraries that write terminal codes."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


@contextmanager
def printable_output() -> Iterator[None]:
    """Filter stdout and stderr through `printable` within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(Any, stream and PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def finite(metrics: Mapping[str, Any], name: str) -> float | None:
    """The value of a metric; None if it is missing or not a finite number."""
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


FINAL_LABELS = ("start", "before", "after")  # evaluations on `eval.final_split`
_FACTS = {  # metrics in the line of a step, and their formats
    "sft/loss": "loss {:.3f}",
    "reward/mean": "reward {:.2f}",
    **{f"{label}/accuracy": f"accuracy {label} {{:.2f}}" for label in FINAL_LABELS},
    "eval/accuracy": "eval {:.2f}",  # the last one
    "length/mean": "len {:.0f}",
    "time/step": "{:.2f} s",
}
_WINDOW = 20  # number of steps from which the remaining time is estimated
_PAUSE = 0.5  # minimum seconds between plain lines, since the steps of a warm start are short


class LenientStream:
    """A text stream that ignores errors: a closed terminal or a full disk for logs must not end a run."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            self._file = null_stream()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._file = null_stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Console:
    """Progress, messages and tables of a run, as a live display in a terminal and as plain lines elsewhere."""

    def __init__(self, file: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._file = LenientStream(raw_stream(file or sys.stdout or null_stream()))  # a daemon may have no stdout
        self._live = self._file.isatty() and not quiet
        self._quiet = quiet
        self._rich = RichConsole(file=cast(IO[str], self._file), highlight=False)
        self._progress: Progress | None = None
        self._total = 0
        self._accuracy: float | None = None
        self._clock: list[tuple[int, float]] = []
        self._last_line_at = -math.inf

    def start(self, total: int, name: str, done: int = 0) -> None:
        """Start a progress display of `total` steps, of which `done` are complete already."""
        name = one_line(name)
        self.stop()
        self._total = total
        self._clock = [(done, time.monotonic())]
        if self._live:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[facts]}"),
            )
            self._progress = Progress(*columns, console=self._rich, transient=True)
            self._progress.add_task(escape(name), total=total, completed=done, facts=f"step {done}/{total}")
            self._progress.start()
        else:
            self._print(f"{name}: {plural(max(total - done, 0), 'step')}" + (f", from step {done}" if done else ""))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a completed step."""
        now, accuracy = time.monotonic(), finite(metrics, "eval/accuracy")
        self._accuracy = self._accuracy if accuracy is None else accuracy
        if len(self._clock) == 1 and step > self._clock[0][0] + 1:  # the first step after a resume
            self._clock = [(step - 1, self._clock[0][1])]
        self._clock = [*self._clock, (step, now)][-_WINDOW - 1 :]
        facts = "  ".join(self._facts(step, metrics))
        evaluated = any(finite(metrics, f"{label}/accuracy") is not None for label in ("eval", "before", "after"))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, facts=escape(facts))
        elif evaluated or step == self._total or now - self._last_line_at >= _PAUSE:
            self._last_line_at = now
            self._print(facts)

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        """Show a warning, even if quiet."""
        text = printable(text)
        if self._live:
            self._rich.print(f"[yellow]warning:[/yellow] {escape(text)}")
        else:
            print(f"warning: {text}", file=self._file, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        if self._quiet:
            return
        columns = [one_line(column) for column in columns]
        cells = [[one_line(str(cell)) for cell in row] for row in rows]
        lines = aligned([columns, *cells])
        if self._live and max(map(len, lines)) + 3 * len(columns) > self._rich.width:
            self._print("\n".join([title, *(line for row in cells for line in listed(columns, row))]))
        elif self._live:
            table = Table(*map(escape, columns), title=escape(one_line(title)), title_justify="left")
            for row in cells:
                table.add_row(*map(escape, row))
            self._rich.print(table)
        else:
            self._print("\n".join([title, *lines]))

    def stop(self) -> None:
        self._total, self._clock = 0, []
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        text = printable(text)
        if self._live:
            self._rich.print(escape(text))
        else:
            print(text, file=self._file, flush=True)

    def _facts(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        facts = [f"step {step}/{self._total}" if self._total else f"step {step}"]
        shown = {**metrics, "eval/accuracy": self._accuracy if finite(metrics, "reward/mean") is not None else None}
        for name, form in _FACTS.items():
            if (value := finite(shown, name)) is not None:
                facts.append(form.format(value))
        if (left := self._seconds_left(step)) is not None:
            facts.append(f"eta {duration(left)}")
        return facts

    def _seconds_left(self, step: int) -> float | None:
        """Estimate from the last steps, including evaluations and saves."""
        (first, started), (latest, now) = self._clock[0], self._clock[-1]
        return (now - started) / (latest - first) * (self._total - step) if self._total and latest > first else None


def is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    return not is_distributed() or os.environ.get("RANK", "0") == "0"


def make_console() -> Console:
    """A console that prints on rank 0 only."""
    return Console() if is_main() else Console(null_stream())


def asker() -> Callable[[str], bool] | None:
    """A function that asks the user at the terminal; None without a terminal, or in a distributed run."""
    if is_distributed() or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return ask_user


def ask_user(question: str) -> bool:
    print(f"{one_line(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def null_stream() -> IO[str]:
    return open(os.devnull, "w")


def duration(seconds: float) -> str:
    """8s, 2m10s, 3h05m."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def percent(fraction: float) -> str:
    """52.1 %, with more digits where one would round a fraction to 0 or 100 %."""
    digits = next((n for n in (1, 2, 3) if 0 < round(100 * fraction, n) < 100), 4 if 0 < fraction < 1 else 1)
    return f"{100 * fraction:.{digits}f} %"


def listed(columns: Sequence[str], row: Sequence[object]) -> list[str]:
    """A row of a table that is too wide for the terminal: the first cell, and the others below it, one per line."""
    first, *rest = zip(columns, row, strict=True)
    width = max((len(column) for column, _ in rest), default=0)
    return [str(first[1]), *(f"    {column:<{width}}  {cell}" for column, cell in rest if str(cell))]


def aligned(rows: Sequence[Sequence[object]]) -> list[str]:
    """Format the rows of a table as lines with aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
