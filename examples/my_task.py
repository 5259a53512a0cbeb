"""Sort letters: a custom task with a custom reward. Run it with: assay train examples/my_task.toml"""

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
        """`letters` per problem; validation and test have `held_out` problems each."""
        problems = list(permutations(ALPHABET, letters))
        random.Random(0).shuffle(problems)  # one seeded shuffle, divided into three disjoint splits
        ends = {"test": (0, held_out), "validation": (held_out, 2 * held_out), "train": (2 * held_out, len(problems))}
        self.splits = {split: problems[start:end] for split, (start, end) in ends.items()}

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [self.prompt(f"sort/{split}/{i}", letters) for i, letters in enumerate(self.splits[split])]

    def prompt(self, name: str, letters: Sequence[str]) -> Prompt:
        right = " ".join(sorted(letters))
        return Prompt(name, ({"role": "user", "content": f"sort {' '.join(letters)}"},), answer=right, solution=right)

    def words(self) -> list[str]:
        """Vocabulary of the word tokenizer; used only for preset models."""
        return ["sort", *ALPHABET]

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return FunctionJudge(f"{__file__}:reward")


def reward(completion: str, answer: str) -> dict:
    """Fraction of letters at the correct position; 0 for a wrong length. A reward of 1.0 counts as a correct answer."""
    given, right = completion.split(), answer.split()
    fraction = sum(map(str.__eq__, given, right)) / len(right) if len(given) == len(right) else 0.0
    return {"reward": fraction, "parsed": completion}  # a plain number also works; majority votes need `parsed`
