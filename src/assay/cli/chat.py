"""Questions of tasks, and who grades the answers to them.

A conversation: questions to all models, commands that begin with a slash, and what is remembered between them.

`assay chat`: talk to one or several models, in a terminal or from a script.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from assay.cli.chat_screen import OnText, Reply, Screen, Speaker
from assay.cli.common import add_trust, inherited_settings
from assay.config import Count, EvalConfig, MeasureConfig, NonNegative
from assay.config.settings import load_settings, parse_overrides
from assay.engine.base import SamplingParams
from assay.rewards import JudgePool
from assay.rollout.collect import request_seed
from assay.runs.resolve import PREFIX
from assay.tasks import SPLITS, Task
from assay.tasks.base import ALL, UNLIMITED, prompts_of
from assay.train import components
from assay.types import Finish, Message, Prompt, UserError, unknown_name

if TYPE_CHECKING:
    from assay.cli.chat_screen import Screen, Speaker

FIRST_OF_MANY = 10_000  # a random question of a split without end is one of these, so that its number stays short
USAGE = "/task NAME [INDEX|random] [SPLIT], e.g. /task gsm8k 17"


@dataclass(frozen=True)
class Wish:
    """What the words after /task ask for."""

    name: str
    index: int | None  # None: any
    split: str | None  # None: test, or all of a single file


def parse_wish(words: Sequence[str], default_task: str) -> Wish:
    """NAME may be left out where the settings, or the run of a checkpoint, name a task."""
    name, index, split = default_task, None, None
    for place, word in enumerate(words):
        if word in (*SPLITS, ALL):
            split = word
        elif word == "random":
            index = None
        elif word.removeprefix("-").isdecimal():
            index = int(word)
        elif place == 0:
            name = word
        else:
            known = ", ".join((*SPLITS, ALL))
            raise UserError(f"'{word}' is neither a number, nor 'random', nor one of {known}: {USAGE}")
    if not name:
        raise UserError(f"which task? {USAGE}")
    return Wish(name, index, split)


class TaskDesk:
    """Tasks by name, each made when it is first asked for, with its own judges.

    The task that the settings name is made as they say. For any other, settings that a run brought along do not hold:
    `plain` has only what the person asked for.
    """

    def __init__(self, cfg: MeasureConfig, plain: MeasureConfig) -> None:
        self.default_task = cfg.task.name
        self._cfg, self._plain = cfg, plain
        self._tasks: dict[str, Task] = {}
        self._judges: dict[str, JudgePool] = {}

    def task(self, name: str) -> Task:
        if name not in self._tasks:
            own = self._settings(name).task
            cfg = own if own.name in ("", name) else own.model_copy(update={"path": "", "args": {}})
            try:
                self._tasks[name] = components.build_task(cfg.model_copy(update={"name": name}))
            except UserError as error:
                hint = "" if cfg.path else "; where its data lies is said by --task NAME --task.path PATH"
                raise UserError(f"{error}{hint}") from error
        return self._tasks[name]

    def question(self, wish: Wish, rng: random.Random) -> tuple[Prompt, str, int]:
        """A problem, its split and its number."""
        split = wish.split or self._default_split(wish.name)
        prompts = components.take(prompts_of(self.task(wish.name), split), 0, split, endless=True)
        size = len(prompts)
        if wish.index is not None and not 0 <= wish.index < size:
            raise UserError(f"{wish.name} has {size} {split} questions: choose one from 0 to {size - 1}")
        index = rng.randrange(FIRST_OF_MANY if size >= UNLIMITED else size) if wish.index is None else wish.index
        return prompts[index], split, index

    def grade(self, name: str, prompt: Prompt, replies: Sequence[Reply]) -> None:
        items = [(reply.full_text, prompt.answer, prompt.fields) for reply in replies]
        for reply, verdict in zip(replies, self._judge(name).judge(items), strict=True):
            reply.verdict = verdict

    def close(self) -> None:
        for judge in self._judges.values():
            judge.close()

    def _default_split(self, name: str) -> str:
        """All of a single file that the person named; of one that a run was trained on, what the run held out."""
        asked = self._plain.task
        named = name != self.default_task or bool(asked.name or asked.path)
        return ALL if named and self.task(name).has_all else "test"

    def _settings(self, name: str) -> MeasureConfig:
        return self._cfg if name == self.default_task else self._plain

    def _judge(self, name: str) -> JudgePool:
        if name not in self._judges:
            cfg = self._settings(name).reward
            # One process is enough for one person; a second would only make the first verdict wait.
            one = cfg.model_copy(update={"workers": min(cfg.workers, 1)})
            self._judges[name] = components.build_judge_pool(one, self.task(name))
        return self._judges[name]


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
    return f"{unknown_name('command', name, known)} (write a text that begins with a slash with two: /{name})"


HELP = """Talk to one or several models. /help in the chat lists its commands; /task asks a task's question and grades.

Several models answer the same questions side by side, each with its own history. A run's checkpoint brings the run's
task, prompt and length settings along. The same questions with the same --seed give the same answers.
  assay chat run:demo@0 run:demo@last
  assay chat Qwen/Qwen2.5-0.5B-Instruct --prompt "What is 3 + 4?" --temperature 0
  assay chat run:demo@best --samples 8 --prompt "/task abacus 17"
Questions also come from a pipe, one a line. Then, as with --prompt, the exit code is 2 if one could not be answered."""
PROMPT = "> "


class ChatSampling(EvalConfig):
    """How answers are sampled."""

    temperature: NonNegative = 0.7
    """0 always takes the likeliest token, 1 samples from the model as it is"""
    max_new_tokens: Count = 0
    """answers are cut off here; 0: as in the run of a checkpoint, or else 512"""


class ChatConfig(MeasureConfig):
    """A conversation with finished models."""

    eval: ChatSampling = Field(default_factory=ChatSampling)


SETTINGS = ChatConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder, hub id, GGUF file or run:NAME@STEP")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this and leave; may be repeated")
    parser.add_argument("--temperature", metavar="T", help="short for --eval.temperature [0.7]")
    parser.add_argument("--samples", metavar="N", help="short for --eval.samples [1]")
    parser.add_argument("--max", metavar="N", help="short for --eval.max_new_tokens")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    overrides = chosen(args)
    cfg = settings_of(args.models, overrides, args.trust)
    tolerate_any_text()
    from assay.cli.chat_screen import Screen
    from assay.rollout import sampling_params

    params = sampling_params(cfg.eval, cfg.eval.samples)
    screen = Screen()
    desk = TaskDesk(cfg, load_settings(ChatConfig, None, overrides))
    if {"task", "task.name"} & set(overrides):
        desk.task(cfg.task.name)  # a mistake in it should not wait for the first question
    try:
        speakers = [load_speaker(model, args.models, overrides, desk, args.trust) for model in args.models]
        session = ChatSession(speakers, desk, params, cfg.seed, screen)
        if args.prompt:
            return answer_all(session, [valid(text) for text in args.prompt])
        if not sys.stdin.isatty():
            return answer_all(session, sys.stdin)
        welcome(speakers, session, screen)
        return converse(session)
    finally:
        desk.close()


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """What the person asked for, as dotted overrides."""
    short = {"temperature": args.temperature, "samples": args.samples, "max_new_tokens": args.max}
    words = [word for key, value in short.items() if value is not None for word in (f"--eval.{key}", value)]
    return parse_overrides([*args.overrides, *words])


def settings_of(models: list[str], overrides: dict[str, Any], trust: bool = False) -> ChatConfig:
    """The options over the settings of the first model that is a run's checkpoint; not over how it was measured."""
    runs_dir = Path(str(overrides.get("runs_dir", ChatConfig().runs_dir)))
    dropped = {"task", "reward"} if {"task", "task.name"} & set(overrides) else set()
    inherited = {
        key: value
        for key, value in inherited_settings(models, runs_dir, overrides, trust).items()
        if key.partition(".")[0] not in {"eval", *dropped} or key in ("eval.max_new_tokens", "eval.stop")
    }
    return load_settings(ChatConfig, None, {**inherited, **overrides})


def load_speaker(
    model: str, models: list[str], overrides: dict[str, Any], desk: TaskDesk, trust: bool = False
) -> Speaker:
    """A checkpoint is asked as its own run asked it; any other model as the first checkpoint, so that they compare."""
    from assay.cli.chat_screen import Speaker
    from assay.train import components

    cfg = settings_of([model] if model.startswith(PREFIX) else models, overrides, trust)
    needs_task = cfg.prompt.few_shot and not cfg.prompt.few_shot_file and cfg.task.name
    try:
        renderer, engine = components.build_server(model, cfg, desk.task(cfg.task.name) if needs_task else None)
    except UserError as error:
        raise UserError(str(error) if model in str(error) else f"{model}: {error}") from error
    return Speaker(model, renderer, engine)


def answer_all(session: ChatSession, lines: Iterable[str]) -> int:
    """Without a person at the keyboard: every line is taken, and what went wrong shows in the exit code."""
    code = 0
    for line in lines:
        try:
            if not session.take(line):
                break
        except UserError as error:
            session.screen.complain(str(error))
            code = 2
    return code


def converse(session: ChatSession) -> int:
    interrupts = 0  # in a row: the first stops an answer or asks, the second leaves
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            interrupts += 1
            if interrupts > 1:
                return 130
            session.screen.note("Ctrl-C once more leaves, as do Ctrl-D and /quit")
            continue
        interrupts = 0
        try:
            if not session.take(line):
                return 0
        except UserError as error:
            session.screen.complain(str(error))
        except KeyboardInterrupt:
            interrupts = 1
            session.screen.note("stopped; Ctrl-C once more leaves")


def welcome(speakers: list[Speaker], session: ChatSession, screen: Screen) -> None:
    import importlib.util

    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # arrows and earlier lines in `input`
    for speaker in speakers:
        context = speaker.engine.info.max_length
        screen.note(f"{speaker.name}: {speaker.renderer.style} style, context of {context} tokens")
    task = f"/task asks a question of {session.desk.default_task}, " if session.desk.default_task else ""
    screen.note(f"temperature {session.params.temperature:g}; {task}/help lists all commands, /quit leaves")


def valid(text: str) -> str:
    """Bytes of an argument that are not UTF-8 become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def tolerate_any_text() -> None:
    """Neither a stray byte in a pipe nor a letter that the terminal lacks should end a conversation."""
    for stream in (sys.stdin, sys.stdout):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
