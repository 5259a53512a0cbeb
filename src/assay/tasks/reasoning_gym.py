"""Any data set of the package reasoning-gym, which is imported only when one is asked for."""

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
# Most data sets make problem i from `seed + i`, so that seeds next to each other give nearly the same problems. Here
# every split of every seed has seeds of its own, all below 2**31: for so many problems, so many times.
LONGEST, TRIES, SEEDS = 2**16, 2**7, 2**6


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
        """`size` of train, `eval_size` of validation and test each; `options` are the data set's own."""
        self.dataset_name, self.name = dataset_name, PREFIX + dataset_name
        if not 0 <= seed < SEEDS:
            raise UserError(f"{self.name}: seed must be from 0 to {SEEDS - 1}, not {seed}")
        for key, value in (("size", size), ("eval_size", eval_size)):
            if not 1 <= value <= LONGEST:
                raise UserError(f"{self.name}: {key} must be from 1 to {LONGEST:,}, not {value}")
        self.seed, self.size, self.eval_size, self.instruction = seed, size, eval_size, instruction
        self.options = json.dumps(options, sort_keys=True)
        dataset(dataset_name, self.options, 0, 1)  # or say now what is wrong

    def prompts(self, split: str) -> Sequence[Prompt]:
        check_split(split)
        return LazyPrompts(partial(self.problem, split), self.size if split == "train" else self.eval_size)

    def problem(self, split: str, index: int) -> Prompt:
        """Other seeds may make the same problem: each belongs to one split, by its words, and is tried again if not."""
        size = self.size if split == "train" else self.eval_size
        first = (4 * self.seed + SPLITS.index(split)) * LONGEST * TRIES
        for seed in range(first, first + size * TRIES, size):
            found = entry(self.dataset_name, self.options, seed, size, index)
            if split_by_words(found["question"]) == split:
                return self._prompt(split, index, found, {SEED: seed, SIZE: size, INDEX: index})
        raise UserError(f"{self.name} has too few different problems for a {split} split: let its arguments allow more")

    def _prompt(self, split: str, index: int, found: dict[str, Any], fields: dict[str, Any]) -> Prompt:
        return Prompt(
            id=f"{self.name}/{split}/{index}",
            messages=user_message(found["question"], self.instruction),
            answer="" if found["answer"] is None else str(found["answer"]),
            fields=fields,
        )

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return ReasoningGymJudge(extract or self.default_extract, strict, self.dataset_name, self.options)


def split_by_words(question: str) -> str:
    """A quarter each for test and validation: problems can take long to make, and those of other splits are lost."""
    words = " ".join(question.casefold().split())
    return {0: "test", 1: "validation"}.get(stable_hash(words) % 4, "train")
