"""Questions of tasks, and who grades the answers to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from assay.cli.chat_model import Reply
from assay.config import MeasureConfig
from assay.rewards import JudgePool
from assay.tasks import SPLITS, Task
from assay.tasks.base import ALL, UNLIMITED, prompts_of
from assay.train import components
from assay.types import Prompt, UserError

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
