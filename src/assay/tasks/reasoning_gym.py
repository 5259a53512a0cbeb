"""Datasets of reasoning-gym as tasks; the package is imported when it is needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from assay.rewards import Judge
from assay.rewards.verifiers import INDEX, SEED, SIZE, ReasoningGymJudge, dataset, entry
from assay.tasks.base import SPLITS, LazyPrompts, Task, check_split, stable_hash
from assay.tasks.sources import user_message
from assay.types import Prompt, UserError

PREFIX = "reasoning_gym:"
INSTRUCTION = "Think first, then put nothing but the final answer inside <answer> </answer> tags."
# Most datasets generate problem i from `seed + i`, so that neighbouring seeds share most problems. Therefore every
# split of every seed has its own range of dataset seeds, below 2**31: MAX_SIZE problems, each drawn up to MAX_TRIES
# times.
MAX_SIZE, MAX_TRIES, SEEDS = 2**16, 2**7, 2**6


class ReasoningGym(Task):
    default_extract = "answer-tag"

    def __init__(
        self,
        dataset_name: str,
        seed: int = 0,
        size: int = 10_000,
        eval_size: int = 500,
        instruction: str = INSTRUCTION,
        **options: Any,
    ) -> None:
        """`size` of train, `eval_size` of validation and test each; `options` are those of the dataset."""
        self.dataset_name, self.name = dataset_name, PREFIX + dataset_name
        if not 0 <= seed < SEEDS:
            raise UserError(f"{self.name}: seed must be from 0 to {SEEDS - 1}, not {seed}")
        for key, value in (("size", size), ("eval_size", eval_size)):
            if not 1 <= value <= MAX_SIZE:
                raise UserError(f"{self.name}: {key} must be from 1 to {MAX_SIZE:,}, not {value}")
        self.seed, self.size, self.eval_size, self.instruction = seed, size, eval_size, instruction
        self.options = json.dumps(options, sort_keys=True)
        dataset(dataset_name, self.options, 0, 1)  # raises if the arguments are invalid

    def prompts(self, split: str) -> Sequence[Prompt]:
        check_split(split)
        return LazyPrompts(partial(self.problem, split), self.size if split == "train" else self.eval_size)

    def problem(self, split: str, index: int) -> Prompt:
        """Generate a problem; draw again until its text belongs to the split, so that splits are disjoint."""
        size = self.size if split == "train" else self.eval_size
        first = (4 * self.seed + SPLITS.index(split)) * MAX_SIZE * MAX_TRIES
        for seed in range(first, first + size * MAX_TRIES, size):
            problem = entry(self.dataset_name, self.options, seed, size, index)
            if split_by_words(problem["question"]) == split:
                return self._prompt(split, index, problem, {SEED: seed, SIZE: size, INDEX: index})
        raise UserError(
            f"{self.name} has too few different problems for a {split} split: choose arguments that allow more"
        )

    def _prompt(self, split: str, index: int, problem: dict[str, Any], fields: dict[str, Any]) -> Prompt:
        return Prompt(
            id=f"{self.name}/{split}/{index}",
            messages=user_message(problem["question"], self.instruction),
            answer="" if problem["answer"] is None else str(problem["answer"]),
            fields=fields,
        )

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return ReasoningGymJudge(extract or self.default_extract, strict, self.dataset_name, self.options)


def split_by_words(question: str) -> str:
    """Return the split of a problem: a quarter each for test and validation, because rejected problems cost time."""
    words = " ".join(question.casefold().split())
    return {0: "test", 1: "validation"}.get(stable_hash(words) % 4, "train")
