"""A conversation with one or several models: questions, commands, and questions of tasks, which are graded."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from assay.build.models import episode_limits
from assay.build.problems import build_problems, take
from assay.cli.chat_screen import ChatModel, Played, Reply, ReplyStream, Screen
from assay.config import MeasureConfig
from assay.config.sections import EnvConfig, TaskConfig
from assay.engine.base import UNKNOWN_LENGTH, SamplingParams
from assay.envs import Env, TaskEnv
from assay.rewards import Judging
from assay.rollout import Collector, request_seed
from assay.tasks import SPLITS, Task
from assay.tasks.base import ALL, UNLIMITED, prompts_of
from assay.tasks.registry import build_judge_pool
from assay.types import Finish, Message, Prompt, Status, UserError, plural, unknown_name

# Questions of tasks

RANDOM_RANGE = 10_000  # a random question of an endless split is one of the first, so that its index stays short
USAGE = "/task NAME [INDEX|random] [SPLIT], e.g. /task gsm8k 17"


@dataclass(frozen=True)
class TaskRequest:
    """The parsed words after /task."""

    name: str
    index: int | None  # None: random
    split: str | None  # None: test, or all of a single file


def parse_task_request(words: Sequence[str], default_task: str) -> TaskRequest:
    """NAME may be left out if the settings, or the run of a checkpoint, name a task."""
    name, index, split = default_task, None, None
    for position, word in enumerate(words):
        if word in (*SPLITS, ALL):
            split = word
        elif word == "random":
            index = None
        elif word.removeprefix("-").isdecimal():
            index = int(word)
        elif position == 0:
            name = word
        else:
            known = ", ".join((*SPLITS, ALL))
            raise UserError(f"'{word}' is neither a number, nor 'random', nor one of {known}: {USAGE}")
    if not name:
        raise UserError(f"which task? {USAGE}")
    return TaskRequest(name, index, split)


class TaskQuestions:
    """Tasks by name and environments on them, created when they are first used, and their judges.

    `cfg` is used for the task that it names. Other tasks use `plain`: only the user's own settings, not a run's.
    """

    def __init__(self, cfg: MeasureConfig, plain: MeasureConfig) -> None:
        self.default_task = cfg.task.name or cfg.env.name
        self._cfg, self._plain = cfg, plain
        self._problems: dict[str, Task] = {}
        self._judges: dict[str, Judging] = {}

    def task(self, name: str) -> Task:
        """The task of this name; if it is the default task, the environment on it."""
        if name == self.default_task:
            return self.problems(self._cfg.task, self._cfg.env)
        task_cfg = self._plain.task
        cfg = task_cfg if task_cfg.name in ("", name) else task_cfg.model_copy(update={"path": "", "args": {}})
        return self.problems(cfg.model_copy(update={"name": name}), EnvConfig())

    def problems(self, task: TaskConfig, env: EnvConfig) -> Task:
        """The task, or the environment if there is one. Equal settings share it."""
        key = task.model_dump_json() + env.model_dump_json()
        if key not in self._problems:
            try:
                self._problems[key] = build_problems(task, env)
            except UserError as error:
                hint = "" if task.path else "; give the path of its data with --task NAME --task.path PATH"
                hint = '; to chat without the environment, add --env ""' if env.name else hint
                raise UserError(f"{error}{hint}") from error
        return self._problems[key]

    def environment(self, name: str) -> Played | None:
        """The environment in which all models answer the questions of a task; None: each answers in its own one."""
        problems = self.task(name)
        if not isinstance(problems, Env) or answers_any_question(problems):
            return None
        return Played(problems, episode_limits(self._cfg.env))

    def question(self, request: TaskRequest, rng: random.Random) -> tuple[Prompt, str, int]:
        """Return a problem, its split and its index."""
        split = request.split or self._default_split(request.name)
        prompts = take(prompts_of(self.task(request.name), split), 0, split, endless=True)
        size = len(prompts)
        if request.index is None:
            index = rng.randrange(RANDOM_RANGE if size >= UNLIMITED else size)
        elif 0 <= request.index < size:
            index = request.index
        else:
            raise UserError(f"{request.name} has {plural(size, f'{split} question')}: choose one from 0 to {size - 1}")
        return prompts[index], split, index

    def grade(self, name: str, prompt: Prompt, model: ChatModel, replies: Sequence[Reply]) -> None:
        collector = Collector(model.engine, model.renderer, self._judge(name))
        (group,) = collector.judge_episodes([prompt], [[reply.episode for reply in replies]])
        for reply, rollout in zip(replies, group.rollouts, strict=True):
            reply.verdict = rollout.verdict

    def close(self) -> None:
        for judge in self._judges.values():
            judge.close()
        for problems in self._problems.values():
            if isinstance(problems, Env):
                problems.close()

    def _default_split(self, name: str) -> str:
        """All of a single file that the user named; if a run was trained on the file, its test split."""
        task_cfg = self._plain.task
        named = name != self.default_task or bool(task_cfg.name or task_cfg.path)
        return ALL if named and self.task(name).has_all else "test"

    def _judge(self, name: str) -> Judging:
        if name not in self._judges:
            cfg = self._cfg if name == self.default_task else self._plain
            # One worker is enough for one user; a second would only delay the first verdict.
            single = cfg.reward.model_copy(update={"workers": min(cfg.reward.workers, 1)})
            self._judges[name] = build_judge_pool(single, self.task(name), cfg.judge)
        return self._judges[name]


def answers_any_question(problems: Task | None) -> TypeGuard[TaskEnv]:
    """Whether this is an environment, such as the calculator, that also plays questions from elsewhere.

    Others pose their own problems, or grade each step by the gold answer.
    """
    return isinstance(problems, TaskEnv) and problems.judged


# The conversation

COMMANDS = {
    "/task [NAME] [INDEX|random] [SPLIT]": "ask a question of a task, without earlier turns, and grade the answers",
    "/again": "ask the last question again with other random numbers; the new answers replace the old ones",
    "/clear": "delete the history",
    "/temperature T": "0 always takes the most likely token, 1 samples from the unchanged distribution",
    "/samples N": "answers per question, with pass@k for questions of a task; the first is kept in the history",
    "/max N": "maximum tokens per answer",
    "/system TEXT": "set the system message; without TEXT: restore the one of the settings",
    "/help": "show this list",
    "/quit": "exit, as does Ctrl-D; Ctrl-C stops an answer",
}
NAMES = [usage.partition(" ")[0] for usage in COMMANDS]
SHOWN_UNKNOWN = 5  # words
# Commands that set a sampling parameter: its name, its type and the text that confirms it.
PARAMETERS: dict[str, tuple[str, type, str]] = {
    "/temperature": ("temperature", float, "temperature {:g}"),
    "/samples": ("n", int, "samples per question: {}"),
    "/max": ("max_new_tokens", int, "maximum tokens per answer: {}"),
}


@dataclass(frozen=True)
class Question:
    """The last question, which can be asked again."""

    prompt: Prompt
    task: str = ""  # its judge grades the answers; empty: none
    played: Played | None = None  # the environment that poses it; None: models answer in their own environments


class ChatSession:
    """Questions to all models, and commands that begin with a slash."""

    def __init__(
        self, models: Sequence[ChatModel], questions: TaskQuestions, params: SamplingParams, seed: int, screen: Screen
    ) -> None:
        self.models, self.questions, self.params, self.seed, self.screen = models, questions, params, seed, screen
        self._turn = 0
        self._last: Question | None = None
        self._before: list[list[Message]] = [[] for _ in models]  # histories without the last question
        self._systems = [model.renderer.system for model in models]
        self._interrupted = False

    def handle(self, line: str) -> bool:
        """Answer a question or run a command; False: exit. Raises KeyboardInterrupt after an interrupted answer."""
        text = line.strip()
        name, _, rest = text.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if text and (not text.startswith("/") or text.startswith("//")):
            message: Message = {"role": "user", "content": text.removeprefix("/")}
            self._ask(Question(Prompt(f"chat/{self._turn}", (message,))))
        elif name in PARAMETERS:
            self._set_parameter(name, rest.strip())
        elif name in NAMES:
            getattr(self, f"_{name[1:]}")(rest.strip())
        elif text:
            error = unknown_name("command", name, NAMES)
            raise UserError(f"{error}; to send a text that begins with a slash, write /{name}")
        return True

    def _ask(self, question: Question) -> None:
        self._last = question
        self._before = [list(model.history) for model in self.models]
        self._interrupted = False
        self._turn += 1
        seed = request_seed(self.seed, self._turn, question.prompt.id)
        errors: list[UserError] = []
        streams: list[ReplyStream] = []
        for model in self.models:
            try:
                ids, note = model.prompt_ids(question.prompt)
            except UserError as error:
                errors.append(error)
                continue
            streams.append(ReplyStream(model, question.prompt, ids, self.params, seed, question.played))
            if note:
                self.screen.note(note)
        self._note_unknown_words([stream.model for stream in streams], question.prompt.question)
        all_replies = self.screen.show(streams, partial(self._grade, question), question.prompt.answer)
        for stream, replies in zip(streams, all_replies, strict=False):
            self._remember(stream, question.prompt, replies)
        if self._interrupted:
            raise KeyboardInterrupt
        if errors := errors + [stream.error for stream in streams if stream.error is not None]:
            raise UserError("; ".join(map(str, errors)))

    def _grade(self, question: Question, model: ChatModel, replies: list[Reply]) -> None:
        try:
            if any(reply.finish is None for reply in replies):
                self._interrupted = True
            elif question.task and replies:
                self.questions.grade(question.task, question.prompt, model, replies)
        except KeyboardInterrupt:
            self._interrupted = True

    def _remember(self, stream: ReplyStream, prompt: Prompt, replies: Sequence[Reply]) -> None:
        if not replies:
            return
        first, model = replies[0], stream.model
        truncated = [reply.episode for reply in replies if reply.finish is Finish.LENGTH]
        failed = [verdict for reply in replies if (verdict := reply.episode.verdict) and verdict.status is Status.ERROR]
        if truncated:
            full = stream.prompt_length + self.params.max_new_tokens > model.engine.info.max_length
            advice = "the context is full, /clear deletes the history" if full else "/max N allows more tokens"
            which = "the answer was" if len(replies) == 1 else f"{len(truncated)} of {len(replies)} answers were"
            self.screen.note(f"{model.name}: {which} truncated: {truncated[0].cut_off or advice}")
        elif failed and first.verdict is None:
            self.screen.note(f"{model.name}: the environment failed: {failed[0].detail}")
        elif not any(reply.text.strip() for reply in replies) and first.finish is not None:
            self.screen.note(f"{model.name}: the answer is empty")
        if first.finish is not None or first.text:
            model.history += [*prompt.messages, *first.messages]

    def _note_unknown_words(self, models: Sequence[ChatModel], text: str) -> None:
        """Small tokenizers have only the words that their model was trained on."""
        names: dict[tuple[str, ...], list[str]] = {}
        for model in models:
            names.setdefault(tuple(model.unknown_words(text)), []).append(model.name)
        for words, models_without in names.items():
            if words:
                shown = ", ".join(words[:SHOWN_UNKNOWN]) + (", ..." if len(words) > SHOWN_UNKNOWN else "")
                self.screen.note(f"unknown words for the tokenizer of {', '.join(models_without)}: {shown}")

    def _task(self, rest: str) -> None:
        request = parse_task_request(rest.split(), self.questions.default_task)
        rng = random.Random(request_seed(self.seed, self._turn, "any question"))
        prompt, split, index = self.questions.question(request, rng)
        self.screen.print(f"{request.name}, {split} question {index}:", "bold")
        self.screen.print(prompt.question)
        self._delete_history()
        self._ask(Question(prompt, request.name, self.questions.environment(request.name)))

    def _again(self, _: str) -> None:
        if self._last is None:
            raise UserError("there is no question to repeat yet")
        for model, history in zip(self.models, self._before, strict=True):
            model.history = history
        self._ask(self._last)

    def _clear(self, _: str) -> None:
        self._delete_history()
        self._last = None
        self.screen.note("the history is deleted")

    def _delete_history(self) -> None:
        for model in self.models:
            model.history = []

    def _set_parameter(self, command: str, text: str) -> None:
        name, kind, confirmation = PARAMETERS[command]
        if text:
            params = replace(self.params, **{name: parse_number(text, kind)})
            if problem := params.problem():
                raise UserError(problem)
            self.params = params
        self.screen.note(confirmation.format(getattr(self.params, name)))

    def _system(self, rest: str) -> None:
        for model, system in zip(self.models, self._systems, strict=True):
            model.renderer.system = rest or system
        self.screen.note("the system message is set" if rest else "the system message of the settings is restored")

    def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        for usage, meaning in COMMANDS.items():
            self.screen.print(f"  {usage:<{width}}  {meaning}")
        self.screen.print("All other text is sent to the models. // sends a text that begins with a slash.")


def parse_number(text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"'{text}' is not {'an integer' if kind is int else 'a finite number'}")
    return value


def answer_all(session: ChatSession, lines: Iterable[str]) -> int:
    """Without a user at the keyboard: handle every line; the exit code is 2 if one of them failed."""
    code, empty = 0, True
    for line in lines:
        empty = empty and not line.strip()
        try:
            if not session.handle(line):
                break
        except UserError as error:
            session.screen.error(str(error))
            code = 2
    if empty:
        raise UserError("no question: pipe in one per line, give --prompt TEXT, or start the chat in a terminal")
    return code


def converse(session: ChatSession) -> int:
    welcome(session)
    interrupts = 0  # consecutive ones: the first stops an answer or asks, the second exits
    while True:
        try:
            if not sys.stdout.isatty():  # the prompt must not be part of piped answers
                print("> ", end="", file=sys.stderr, flush=True)
            line = input("> " if sys.stdout.isatty() else "")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            interrupts += 1
            if interrupts > 1:
                return 130
            session.screen.note("press Ctrl-C again, Ctrl-D or /quit to exit")
            continue
        interrupts = 0
        try:
            if not session.handle(line):
                return 0
        except UserError as error:
            session.screen.error(str(error))
        except KeyboardInterrupt:
            interrupts = 1
            session.screen.note("stopped; press Ctrl-C again to exit")


def welcome(session: ChatSession) -> None:
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # line editing and history in `input`
    for model in session.models:
        length = model.engine.info.max_length
        context = f"context of {length} tokens" if length < UNKNOWN_LENGTH else "context of unknown length"
        env = f", environment {name}" if (name := model.played.env.name) else ""
        session.screen.note(f"{model.name}: {model.renderer.style} style, {context}{env}")
    default = session.questions.default_task
    task = f"/task asks a question of {default}, " if default else ""
    session.screen.note(f"temperature {session.params.temperature:g}; {task}/help lists all commands, /quit exits")
