"""Console output of a process: a live display in a terminal, plain lines elsewhere, nothing on ranks other than 0.

`Console.start` and `step` show the steps of a run, `Console.progress` a long operation within a step or between steps.
In pipes and log files, both are limited to one line per `INTERVAL` seconds, and operations shorter than that to none:
rich.progress, which draws the live display, prints nothing there before the end of an operation.

Untrusted text (data, model output, file names) is printed without control sequences of the terminal.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, ClassVar, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
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


def percent(value: float) -> str:
    """52.1 % for 0.521, with more digits where one would round to 0 or 100 %."""
    return f"{100 * value:.{enough_digits(100 * value, 1, limit=100)}f} %"


def fraction(value: float) -> str:
    """0.52, with more digits where two would round to 0 or 1."""
    return f"{value:.{enough_digits(value, 2, limit=1)}f}"


def enough_digits(value: float, least: int, limit: float) -> int:
    """Digits after the point, `least` or up to 3 more, so that a value between 0 and `limit` is rounded to neither."""
    if not 0 < value < limit:
        return least
    return next((digits for digits in range(least, least + 3) if 0 < round(value, digits) < limit), least + 3)


FINAL_LABELS = ("start", "before", "after")  # evaluations on `eval.final_split`
_FACTS: dict[str, tuple[str, Callable[[float], str]]] = {  # metrics in the line of a step, and their formats
    "sft/loss": ("loss {}", "{:.3f}".format),
    "reward/mean": ("reward {}", fraction),
    **{f"{label}/accuracy": (f"accuracy {label} {{}}", fraction) for label in FINAL_LABELS},
    "eval/accuracy": ("eval {}", fraction),  # the last one
    "length/mean": ("len {}", "{:.0f}".format),
    "time/step": ("{} s", "{:.2f}".format),
}
_WINDOW = 20  # number of steps from which the remaining time is estimated
INTERVAL = 5.0  # seconds between plain lines of progress
IDLE_INTERVAL = 15.0  # the same while an operation has counted nothing yet
_REFRESH = 0.1  # seconds between updates of the live display
_DELAY = 1.0  # seconds after which an operation appears in the live display: shorter ones would flicker


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


ETA_SHARE = 0.02  # of an operation that must be done before the rest is estimated


@dataclass
class Operation:
    """A long operation that `Console.progress` shows."""

    what: str
    started: float
    row: TaskID | None = None  # in the live display
    first: tuple[int, int, float] | None = None  # (done, tokens, time) of the first count: imports come before it
    updated: float = -math.inf

    def facts(self, done: int, total: int, unit: str, tokens: int, now: float, most_tokens: int = 0) -> str:
        """How far it is, tokens per second and the remaining time.

        Answers of one batch often finish together, at the end. Until then, `most_tokens` limits the remaining time.
        """
        assert self.first is not None, "nothing was counted"
        new, sampled, elapsed = done - self.first[0], tokens - self.first[1], max(now - self.first[2], 1e-9)
        facts = [f"{count(done)}/{count(total)} {unit}".rstrip()] if total > 1 else []
        if rate := (new if unit == "tokens" else sampled) / elapsed:
            facts.append(f"{rate:,.{0 if rate >= 10 else 1}f} tokens/s")
        by_count = elapsed / new * (total - done) if new > 0 and new >= ETA_SHARE * total else math.inf
        enough = sampled > 0 and sampled >= ETA_SHARE * (most_tokens - self.first[1])
        limit = elapsed / sampled * (most_tokens - tokens) if most_tokens and enough else math.inf
        if min(by_count, limit) < math.inf:
            facts.append(f"eta {duration(by_count)}" if by_count <= limit else f"eta at most {duration(limit)}")
        return "  ".join(facts)


class LiveDisplay(Progress):
    """A row with a bar for the run, and one for the current operation, once that has lasted for some time."""

    running: ClassVar[set[LiveDisplay]] = set()

    def start(self) -> None:
        self.running.add(self)
        super().start()

    def stop(self) -> None:
        if self in self.running:
            self.running.discard(self)
            super().stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        shown = [task for task in self.tasks if not task.fields["delayed"] or (task.elapsed or 0.0) >= _DELAY]
        yield self.make_tasks_table(shown)


class Console:
    """Progress, messages and tables of a run, as a live display in a terminal and as plain lines elsewhere."""

    def __init__(
        self,
        file: IO[str] | None = None,
        *,
        quiet: bool = False,
        live: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`live`: whether a terminal gets a live display, which a thread draws."""
        self._file = LenientStream(raw_stream(file or sys.stdout or null_stream()))  # a daemon may have no stdout
        self._live = self._file.isatty() and live and not quiet
        self._quiet = quiet
        self._rich = RichConsole(file=cast(IO[str], self._file), highlight=False)
        self._now = clock
        columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[facts]}"))
        self._display = LiveDisplay(*columns, console=self._rich, transient=True, get_time=clock)
        self._run_row: TaskID | None = None
        self._operation: Operation | None = None
        self._total = 0
        self._accuracy: float | None = None
        self._clock: list[tuple[int, float]] = []
        self._last_step_at = self._last_line_at = -math.inf

    def start(self, total: int, name: str, done: int = 0) -> None:
        """Start a progress display of `total` steps, of which `done` are complete already."""
        name = one_line(name)
        self.stop()
        self._total = total
        self._clock = [(done, self._now())]
        if self._live:
            self._run_row = self._add_row(name, f"step {done}/{total}", total=total, completed=done)
        else:
            self._print(f"{name}: {plural(max(total - done, 0), 'step')}" + (f", from step {done}" if done else ""))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a completed step."""
        now, accuracy = self._now(), finite(metrics, "eval/accuracy")
        self._accuracy = self._accuracy if accuracy is None else accuracy
        if len(self._clock) == 1 and step > self._clock[0][0] + 1:  # the first step after a resume
            self._clock = [(step - 1, self._clock[0][1])]
        self._clock = [*self._clock, (step, now)][-_WINDOW - 1 :]
        facts = "  ".join(self._facts(step, metrics))
        evaluated = any(finite(metrics, f"{label}/accuracy") is not None for label in ("eval", "before", "after"))
        self._show_step(step, facts, evaluated)

    def _show_step(self, step: int, facts: str, evaluated: bool) -> None:
        now = self._now()
        if self._run_row is not None:
            self._display.update(self._run_row, completed=step, facts=escape(facts))
        elif evaluated or step == self._total or now - self._last_step_at >= INTERVAL:
            self._last_step_at = now
            self._print(facts)

    def announce(self, what: str) -> None:
        """Show an operation at once, e.g. "loading MODEL", before the first call of `progress` with the same text."""
        if self._operation is not None and self._operation.what == what:
            return
        operation = self._begin(what)
        if self._live:
            operation.row = self._add_row(one_line(what), total=None)
        else:
            self._print(what)

    def progress(self, what: str, done: int, total: int, unit: str = "", tokens: int = 0, most_tokens: int = 0) -> None:
        """Show how far an operation is; it is over when `done` equals `total`. See `assay.types.Progress`."""
        if self._quiet:
            return
        operation = self._operation
        if done >= total:
            if operation is not None and operation.what == what:
                self.end_operation()
            return
        if operation is None or operation.what != what:
            operation = self._begin(what)
        operation.first = operation.first or (done, tokens, self._now())
        self._show_operation(operation, done, total, unit, tokens, most_tokens)

    def _show_operation(
        self, operation: Operation, done: int, total: int, unit: str, tokens: int, most_tokens: int
    ) -> None:
        now, what = self._now(), operation.what
        # Time before the operation does not count: it may be one of many short ones.
        silent_s = now - max(operation.started, self._last_line_at)
        if self._live and now - operation.updated >= _REFRESH:
            if operation.row is None:
                operation.row = self._add_row(one_line(what), total=None, delayed=True)
            facts = operation.facts(done, total, unit, tokens, now, most_tokens)
            completed, bar = (tokens, most_tokens) if most_tokens else (done, total if total > 1 else None)
            self._display.update(operation.row, completed=completed, total=bar, facts=escape(facts))
            operation.updated = now
        elif not self._live and silent_s >= (INTERVAL if done or tokens else IDLE_INTERVAL):
            self._print("  ".join(filter(None, (what, operation.facts(done, total, unit, tokens, now, most_tokens)))))

    @contextmanager
    def loading(self, source: str) -> Iterator[Callable[..., None]]:
        """Show that a model is loaded; yields a function that shows how far it is, for `load_model`."""
        what = f"loading {source}"
        self.announce(what)
        try:
            yield partial(self.progress, what)
        finally:
            self.end_operation()

    def end_operation(self) -> None:
        """Remove the operation from the live display, which disappears unless it also shows the steps of a run."""
        operation, self._operation = self._operation, None
        if operation is not None and operation.row is not None:
            self._display.remove_task(operation.row)
            if self._run_row is None:
                self._display.stop()

    def _begin(self, what: str) -> Operation:
        self.end_operation()
        self._operation = Operation(what, self._now())
        return self._operation

    def _add_row(self, name: str, facts: str = "", *, delayed: bool = False, **values: Any) -> TaskID:
        self._display.start()
        return self._display.add_task(escape(name), facts=escape(facts), delayed=delayed, **values)

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        """Show a warning, even if quiet."""
        text = printable(text)
        if self._live:
            self._rich.print(f"[yellow]warning:[/yellow] {escape(text)}")
        else:
            print(f"warning: {text}", file=self._file, flush=True)
            self._last_line_at = self._now()

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
        """Remove the live display."""
        self._total, self._clock, self._last_step_at = 0, [], -math.inf
        self._run_row = self._operation = None
        self._display.stop()
        for row in self._display.task_ids:
            self._display.remove_task(row)

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
            self._last_line_at = self._now()

    def _facts(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        facts = [f"step {step}/{self._total}" if self._total else f"step {step}"]
        shown = {**metrics, "eval/accuracy": self._accuracy if finite(metrics, "reward/mean") is not None else None}
        for name, (text, form) in _FACTS.items():
            if (value := finite(shown, name)) is not None:
                facts.append(text.format(form(value)))
        (first, started), (latest, now) = self._clock[0], self._clock[-1]
        if self._total and latest > first:  # an estimate from the last steps, including evaluations and saves
            facts.append(f"eta {duration((now - started) / (latest - first) * (self._total - step))}")
        return facts


def is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    return not is_distributed() or os.environ.get("RANK", "0") == "0"


def make_console(quiet: bool = False) -> Console:
    """A console that prints on rank 0 only."""
    return Console(quiet=quiet) if is_main() else Console(null_stream())


def asker() -> Callable[[str], bool] | None:
    """A function that asks the user at the terminal; None without a terminal, or in a distributed run."""
    if is_distributed() or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return ask_user


def ask_user(question: str) -> bool:
    """Ask at the terminal. Live displays are stopped meanwhile: they would draw over the question and the answer."""
    displays = list(LiveDisplay.running)
    for display in displays:
        display.stop()
    print(f"{one_line(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    for display in displays:
        display.start()
    return answer.strip().lower() in ("y", "yes")


def null_stream() -> IO[str]:
    return open(os.devnull, "w")


def count(number: int) -> str:
    """1,234 or 494M or 1.54B."""
    if number < 10**6:
        return f"{number:,}"
    return f"{number / 10**6:.0f}M" if number < 10**9 else f"{number / 10**9:.2f}B"


def duration(seconds: float) -> str:
    """8s, 2m10s, 3h05m."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


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
