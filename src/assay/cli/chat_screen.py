"""Replies of models, token by token, and their display: one after the other, or side by side in a wide terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from assay.engine.base import Engine, Failed, Finished, Request, SamplingParams, TokenChunk
from assay.evals.stats import pass_at_k
from assay.rollout import with_stops
from assay.runs.console import one_line, printable, raw_stream
from assay.text import Renderer
from assay.text.stream import TextStream
from assay.types import Finish, Message, Prompt, UserError, Verdict, plural


@dataclass
class Reply:
    """One answer, complete or interrupted."""

    text: str  # for display: without the stop string that ended it
    full_text: str  # for the judge, as in evaluations
    tokens: int
    finish: Finish | None  # None: interrupted by the user
    verdict: Verdict | None = None


@dataclass
class ChatModel:
    """A model and its conversation."""

    name: str
    renderer: Renderer
    engine: Engine
    history: list[Message] = field(default_factory=list)

    def prompt_ids(self, prompt: Prompt) -> tuple[list[int], str]:
        """The tokens of history and prompt, and a note if the history had to be left out."""
        note = ""
        try:
            ids = self.renderer.prompt_ids(replace(prompt, messages=(*self.history, *prompt.messages)))
        except UserError as error:
            if not self.history:
                raise UserError(f"{self.name}: {error}") from error
            ids = self.renderer.prompt_ids(prompt)
            note = f"{self.name} is asked without the earlier turns: {error}"
        context = self.engine.info.max_length
        if len(ids) >= context:
            raise UserError(
                f"{self.name}: the prompt of {plural(len(ids), 'token')} fills the context of {context}: "
                "ask something shorter" + (", or delete the history with /clear" if self.history else "")
            )
        return ids, note

    def unknown_words(self, text: str) -> list[str]:
        """Words that the tokenizer encodes as its unknown token."""
        unknown = self.renderer.unknown_id
        if unknown is None:
            return []
        encoded = self.renderer.tokenizer.hf.backend_tokenizer.encode(text, add_special_tokens=False)
        spans = [span for index, span in zip(encoded.ids, encoded.offsets, strict=True) if index == unknown]
        return list(dict.fromkeys(text[start:end] for start, end in spans))


class ReplyStream:
    """The replies of a model to one prompt. Its request is added at the first `advance`."""

    def __init__(self, model: ChatModel, ids: Sequence[int], params: SamplingParams, seed: int) -> None:
        params = with_stops(params, model.renderer)
        self.model, self.prompt_length, self.samples = model, len(ids), params.n
        self.error: UserError | None = None
        self._request = Request(ids, params, seed, name=model.name, stream=True)
        self._id: int | None = None
        self._streams = [TextStream(model.renderer.decode, params.stop) for _ in range(params.n)]
        self._texts = [""] * params.n
        self._token_ids: list[list[int]] = [[] for _ in range(params.n)]
        self._finishes: list[Finish | None] = [None] * params.n

    @property
    def done(self) -> bool:
        return self.error is not None or None not in self._finishes

    def advance(self) -> Iterator[tuple[int, str]]:
        """Step the engine once; yields sample indices and new text."""
        engine = self.model.engine
        if self._id is None:
            self._id = engine.add(self._request)
        events = engine.step()
        assert events, "the engine has no work left, but replies are unfinished"
        for event in events:
            if isinstance(event, TokenChunk):
                self._token_ids[event.sample] += event.token_ids
                yield self._add_text(event.sample, self._streams[event.sample].add(event.token_ids))
            elif isinstance(event, Finished):
                self._finishes[event.sample] = event.completion.finish
                yield self._add_text(event.sample, self._streams[event.sample].finish())
            elif isinstance(event, Failed):
                self.error = UserError(event.error)

    def abort(self) -> None:
        if self._id is not None and not self.done:
            self.model.engine.abort([self._id])

    def replies(self) -> list[Reply]:
        if self.error is not None or self._id is None:
            return []
        decode = self.model.renderer.decode
        return [
            Reply(text, decode(ids), len(ids), finish)
            for text, ids, finish in zip(self._texts, self._token_ids, self._finishes, strict=True)
        ]

    def _add_text(self, sample: int, new: str) -> tuple[int, str]:
        self._texts[sample] += new
        return sample, new


@contextmanager
def deferred_interrupt() -> Iterator[list[Any]]:
    """Ctrl-C is recorded in the list, so that no engine step is interrupted. A second one interrupts immediately."""
    interrupts: list[Any] = []

    def record(signum: int, frame: Any) -> None:
        interrupts.append(signum)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, record)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def generate_replies(streams: Sequence[ReplyStream], on_text: Callable[[int, int, str], None]) -> None:
    """Advance all streams in turns until they are done or Ctrl-C is pressed. `on_text(stream, sample, text)`."""
    try:
        with deferred_interrupt() as interrupts:
            while not interrupts and not all(stream.done for stream in streams):
                for index, stream in enumerate(streams):
                    try:
                        for sample, text in () if stream.done else stream.advance():
                            on_text(index, sample, text)
                    except UserError as error:
                        stream.error = error
    except KeyboardInterrupt:
        pass
    finally:
        for stream in streams:
            stream.abort()


QUOTED = 60  # characters of an answer or a gold answer that a verdict quotes


def verdict_line(verdict: Verdict, gold: str) -> str:
    """ok: parsed 18, gold 18, reward 1"""
    parsed = "nothing parsed" if verdict.parsed is None else f"parsed {shortened(verdict.parsed)}"
    facts = [parsed, *([f"gold {shortened(gold)}"] if gold else []), f"reward {verdict.reward:.4g}"]
    return f"{verdict.status}: {', '.join(facts)}" + (f" ({verdict.detail})" if verdict.detail else "")


def summary_line(replies: Sequence[Reply]) -> str:
    """Fraction of correct answers, and the unbiased pass@k for every k."""
    verdicts = [reply.verdict for reply in replies if reply.verdict is not None]
    n, correct = len(verdicts), sum(verdict.correct for verdict in verdicts)
    if n < 2:
        return ""
    curve = ", ".join(f"pass@{k} {pass_at_k(n, correct, k):.3f}" for k in range(1, n + 1))
    reward = sum(verdict.reward for verdict in verdicts) / n
    return f"{correct} of {n} correct ({100 * correct / n:.1f} %), mean reward {reward:.4g}; {curve}"


def shortened(text: str) -> str:
    line = " ".join(text.split()) or '""'
    return line if len(line) <= QUOTED else line[: QUOTED - 3] + "..."


MIN_COLUMN = 24  # characters of a readable column
FRAME = 6  # lines of the terminal that are not available for text while it is generated
MARGIN = 4  # free columns: the ^C that a terminal echoes must not wrap, or the table would be redrawn one line off

Grade = Callable[[list[Reply]], None]  # sets the verdicts, if there is something to grade


class Screen:
    """Answers are written to stdout, notes and errors to stderr."""

    def __init__(self) -> None:
        self._out = Console(file=raw_stream(sys.stdout), highlight=False)
        self._err = Console(file=raw_stream(sys.stderr), highlight=False)
        self._terminal = sys.stdout.isatty() and not self._out.is_dumb_terminal

    def note(self, text: str) -> None:
        sys.stdout.flush()
        self._err.print(Text(printable(text), style="dim"), soft_wrap=True)

    def error(self, text: str) -> None:
        sys.stdout.flush()
        self._err.print(Text(f"assay: {one_line(text)}", style="red"), soft_wrap=True)

    def print(self, text: str, style: str = "") -> None:
        if self._terminal:
            self._out.print(Text(printable(text), style=style))
        else:
            print(printable(text), flush=True)

    def show(self, streams: Sequence[ReplyStream], grade: Grade, gold: str) -> list[list[Reply]]:
        """Generate and display all replies. After Ctrl-C the replies of the last models may be missing."""
        samples = max((stream.samples for stream in streams), default=1)
        wide = (self._out.width - MARGIN) // max(len(streams), 1) >= MIN_COLUMN
        if self._terminal and wide and (len(streams) > 1 or samples > 1):
            return Columns(self._out, streams, gold).show(grade)
        shown: list[list[Reply]] = []
        for stream in streams:
            if len(streams) > 1:
                self.print(f"[{stream.model.name}]", "bold")
            generate_replies([stream], self._write if samples == 1 else lambda *_: None)
            if samples == 1:
                print(flush=True)
            replies = stream.replies()
            shown.append(replies)
            grade(replies)
            for text, style in report(replies, [reply.text for reply in replies] if samples > 1 else None, gold):
                self.print(text, style)
            if any(reply.finish is None for reply in replies):
                break
        return shown

    def _write(self, _stream: int, _sample: int, text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()


def report(replies: Sequence[Reply], texts: Sequence[str] | None, gold: str) -> Iterator[tuple[str, str]]:
    """Lines and their styles: the numbered texts, if they are given, verdicts and summary."""
    for index, reply in enumerate(replies):
        if texts is not None:
            yield (f"({index + 1}) {texts[index]}" if len(replies) > 1 else texts[index]), ""
        if reply.verdict is not None:
            yield verdict_line(reply.verdict, gold), "green" if reply.verdict.correct else "red"
    if summary := summary_line(replies):
        yield summary, "bold"


class Columns:
    """A table with a column per model, redrawn as the answers grow."""

    def __init__(self, console: Console, streams: Sequence[ReplyStream], gold: str) -> None:
        self._console, self._streams, self._gold = console, streams, gold
        self._texts = [[""] * stream.samples for stream in streams]
        self._replies: list[list[Reply]] | None = None  # once they are graded
        self._width = console.width - MARGIN

    def show(self, grade: Grade) -> list[list[Reply]]:
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=12):
            generate_replies(self._streams, self._add)
            replies = [stream.replies() for stream in self._streams]
            for group in replies:
                grade(group)
            self._replies = replies
        return replies

    def _add(self, stream: int, sample: int, text: str) -> None:
        self._texts[stream][sample] += printable(text)

    def _table(self) -> Table:
        table = Table(width=self._width, show_edge=False, pad_edge=False)
        for stream in self._streams:
            table.add_column(Text(one_line(stream.model.name), style="bold"), ratio=1, overflow="fold")
        table.add_row(*(self._cell(index) for index in range(len(self._streams))))
        return table

    def _cell(self, index: int) -> Group | Text:
        texts = self._texts[index]
        if self._replies is not None:
            lines = report(self._replies[index], texts, self._gold)
            return Group(*(Text(printable(text), style=style) for text, style in lines))
        # Only the last lines: a table higher than the terminal could not be redrawn in place.
        numbered = [f"({number}) {text}" if len(texts) > 1 else text for number, text in enumerate(texts, 1)]
        width = max(self._width // len(self._streams) - 3, 1)
        wrapped = Text("\n".join(numbered)).wrap(self._console, width, overflow="fold")
        return Text("\n").join(wrapped[-max(self._console.height - FRAME, 1) :])
