"""Sort letters: a task of one's own, with a reward of one's own. Try it: assay train examples/my_task.toml"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

from assay.rewards import FunctionJudge, Judge
from assay.tasks import Task
from assay.types import Prompt

ALPHABET = "abcdef"


class SortLetters(Task):
    name = "sort"

    def __init__(self, letters: int = 4, held_out: int = 60) -> None:
        """`letters` of each problem; `held_out` problems go to validation and as many to test."""
        problems = list(permutations(ALPHABET, letters))
        random.Random(0).shuffle(problems)  # one seeded order, cut in three: no split shares a problem with another
        ends = {"test": (0, held_out), "validation": (held_out, 2 * held_out), "train": (2 * held_out, len(problems))}
        self.splits = {split: problems[start:end] for split, (start, end) in ends.items()}

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [self.prompt(f"sort/{split}/{i}", letters) for i, letters in enumerate(self.splits[split])]

    def prompt(self, name: str, letters: Sequence[str]) -> Prompt:
        right = " ".join(sorted(letters))
        return Prompt(name, ({"role": "user", "content": f"sort {' '.join(letters)}"},), answer=right, solution=right)

    def words(self) -> list[str]:
        """Only for preset models: the vocabulary of their word tokenizer."""
        return ["sort", *ALPHABET]

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return FunctionJudge(f"{__file__}:reward")


def reward(completion: str, answer: str) -> dict:
    """The share of letters in their right place; a wrong length is worth nothing. From 1.0 up it counts as correct."""
    given, right = completion.split(), answer.split()
    share = sum(map(str.__eq__, given, right)) / len(right) if len(given) == len(right) else 0.0
    return {"reward": share, "parsed": completion}  # a plain number would do; `parsed` lets majority votes count
