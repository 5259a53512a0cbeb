"""Several tasks as one: train problems in exact proportions, and each answer judged by the judge of its own task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from assay.rewards import Judge
from assay.rewards.judge import JudgeByTask
from assay.tasks.base import UNLIMITED, LazyPrompts, Task, check_split, stable_hash
from assay.types import TASK_LABEL, Prompt, UserError

EVAL_SIZE = 500  # problems of a task whose validation or test split is endless
MAX_CYCLE = 10_000  # prompts after which the order of tasks repeats; weights are rounded accordingly


@dataclass(frozen=True)
class MixPart:
    """A task of a mix."""

    label: str  # in metrics, and at the start of prompt ids
    weight: float
    task: Task

    def labelled(self, prompt: Prompt) -> Prompt:
        """Return a prompt whose id starts with the label, which is also one of its fields."""
        if TASK_LABEL in prompt.fields:
            raise UserError(f"the fields of {prompt.id} use the reserved name {TASK_LABEL}: rename it")
        prompt_id = prompt.id if prompt.id.startswith(f"{self.label}/") else f"{self.label}/{prompt.id}"
        return replace(prompt, id=prompt_id, fields={**prompt.fields, TASK_LABEL: self.label})


class MixedPrompts(LazyPrompts):
    """Endless problems of several tasks. Every cycle has the same number of problems of a task, evenly distributed.

    A problem depends on its index only. A split with an end is repeated, each time in another order.
    """

    def __init__(self, parts: Sequence[MixPart], prompts: Sequence[Sequence[Prompt]], seed: int) -> None:
        self.parts, self.prompts, self.seed = parts, prompts, seed
        self.counts = cycle_counts([part.weight for part in parts])
        self.cycle = interleave(self.counts)
        super().__init__(self._problem, UNLIMITED)

    def filtered(self, keep: Callable[[Sequence[Prompt]], Sequence[Prompt]]) -> MixedPrompts:
        """Return the mix without the problems that `keep` leaves out of a task."""
        return MixedPrompts(self.parts, [keep(prompts) for prompts in self.prompts], self.seed)

    @property
    def rejected(self) -> int:  # type: ignore[override]
        return sum(prompts.rejected for prompts in self.prompts if isinstance(prompts, LazyPrompts))

    def _problem(self, index: int) -> Prompt:
        cycle, position = divmod(index, len(self.cycle))
        number, rank = self.cycle[position]
        part, prompts = self.parts[number], self.prompts[number]
        epoch, index = divmod(cycle * self.counts[number] + rank, len(prompts))
        if len(prompts) < UNLIMITED:  # generated problems are independent of each other
            index = permuted(index, len(prompts), f"{self.seed}/{part.label}/{epoch}")
        return part.labelled(prompts[index])


class Mix(Task):
    """Several tasks with weights. `make_mix` of the registry creates it from settings."""

    name = "mix"

    def __init__(self, parts: Sequence[MixPart], seed: int = 0, eval_size: int = EVAL_SIZE) -> None:
        self.parts, self.seed, self.eval_size = parts, seed, eval_size
        self.default_extract = parts[0].task.default_extract
        words = [getattr(part.task, "words", None) for part in parts]
        if all(words):
            self.words = lambda: [*dict.fromkeys(word for task_words in words if task_words for word in task_words())]

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Return endless train problems; of other splits all problems, with the tasks interleaved."""
        check_split(split)
        prompts = [part.task.prompts(split) for part in self.parts]
        for part, part_prompts in zip(self.parts, prompts, strict=True):
            if not len(part_prompts):
                raise UserError(f"the {split} split of {part.label} is empty")
        if split == "train":
            return MixedPrompts(self.parts, prompts, self.seed)
        finite = [part[: self.eval_size] if len(part) >= UNLIMITED else part for part in prompts]
        order = sorted(
            ((rank + 0.5) / part.weight, number, rank)
            for number, part in enumerate(self.parts)
            for rank in range(len(finite[number]))
        )
        return [self.parts[number].labelled(finite[number][rank]) for _, number, rank in order]

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        judges = tuple(part.task.judge(extract, strict) for part in self.parts)
        return JudgeByTask(judges, tuple(part.label for part in self.parts))

    def gold_completion(self, prompt: Prompt) -> str:
        return self._task(prompt).gold_completion(prompt)

    def bare_question(self, prompt: Prompt) -> str:
        return self._task(prompt).bare_question(prompt)

    def _task(self, prompt: Prompt) -> Task:
        return next(part.task for part in self.parts if part.label == prompt.fields[TASK_LABEL])


def cycle_counts(weights: Sequence[float]) -> list[int]:
    """Return the number of prompts of each task in a cycle, in proportion to the weights."""
    exact = [Fraction(weight).limit_denominator(1000) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    common = math.gcd(*counts)
    counts = [count // common for count in counts] if common else counts
    if min(counts) < 1 or sum(counts) > MAX_CYCLE:
        counts = [max(1, round(weight / sum(weights) * MAX_CYCLE)) for weight in weights]
    return counts


def interleave(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (task, its n-th prompt) for each position of a cycle; the next one is of the task that lags most."""
    total, placed = sum(counts), [0] * len(counts)
    order = []
    for position in range(1, total + 1):
        number = max(range(len(counts)), key=lambda i: counts[i] * position - placed[i] * total)
        order.append((number, placed[number]))
        placed[number] += 1
    return order


def permuted(index: int, size: int, key: Any) -> int:
    """Return the image of an index in a pseudorandom permutation of range(size), without computing all of it.

    A Feistel network over the next power of 4; images outside of the range are permuted again (cycle walking).
    """
    bits = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << bits) - 1
    while True:
        left, right = index >> bits, index & mask
        for turn in range(4):
            left, right = right, left ^ (stable_hash(f"{key}/{turn}/{right}") & mask)
        index = left << bits | right
        if index < size:
            return index
