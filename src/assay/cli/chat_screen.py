"""Where answers appear: one after the other anywhere, side by side in a terminal that is wide enough."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from assay.cli.chat_grade import summary_line, verdict_line
from assay.cli.chat_model import OnText, Reply
from assay.cli.chat_turns import take_turns
from assay.terminal import one_line, printable, raw_stream

NARROWEST = 24  # characters of a column that can still be read
FRAME = 6  # lines of the terminal that are not for the text while it is written
MARGIN = 4  # columns left free: the ^C that a terminal echoes must not wrap, or rewriting would miss by a line

Ask = Callable[[int, OnText], list[Reply]]  # the place of a speaker -> its replies, told piece by piece on the way
Grade = Callable[[list[Reply]], None]  # fills in the verdicts, where there is something to grade


class Screen:
    """Answers go to stdout; whatever is said about them besides goes to stderr."""

    def __init__(self) -> None:
        self._out = Console(file=raw_stream(sys.stdout), highlight=False)
        self._err = Console(file=raw_stream(sys.stderr), highlight=False)
        self._terminal = sys.stdout.isatty() and not self._out.is_dumb_terminal

    def note(self, text: str) -> None:
        sys.stdout.flush()
        self._err.print(Text(printable(text), style="dim"), soft_wrap=True)

    def complain(self, text: str) -> None:
        sys.stdout.flush()
        self._err.print(Text(f"assay: {one_line(text)}", style="red"), soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        if self._terminal:
            self._out.print(Text(printable(text), style=style))
        else:
            print(printable(text), flush=True)

    def show(self, names: Sequence[str], ask: Ask, grade: Grade, gold: str, samples: int) -> list[list[Reply]]:
        """Have everybody answer; what they answered, in order. After Ctrl-C the last ones may be missing."""
        wide = (self._out.width - MARGIN) // max(len(names), 1) >= NARROWEST
        if self._terminal and wide and (len(names) > 1 or samples > 1):
            return Board(self._out, names, gold, samples).show(ask, grade)
        found: list[list[Reply]] = []
        for place, name in enumerate(names):
            if len(names) > 1:
                self.say(f"[{name}]", "bold")
            replies = ask(place, self._write if samples == 1 else ignore)
            found.append(replies)
            if samples == 1:
                print(flush=True)
            grade(replies)
            self._report(replies, gold, samples)
            if any(reply.finish is None for reply in replies):
                break
        return found

    def _write(self, _: int, text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def _report(self, replies: Sequence[Reply], gold: str, samples: int) -> None:
        for number, reply in enumerate(replies, start=1):
            if samples > 1:
                self.say(f"({number}) {reply.text}")
            if reply.verdict is not None:
                self.say(verdict_line(reply.verdict, gold), colour(reply))
        if summary := summary_line(replies):
            self.say(summary, "bold")


class Board:
    """A column for each model, rewritten as the answers grow."""

    def __init__(self, console: Console, names: Sequence[str], gold: str, samples: int) -> None:
        self._console, self._names, self._gold, self._samples = console, names, gold, samples
        self._texts = [[""] * samples for _ in names]
        self._replies: list[list[Reply]] = [[] for _ in names]
        self._finished = False
        self._width = console.width - MARGIN

    def show(self, ask: Ask, grade: Grade) -> list[list[Reply]]:
        with Live(get_renderable=self.table, console=self._console, refresh_per_second=12):
            self._replies = take_turns([self._job(ask, place) for place in range(len(self._names))])
            for replies in self._replies:
                grade(replies)
            self._finished = True
        return self._replies

    def table(self) -> Table:
        table = Table(width=self._width, show_edge=False, pad_edge=False)
        for name in self._names:
            table.add_column(Text(one_line(name), style="bold"), ratio=1, overflow="fold")
        table.add_row(*(self._cell(place) for place in range(len(self._names))))
        return table

    def _job(self, ask: Ask, place: int) -> Callable[[Callable[[], None]], list[Reply]]:
        def job(pause: Callable[[], None]) -> list[Reply]:
            def on_text(sample: int, text: str) -> None:
                self._texts[place][sample] += printable(text)
                pause()

            return ask(place, on_text)

        return job

    def _cell(self, place: int) -> Group | Text:
        if not self._finished:
            return self._tail(self._numbered(self._texts[place]))
        replies = self._replies[place]
        parts: list[Text] = []
        for reply, text in zip(replies, self._numbered(self._texts[place]), strict=False):
            parts.append(text)
            if reply.verdict is not None:
                parts.append(Text(printable(verdict_line(reply.verdict, self._gold)), style=colour(reply)))
        if summary := summary_line(replies):
            parts.append(Text(summary, style="bold"))
        return Group(*parts)

    def _numbered(self, texts: Sequence[str]) -> list[Text]:
        return [Text(f"({i}) {text}" if self._samples > 1 else text) for i, text in enumerate(texts, start=1)]

    def _tail(self, texts: Sequence[Text]) -> Text:
        """The last lines: a table higher than the terminal could not be rewritten in place."""
        width = self._width // len(self._names) - 3
        lines = Text("\n").join(texts).wrap(self._console, max(width, 1), overflow="fold")
        return Text("\n").join(lines[-max(self._console.height - FRAME, 1) :])


def ignore(_: int, __: str) -> None:
    """Several samples cannot be written at one place at once."""


def colour(reply: Reply) -> str:
    return "green" if reply.verdict is not None and reply.verdict.correct else "red"
