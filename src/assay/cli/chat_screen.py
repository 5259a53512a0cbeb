"""One model in a conversation: its own history, its prompts, and its answers as text that arrives piece by piece.

Several models write at once: they take turns, a token each, so that nobody waits for the others to finish.

Verdicts and pass@k, in words.

Where answers appear: one after the other anywhere, side by side in a terminal that is wide enough.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from assay.engine.base import Engine, Failed, Finished, Request, SamplingParams, TokenChunk
from assay.evals.stats import pass_at_k
from assay.rollout import with_stops
from assay.terminal import one_line, printable, raw_stream
from assay.text import Renderer
from assay.types import Finish, Message, Prompt, UserError, Verdict

REPLACEMENT = "\ufffd"  # what decoders make of bytes that are not, or not yet, a whole character
OnText = Callable[[int, str], None]  # (sample index, new text)


class ReplyStopped(Exception):
    """The user has stopped a reply before its end."""


@dataclass
class Reply:
    """One answer, whole or as far as it came."""

    text: str  # to read: without the stop string that ended it
    full_text: str  # to judge: as evaluations see it
    tokens: int
    finish: Finish | None  # None: stopped by the person
    verdict: Verdict | None = None


class TextStream:
    """Token ids in, new text out. The pieces never change later, and joined they are the answer's text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self.token_ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        self.token_ids.append(token)
        # A character may take several tokens, and its first bytes alone decode to replacement characters.
        text = self._before_stop(self.full_text.rstrip(REPLACEMENT))
        return self._advance(text[: len(text) - self._open_stop(text)])

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        return self._advance(self._before_stop(self.full_text))

    @property
    def full_text(self) -> str:
        return self._decode(self.token_ids)

    def _advance(self, text: str) -> str:
        if not text.startswith(self.text):  # bytes of an unfinished character can make the decoder doubt earlier ones
            return ""
        new, self.text = text[len(self.text) :], text
        return new

    def _before_stop(self, text: str) -> str:
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def _open_stop(self, text: str) -> int:
        """How much of the end may be the beginning of a stop string."""
        lengths = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(lengths, default=0)


@dataclass
class Speaker:
    """A model and what was said to it so far."""

    name: str
    renderer: Renderer
    engine: Engine
    history: list[Message] = field(default_factory=list)

    def prompt_ids(self, prompt: Prompt) -> tuple[list[int], str]:
        """The tokens of history and prompt, and a note if the earlier turns had to be left out."""
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
                f"{self.name}: {len(ids)} tokens leave no room for an answer in a context of {context}: "
                "ask something shorter" + (", or forget the earlier turns with /clear" if self.history else "")
            )
        return ids, note

    def answer(self, ids: Sequence[int], params: SamplingParams, seed: int, on_text: OnText) -> list[Reply]:
        """Sample replies and pass their text to `on_text` as it arrives. Ctrl-C and `ReplyStopped` stop all of them."""
        params = with_stops(params, self.renderer)
        streams = [TextStream(self.renderer.decode, params.stop) for _ in range(params.n)]
        finishes: list[Finish | None] = [None] * params.n
        with suppress(KeyboardInterrupt, ReplyStopped):
            finishes = self._stream(Request(ids, params, seed, name=self.name, stream=True), streams, on_text)
            for sample, stream in enumerate(streams):
                on_text(sample, stream.finish())
        return [
            Reply(stream.text, stream.full_text, len(stream.token_ids), finish)
            for stream, finish in zip(streams, finishes, strict=True)
        ]

    def _stream(self, request: Request, streams: Sequence[TextStream], on_text: OnText) -> list[Finish | None]:
        """Serve a request, token by token; returns why each sample ended."""
        finishes: dict[int, Finish] = {}
        request_id = self.engine.add(request)
        try:
            while len(finishes) < request.params.n:
                events = self.engine.step()
                assert events, "the engine has no work left, but the reply is unfinished"
                for event in events:
                    if isinstance(event, TokenChunk):
                        for token in event.token_ids:
                            on_text(event.sample, streams[event.sample].add(token))
                    elif isinstance(event, Finished):
                        finishes[event.sample] = event.completion.finish
                    elif isinstance(event, Failed):
                        raise UserError(event.error)
        except BaseException:
            self.engine.abort([request_id])
            raise
        return [finishes[sample] for sample in range(request.params.n)]

    def unknown_words(self, text: str) -> list[str]:
        """The parts of a text for which the tokenizer has nothing but its unknown token."""
        hf = self.renderer.tokenizer.hf
        if hf.unk_token_id is None:
            return []
        found = hf.backend_tokenizer.encode(text, add_special_tokens=False)
        spans = [span for index, span in zip(found.ids, found.offsets, strict=True) if index == hf.unk_token_id]
        return list(dict.fromkeys(text[start:end] for start, end in spans))


Result = TypeVar("Result")
LOOK_S = 0.05  # between looks of the waiting thread, which is the one that Ctrl-C reaches


class Floor:
    """Who may work: always one member alone, so that no two threads share a device or its random parts."""

    def __init__(self, members: int) -> None:
        self._order = deque(range(members))
        self._changed = threading.Condition()
        self._stopped = False

    def wait(self, member: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == member)

    def pass_on(self, member: int) -> None:
        with self._changed:
            self._order.rotate(-1)
            self._changed.notify_all()
        self.wait(member)
        if self._stopped:
            raise ReplyStopped

    def leave(self, member: int) -> None:
        with self._changed:
            self._order.remove(member)
            self._changed.notify_all()

    def stop(self) -> None:
        self._stopped = True  # everybody notices at the next turn, still one after the other


class Worker(threading.Thread, Generic[Result]):
    """Does one job and keeps what came of it."""

    def __init__(self, job: Callable[[Callable[[], None]], Result], floor: Floor, member: int) -> None:
        super().__init__(name=f"assay-chat-{member}", daemon=True)
        self._job, self._floor, self._member = job, floor, member
        self.result: list[Result] = []
        self.error: BaseException | None = None
        # Not join(): before Python 3.13 a Ctrl-C that reaches it marks a thread as ended that still runs.
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._floor.wait(self._member)
            self.result.append(self._job(lambda: self._floor.pass_on(self._member)))
        except BaseException as error:  # raised again where the workers are waited for
            self.error = error
        finally:
            self._floor.leave(self._member)
            self.done.set()


def take_turns(jobs: Sequence[Callable[[Callable[[], None]], Result]]) -> list[Result]:
    """The results of all jobs. Each is given a function to call whenever it may be another's turn.

    After Ctrl-C that function raises ReplyStopped, in every job; what they make of it is still their result.
    """
    floor = Floor(len(jobs))
    workers = [Worker(job, floor, member) for member, job in enumerate(jobs)]
    for worker in workers:
        worker.start()
    while not all(worker.done.is_set() for worker in workers):
        try:
            for worker in workers:
                worker.done.wait(LOOK_S)
        except KeyboardInterrupt:
            floor.stop()
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    return [worker.result[0] for worker in workers]


SHORT = 60  # characters of an answer or a gold answer that a verdict quotes


def verdict_line(verdict: Verdict, gold: str) -> str:
    """ok: parsed 18, gold 18, reward 1"""
    parsed = "nothing parsed" if verdict.parsed is None else f"parsed {brief(verdict.parsed)}"
    facts = [parsed, *([f"gold {brief(gold)}"] if gold else []), f"reward {verdict.reward:.4g}"]
    return f"{verdict.status}: {', '.join(facts)}" + (f" ({verdict.detail})" if verdict.detail else "")


def summary_line(replies: Sequence[Reply]) -> str:
    """Share of right answers, and the unbiased pass@k for every k."""
    verdicts = [reply.verdict for reply in replies if reply.verdict is not None]
    n, correct = len(verdicts), sum(verdict.correct for verdict in verdicts)
    if n < 2:
        return ""
    curve = ", ".join(f"pass@{k} {pass_at_k(n, correct, k):.3f}" for k in range(1, n + 1))
    reward = sum(verdict.reward for verdict in verdicts) / n
    return f"{correct} of {n} correct ({100 * correct / n:.1f} %), mean reward {reward:.4g}; {curve}"


def brief(text: str) -> str:
    line = " ".join(text.split()) or '""'
    return line if len(line) <= SHORT else line[: SHORT - 3] + "..."


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
