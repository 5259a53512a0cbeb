"""Abacus: generated arithmetic word problems with worked solutions. Unlimited, without a download.

A problem's *skeleton* is its start value and its steps, e.g. (7, [("+", 5), ("-", 3)]). A hash of the skeleton alone
decides its split, independent of seed, settings and wording: no problem of the test split is ever trained on, not even
in other words, and runs with different seeds share no test problem with another run's train split.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from assay.tasks.base import BOXED_INSTRUCTION, UNLIMITED, GeneratedTask, rng_for, split_of
from assay.types import Prompt, UserError

Step = tuple[str, int]  # an operation and its operand
Skeleton = tuple[int, tuple[Step, ...]]

PRONOUNS = {"Ann": "She", "Eva": "She", "Ben": "He", "Tom": "He"}
ITEMS = ("coins", "books", "pens", "shells")
VERBS = {"+": ("finds", "buys", "wins"), "-": ("loses", "sells", "drops"), "*": ("multiplies",)}
STYLES = ("tokens", "plain")
MAX_DRAWS = 20_000  # after which a split counts as empty


def split_words(text: str) -> list[str]:
    """Split a text into words, numbers and symbols."""
    return re.findall(r"[A-Za-z]+|[0-9]+|#+|[^\sA-Za-z0-9]", text)


def apply(value: int, step: Step) -> int:
    operation, operand = step
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operation]


@dataclass(frozen=True)
class Abacus(GeneratedTask):
    """Every number that occurs, correct or wrong, is between 0 and `max_value`."""

    min_steps: int = 2
    max_steps: int = 3
    max_change: int = 9  # largest operand of + and -
    max_factor: int = 3  # largest operand of *
    min_start: int = 1
    max_start: int = 9
    max_value: int = 40
    operations: str = "+-"  # any of + - *; one that is repeated is drawn more often
    distractors: int = 0  # irrelevant sentences about another person
    style: str = "tokens"  # tokens: words separated by spaces, ends in "#### 9"; plain: natural text, ends in \boxed{9}
    noise: float = 0.0  # probability that a step of `solution` has a wrong result and continues from it
    noise_reach: int = 5  # maximum error of a wrong result
    slip: float = 0.0  # probability that a step of `solution` omits a carry or borrow, and continues from the result
    instruction: str = BOXED_INSTRUCTION  # plain style only
    seed: int = 0
    train_size: int = UNLIMITED
    eval_size: int = UNLIMITED  # of validation and of test each

    name = "abacus"

    def __post_init__(self) -> None:
        problems = {
            "min_steps must be at least 1 and at most max_steps": 1 <= self.min_steps <= self.max_steps,
            "max_change must be at least 1": self.max_change >= 1,
            "max_factor must be at least 2": self.max_factor >= 2,
            "min_start must be at least 0 and at most max_start": 0 <= self.min_start <= self.max_start,
            "max_value must be at least max_start": self.max_value >= self.max_start,
            'operations must be one or more of "+-*"': bool(self.operations) and set(self.operations) <= set("+-*"),
            "distractors must be between 0 and 3": 0 <= self.distractors <= 3,
            f"style must be one of {', '.join(STYLES)}": self.style in STYLES,
            "noise must be between 0 and 1": 0.0 <= self.noise <= 1.0,
            "noise_reach must be at least 1": self.noise_reach >= 1,
            "slip must be between 0 and 1": 0.0 <= self.slip <= 1.0,
            "train_size and eval_size must be at least 1": min(self.train_size, self.eval_size) >= 1,
        }
        for sentence, holds in problems.items():
            if not holds:
                raise UserError(f"abacus: {sentence}")

    @property
    def default_extract(self) -> str:  # type: ignore[override]
        return "hash" if self.style == "tokens" else "boxed"

    def problem(self, split: str, index: int) -> Prompt:
        rng = rng_for("abacus", self.seed, split, index)
        start, steps = self._skeleton(rng, split)
        solution_rng = rng_for("abacus noise", self.seed, split, index)  # separate: noise must not change the problem
        value = start
        for step in steps:
            value = apply(value, step)
        return Prompt(
            id=f"abacus/{split}/{index}",
            messages=({"role": "user", "content": self._question(rng, start, steps)},),
            answer=str(value),
            solution=self._solution(start, steps, solution_rng),
            fields={"start": start, "steps": [list(step) for step in steps]},
        )

    def gold_completion(self, prompt: Prompt) -> str:
        """Return the worked solution without noise."""
        steps = tuple((operation, operand) for operation, operand in prompt.fields["steps"])
        return self._solution(prompt.fields["start"], steps, None)

    def words(self, digits: bool = False) -> list[str]:
        """Return all words and symbols of prompts and solutions, with whole numbers or, if `digits`, single digits."""
        numbers = range(10) if digits else range(self.max_value + 1)
        texts = [self._solution(0, [(operation, 0) for operation in self.operations], None)]
        for name, pronoun in PRONOUNS.items():
            for item in ITEMS:
                texts += [self._closing(name, item)] + [self._opening(name, number, item) for number in (0, 1)]
                for operation in self.operations:
                    for verb in VERBS[operation]:
                        texts += [self._sentence(pronoun, verb, (operation, number), item) for number in (0, 1)]
        words = {word for text in texts for word in split_words(text) if not (digits and word.isdigit())}
        return sorted(words | {str(number) for number in numbers})

    def _skeleton(self, rng: random.Random, split: str) -> Skeleton:
        for _ in range(MAX_DRAWS):
            skeleton = self._draw(rng)
            if skeleton is not None and split_of(canonical(skeleton)) == split:
                return skeleton
        raise UserError(
            f"abacus: these settings allow no problem in the {split} split: allow more steps or larger numbers"
        )

    def _draw(self, rng: random.Random) -> Skeleton | None:
        """Draw a random skeleton; None if no operation is possible from an intermediate value."""
        start = value = rng.randint(self.min_start, self.max_start)
        steps = []
        for _ in range(rng.randint(self.min_steps, self.max_steps)):
            largest = {
                "+": min(self.max_change, self.max_value - value),
                "-": min(self.max_change, value),
                "*": min(self.max_factor, self.max_value // value) if value else 0,
            }
            possible = [op for op in self.operations if largest[op] >= (2 if op == "*" else 1)]
            if not possible:
                return None
            operation = rng.choice(possible)
            step = (operation, rng.randint(2 if operation == "*" else 1, largest[operation]))
            steps.append(step)
            value = apply(value, step)
        return start, tuple(steps)

    def _question(self, rng: random.Random, start: int, steps: Sequence[Step]) -> str:
        name, item = rng.choice(list(PRONOUNS)), rng.choice(ITEMS)
        pronoun = PRONOUNS[name]
        sentences = [self._opening(name, start, item)]
        sentences += [self._sentence(pronoun, rng.choice(VERBS[step[0]]), step, item) for step in steps]
        # Distractors have the other pronoun and other items, so that the question stays unambiguous.
        others = [other for other in PRONOUNS if PRONOUNS[other] != pronoun]
        for other_item in rng.sample([other for other in ITEMS if other != item], self.distractors):
            number = rng.randint(self.min_start, self.max_start)
            sentences.insert(rng.randint(1, len(sentences)), self._opening(rng.choice(others), number, other_item))
        return " ".join([*sentences, self._closing(name, item)])

    def _opening(self, name: str, number: int, item: str) -> str:
        return f"{name} has {number} {item} ." if self.style == "tokens" else f"{name} has {counted(number, item)}."

    def _sentence(self, pronoun: str, verb: str, step: Step, item: str) -> str:
        operation, operand = step
        if self.style == "tokens":
            return f"{pronoun} {verb} {operand} ."
        if operation == "*":
            return f"{pronoun} multiplies the number of {item} by {operand}."
        return f"{pronoun} {verb} {counted(operand, item)}."

    def _closing(self, name: str, item: str) -> str:
        if self.style == "tokens":
            return f"How many {item} ?"
        return f"How many {item} does {name} have now?\n{self.instruction}".rstrip()

    def _solution(self, start: int, steps: Sequence[Step], noise_rng: random.Random | None) -> str:
        value, equations = start, []
        for number, step in enumerate(steps):
            result = apply(value, step)
            if noise_rng is not None:
                result = self._noisy_result(value, step, result, steps[number + 1 :], noise_rng)
            equations.append(f"{value} {step[0]} {step[1]} = {result}")
            value = result
        if self.style == "tokens":
            return " ; ".join([*equations, f"#### {value}"])
        return "\n".join([*equations, f"The final answer is \\boxed{{{value}}}."])

    def _noisy_result(self, value: int, step: Step, result: int, rest: Sequence[Step], rng: random.Random) -> int:
        """Return the result of a step, possibly wrong by `noise` or `slip`."""
        if rng.random() < self.noise:
            return self._wrong_result(result, rest, rng)
        slipped = result + omitted_carry(value, step)
        if rng.random() < self.slip and self._stays_in_range(slipped, rest):
            return slipped
        return result

    def _wrong_result(self, correct: int, rest: Sequence[Step], rng: random.Random) -> int:
        """Return a nearby wrong value from which the rest stays within 0..max_value; else the correct one."""
        nearby = range(correct - self.noise_reach, correct + self.noise_reach + 1)
        wrong = [value for value in nearby if value != correct and self._stays_in_range(value, rest)]
        return rng.choice(wrong) if wrong else correct

    def _stays_in_range(self, value: int, steps: Sequence[Step]) -> bool:
        for step in (("+", 0), *steps):
            value = apply(value, step)
            if not 0 <= value <= self.max_value:
                return False
        return True


def omitted_carry(value: int, step: Step) -> int:
    """Return the error of a step whose carry or borrow is omitted: 7 + 5 = 2, 12 - 5 = 17; 0 if it has none."""
    operation, operand = step
    if operation == "+" and value % 10 + operand % 10 >= 10:
        return -10
    if operation == "-" and value % 10 < operand % 10:
        return 10
    return 0


def counted(number: int, item: str) -> str:
    return f"{number} {item.removesuffix('s') if number == 1 else item}"


def canonical(skeleton: Skeleton) -> str:
    start, steps = skeleton
    return f"abacus {start} " + " ".join(f"{operation}{operand}" for operation, operand in steps)
