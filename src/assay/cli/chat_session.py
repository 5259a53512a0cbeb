"""A conversation: questions to all models, commands that begin with a slash, and what is remembered between them."""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from assay.cli.chat_model import OnText, Reply, Speaker
from assay.cli.chat_screen import Screen
from assay.cli.chat_task import TaskDesk, parse_wish
from assay.engine.base import SamplingParams
from assay.rollout.collect import request_seed
from assay.types import Finish, Message, Prompt, UserError

COMMANDS = {
    "/task [NAME] [INDEX|random] [SPLIT]": "ask a question of a task, without earlier turns, and grade the answers",
    "/again": "ask the last question again; other random choices, and the new answers replace the old",
    "/clear": "forget the conversation",
    "/temperature T": "0 always takes the likeliest token, 1 samples from the model as it is",
    "/samples N": "answers to each question; a task's are summed up as pass@k, the first is remembered",
    "/max N": "tokens after which an answer is cut off",
    "/system TEXT": "set the system message; without text: back to the one of the settings",
    "/help": "this list",
    "/quit": "leave, as does Ctrl-D; Ctrl-C stops an answer",
}
SHOWN_UNKNOWN = 5
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Question:
    """The last thing asked: enough to ask it again."""

    prompt: Prompt
    task: str = ""  # the task whose judge grades the answers; empty: nobody does


class ChatSession:
    def __init__(
        self, speakers: Sequence[Speaker], desk: TaskDesk, params: SamplingParams, seed: int, screen: Screen
    ) -> None:
        self.speakers, self.desk, self.params, self.seed, self.screen = speakers, desk, params, seed, screen
        self._turn = 0
        self._last: Question | None = None
        self._before: list[list[Message]] = [[] for _ in speakers]  # histories without the last question
        self._systems = [speaker.renderer.system for speaker in speakers]
        self._interrupted = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/task": self._task,
            "/again": self._again,
            "/clear": self._clear,
            "/temperature": self._temperature,
            "/samples": self._samples,
            "/max": self._max,
            "/system": self._system,
            "/help": self._help,
        }

    def take(self, line: str) -> bool:
        """Do what a line asks for; False if that is to leave. Raises KeyboardInterrupt after a stopped answer."""
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/") or text.startswith("//"):
            self._ask(Question(Prompt(f"chat/{self._turn}", (user(text.removeprefix("/")),))))
            return True
        name, _, rest = text.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name not in self._commands:
            raise UserError(unknown_command(name, [*self._commands, "/quit"]))
        self._commands[name](rest.strip())
        return True

    def _ask(self, question: Question) -> None:
        self._last = question
        self._before = [list(speaker.history) for speaker in self.speakers]
        self._interrupted = False
        problems: list[UserError] = []
        asked: list[tuple[Speaker, list[int]]] = []
        for speaker in self.speakers:
            try:
                ids, note = speaker.prompt_ids(question.prompt)
            except UserError as error:
                problems.append(error)
                continue
            asked.append((speaker, ids))
            if note:
                self.screen.note(note)
        self._hint([speaker for speaker, _ in asked], question.prompt.question)
        self._turn += 1
        seed = request_seed(self.seed, self._turn, question.prompt.id)

        def ask(place: int, on_text: OnText) -> list[Reply]:
            speaker, ids = asked[place]
            try:
                return speaker.answer(ids, self.params, seed, on_text)
            except UserError as error:  # e.g. weights that give no numbers
                problems.append(error)
                return []

        def grade(replies: list[Reply]) -> None:
            self._grade(question, replies)

        names = [speaker.name for speaker, _ in asked]
        found = self.screen.show(names, ask, grade, question.prompt.answer, self.params.n)
        for (speaker, ids), replies in zip(asked, found, strict=False):
            self._remember(speaker, question.prompt, replies, len(ids))
        if self._interrupted:
            raise KeyboardInterrupt
        if problems:
            raise UserError("; ".join(map(str, problems)))

    def _grade(self, question: Question, replies: list[Reply]) -> None:
        try:
            if any(reply.finish is None for reply in replies):
                self._interrupted = True
            elif question.task and replies:
                self.desk.grade(question.task, question.prompt, replies)
        except KeyboardInterrupt:
            self._interrupted = True

    def _remember(self, speaker: Speaker, prompt: Prompt, replies: Sequence[Reply], prompt_length: int) -> None:
        if not replies:
            return
        first = replies[0]
        cut = sum(reply.finish is Finish.LENGTH for reply in replies)
        if cut:
            full = prompt_length + self.params.max_new_tokens > speaker.engine.info.max_length
            advice = "the context is full, /clear makes room" if full else "/max N allows more tokens"
            which = "the answer was" if len(replies) == 1 else f"{cut} of {len(replies)} answers were"
            self.screen.note(f"{speaker.name}: {which} cut off: {advice}")
        elif not any(reply.text.strip() for reply in replies) and first.finish is not None:
            self.screen.note(f"{speaker.name}: the answer is empty")
        if first.finish is not None or first.text:
            speaker.history += [*prompt.messages, {"role": "assistant", "content": first.text}]

    def _hint(self, speakers: Sequence[Speaker], text: str) -> None:
        """Say which words mean nothing to whom; small tokenizers know only what their model was made for."""
        names: dict[tuple[str, ...], list[str]] = {}
        for speaker in speakers:
            names.setdefault(tuple(speaker.unknown_words(text)), []).append(speaker.name)
        for words, who in names.items():
            if words:
                shown = ", ".join(words[:SHOWN_UNKNOWN]) + (", ..." if len(words) > SHOWN_UNKNOWN else "")
                self.screen.note(f"no such words in the tokenizer of {', '.join(who)}: {shown}")

    def _task(self, rest: str) -> None:
        wish = parse_wish(rest.split(), self.desk.default_task)
        prompt, split, index = self.desk.question(
            wish, random.Random(request_seed(self.seed, self._turn, "any question"))
        )
        self.screen.say(f"{wish.name}, {split} question {index}:", "bold")
        self.screen.say(prompt.question)
        self._forget()
        self._ask(Question(prompt, wish.name))

    def _again(self, _: str) -> None:
        if self._last is None:
            raise UserError("nothing was asked yet")
        for speaker, history in zip(self.speakers, self._before, strict=True):
            speaker.history = history
        self._ask(self._last)

    def _clear(self, _: str) -> None:
        self._forget()
        self._last = None
        self.screen.note("the conversation is forgotten")

    def _forget(self) -> None:
        for speaker in self.speakers:
            speaker.history = []

    def _temperature(self, rest: str) -> None:
        if rest:
            self.params = changed(self.params, temperature=number(rest, float, "/temperature 0.7"))
        self.screen.note(f"temperature {self.params.temperature:g}")

    def _samples(self, rest: str) -> None:
        if rest:
            self.params = changed(self.params, n=number(rest, int, "/samples 8"))
        self.screen.note(f"{self.params.n} answers a question" if self.params.n > 1 else "1 answer a question")

    def _max(self, rest: str) -> None:
        if rest:
            self.params = changed(self.params, max_new_tokens=number(rest, int, "/max 512"))
        self.screen.note(f"answers end after {self.params.max_new_tokens} tokens")

    def _system(self, rest: str) -> None:
        for speaker, system in zip(self.speakers, self._systems, strict=True):
            speaker.renderer.system = rest or system
        self.screen.note("the system message is set" if rest else "the system message is that of the settings again")

    def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        for usage, meaning in COMMANDS.items():
            self.screen.say(f"  {usage:<{width}}  {meaning}")
        self.screen.say("Anything else is said to the models; begin with // for a text that begins with a slash.")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def changed(params: SamplingParams, **changes: Any) -> SamplingParams:
    """The parameters with these changes, if they make sense."""
    new = replace(params, **changes)
    if complaint := new.complaint():
        raise UserError(complaint)
    return new


def number(text: str, kind: type[Number], example: str) -> Number:
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"'{text}' is not a number as in {example}") from None
    if not math.isfinite(value):
        raise UserError(f"'{text}' is no finite number: say for instance {example}")
    return value


def unknown_command(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "/help lists them"
    return f"unknown command {name}: {hint} (a text that begins with a slash is written with two, /{name})"
