"""Replies of models, token by token, and their display: one after the other, or side by side in a wide terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from assay.engine.base import BaseEngine, Request, SamplingParams
from assay.engine.client import EngineClient, connect, run_sync
from assay.envs import Env
from assay.envs.base import Info, Observation, Step, as_messages
from assay.evals import pass_at_k
from assay.rollout import Limits, with_stops
from assay.rollout.episodes import Episode, EpisodeRules, GroupPlayer
from assay.runs.console import one_line, printable, raw_stream
from assay.text import Renderer
from assay.text.tokenizer import TextStream
from assay.types import Finish, Message, Prompt, UserError, Verdict, excerpt, plural

INSERTED = "dim"  # style of text that the environment wrote
Pieces = list[tuple[str, str]]  # printable texts and their styles


class SingleReply(Env):
    """Any question, with one reply: a chat without an environment."""

    name = ""
    max_steps = 1
    judged = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        return (options or {})["prompt"].messages, {}

    def step(self, action: str) -> Step:
        return "", 0.0, True, False, {"answer": action}


class Played(NamedTuple):
    """The environment in which a question is answered."""

    env: Env
    limits: Limits = Limits()


@dataclass
class Reply:
    """One answer, complete or interrupted."""

    episode: Episode
    pieces: Pieces  # for display: without the stop string that ended it
    messages: list[Message]  # of the model, and of the environment between them
    finish: Finish | None  # None: interrupted by the user
    verdict: Verdict | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass
class ChatModel:
    """A model and its conversation."""

    name: str
    renderer: Renderer
    engine: BaseEngine
    played: Played = field(default_factory=lambda: Played(SingleReply()))
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
    """The replies of a model to one prompt: episodes of an environment, and their text as it is written."""

    def __init__(
        self,
        model: ChatModel,
        prompt: Prompt,
        ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        played: Played | None = None,  # None: the model's own
    ) -> None:
        self.env, limits = played or model.played
        params = with_stops(params, model.renderer, self.env)
        self.model, self.prompt, self.prompt_length, self.samples = model, prompt, len(ids), params.n
        self.request = Request(ids, params, seed, name=model.name, stream=True)
        self.rules = EpisodeRules(model.engine.info, model.renderer, self.env, limits)
        self.error: UserError | None = None
        self.pieces: list[Pieces] = [[] for _ in range(params.n)]
        self.on_text: Callable[[int, str, str], None] = lambda sample, text, style: None
        self._episodes: list[Episode] = []
        self._messages: list[list[Message]] = [[{"role": "assistant", "content": ""}] for _ in range(params.n)]
        # Not shown. A stop string of the environment only ends a turn, and belongs to the reply.
        self._stops = [stop for stop in params.stop if stop not in self.env.stop]
        self._streams = [TextStream(model.renderer.decode, self._stops) for _ in range(params.n)]

    async def play(self, client: EngineClient) -> None:
        """Play the episodes to their end, or until an error, which is stored."""
        player = GroupPlayer(client, self.rules)
        group = player.start(self.prompt, self.request, listener=self)
        self._episodes = group.episodes
        try:
            await group.result
        except UserError as error:
            self.error = error
        finally:
            group.cancel()

    def receive(self, episode: Episode, token_ids: Sequence[int]) -> None:
        self._write(episode.sample, self._streams[episode.sample].add(token_ids))

    def stepped(self, episode: Episode) -> None:
        self._write(episode.sample, self._streams[episode.sample].finish())
        if text := self._observation(episode):
            self._show(episode.sample, text, INSERTED)
        self._streams[episode.sample] = TextStream(self.model.renderer.decode, self._stops, episode.reply)

    def replies(self) -> list[Reply]:
        if self.error is not None:
            return []
        parts = zip(self._episodes, self.pieces, self._messages, strict=True) if self._episodes else ()
        return [Reply(episode, pieces, messages, finish_of(episode)) for episode, pieces, messages in parts]

    def _observation(self, episode: Episode) -> str:
        """What the environment wrote in its last step, for display; it is also added to the conversation."""
        env, messages = self.env, self._messages[episode.sample]
        if env.inline:
            text = "" if episode.over else episode.inserted
            messages[-1]["content"] += text
            return text
        observed = as_messages(episode.observation, env.role) if episode.observation or not episode.over else ()
        if not episode.over:
            messages += [*observed, {"role": "assistant", "content": ""}]
        lines = "".join(f"\n[{message['role']}] {message['content']}" for message in observed)
        return lines if episode.over else f"{lines}\n"

    def _write(self, sample: int, text: str) -> None:
        """Text of the policy."""
        self._messages[sample][-1]["content"] += text
        self._show(sample, text)

    def _show(self, sample: int, text: str, style: str = "") -> None:
        piece = printable(text), style
        self.pieces[sample].append(piece)
        self.on_text(sample, *piece)


def finish_of(episode: Episode) -> Finish | None:
    """How the last turn ended; `Finish.LENGTH` if a limit of the episode ended it, None if it is not over."""
    if not episode.over:
        return None
    return Finish.LENGTH if episode.bootstrap_ids is not None else episode.turns[-1].completion.finish


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


def generate_replies(streams: Sequence[ReplyStream], on_text: Callable[[int, int, str, str], None]) -> None:
    """Play all streams until they end or Ctrl-C is pressed. `on_text(stream, sample, text, style)`."""

    def check() -> None:
        if interrupts:
            raise KeyboardInterrupt

    async def play_all() -> None:
        await asyncio.gather(*(stream.play(client) for stream, client in zip(streams, clients, strict=True)))

    clients = [connect(stream.model.engine, after_step=check) for stream in streams]
    for index, stream in enumerate(streams):
        stream.on_text = partial(on_text, index)
    with deferred_interrupt() as interrupts, suppress(KeyboardInterrupt):
        run_sync(play_all(), *clients)


QUOTED = 60  # characters of an answer or a gold answer that a verdict quotes


def verdict_line(verdict: Verdict, gold: str) -> str:
    """ok: parsed 18, gold 18, reward 1"""
    parsed = "nothing parsed" if verdict.parsed is None else "parsed " + (excerpt(verdict.parsed, QUOTED) or '""')
    facts = [parsed, *([f"gold {excerpt(gold, QUOTED)}"] if gold else []), f"reward {verdict.reward:.4g}"]
    return f"{verdict.status}: {', '.join(facts)}" + (f" ({verdict.detail})" if verdict.detail else "")


def summary_line(verdicts: Sequence[Verdict]) -> str:
    """Fraction of correct answers, and the unbiased pass@k for every k."""
    n, correct = len(verdicts), sum(verdict.correct for verdict in verdicts)
    if n < 2:
        return ""
    curve = ", ".join(f"pass@{k} {pass_at_k(n, correct, k):.3f}" for k in range(1, n + 1))
    reward = sum(verdict.reward for verdict in verdicts) / n
    return f"{correct} of {n} correct ({100 * correct / n:.1f} %), mean reward {reward:.4g}; {curve}"


MIN_COLUMN = 24  # characters of a readable column
FRAME = 6  # lines of the terminal that are not available for text while it is generated
MARGIN = 4  # free columns: the ^C that a terminal echoes must not wrap, or the table would be redrawn one line off

Grade = Callable[[ChatModel, list[Reply]], None]  # sets the verdicts, if there is something to grade


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

    def print(self, text: str | Text, style: str = "") -> None:
        shown = Text(printable(text), style) if isinstance(text, str) else text
        if self._terminal:
            self._out.print(shown)
        else:
            print(shown.plain, flush=True)

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
            grade(stream.model, replies)
            for line in report(replies, gold, texts=samples > 1):
                self.print(line)
            if any(reply.finish is None for reply in replies):
                break
        return shown

    def _write(self, _stream: int, _sample: int, text: str, style: str) -> None:
        if style and self._terminal:
            self._out.print(Text(text, style), end="", soft_wrap=True)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()


def report(replies: Sequence[Reply], gold: str, texts: bool) -> Iterator[Text]:
    """With `texts`, the numbered texts; verdicts and summary."""
    shown = numbered([reply.pieces for reply in replies])
    for reply, text in zip(replies, shown, strict=True):
        if texts:
            yield text
        if reply.verdict is not None:
            yield Text(printable(verdict_line(reply.verdict, gold)), "green" if reply.verdict.correct else "red")
    if summary := summary_line([reply.verdict for reply in replies if reply.verdict is not None]):
        yield Text(summary, "bold")


def numbered(texts: Sequence[Pieces]) -> list[Text]:
    """One text without a number, or several with their numbers."""
    numbers = [f"({number}) " for number in range(1, len(texts) + 1)] if len(texts) > 1 else [""]
    return [Text.assemble(number, *pieces) for number, pieces in zip(numbers, texts, strict=False)]


class Columns:
    """A table with a column per model, redrawn as the answers grow."""

    def __init__(self, console: Console, streams: Sequence[ReplyStream], gold: str) -> None:
        self._console, self._streams, self._gold = console, streams, gold
        self._replies: list[list[Reply]] | None = None  # once they are graded
        self._width = console.width - MARGIN

    def show(self, grade: Grade) -> list[list[Reply]]:
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=12):
            generate_replies(self._streams, lambda *_: None)
            replies = [stream.replies() for stream in self._streams]
            for stream, group in zip(self._streams, replies, strict=True):
                grade(stream.model, group)
            self._replies = replies
        return replies

    def _table(self) -> Table:
        table = Table(width=self._width, show_edge=False, pad_edge=False)
        for stream in self._streams:
            table.add_column(Text(one_line(stream.model.name), style="bold"), ratio=1, overflow="fold")
        table.add_row(*(self._cell(index) for index in range(len(self._streams))))
        return table

    def _cell(self, index: int) -> Group | Text:
        if self._replies is not None:
            return Group(*report(self._replies[index], self._gold, texts=True))
        # Only the last lines: a table higher than the terminal could not be redrawn in place.
        width = max(self._width // len(self._streams) - 3, 1)
        wrapped = Text("\n").join(numbered(self._streams[index].pieces)).wrap(self._console, width, overflow="fold")
        return Text("\n").join(wrapped[-max(self._console.height - FRAME, 1) :])
