"""Countdown: reach a target with + - * / and each given number exactly once. Generated, or read from JSONL."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from operator import add, mul, sub
from typing import Any

from assay.tasks.base import UNLIMITED, GeneratedTask, rng_for, split_of
from assay.tasks.sources import DataRow, RowTask, open_source, row_messages, user_message
from assay.types import Prompt, UserError

INSTRUCTION = (
    "Use each number exactly once, with + - * / and parentheses only. Think inside <think> </think> tags, then write "
    "the expression inside <answer> </answer> tags, for example <answer>(1 + 2) * 3</answer>."
)
Value = int | Fraction
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"+": add, "-": sub, "*": mul}
MAX_DRAWS = 100_000  # after which a split counts as empty
MAX_TRIES = 50  # draws per failed attempt: for some numbers few combinations are valid


@dataclass(frozen=True, slots=True)
class Term:
    """A value, its expression, and the equations that compute it step by step."""

    value: Value
    text: str
    equations: tuple[str, ...] = ()


@dataclass(eq=False)
class Countdown(GeneratedTask):
    """Generated and unlimited; with `path`, read from rows with `nums`, `target` and optionally `messages`."""

    path: str | None = None
    numbers: tuple[int, int] = (3, 4)
    max_number: int = 99
    max_target: int = 100
    integers: bool = True  # all intermediate results of the worked solution are positive integers
    tries: int = 0  # worked solutions show a search: up to `tries` failed attempts before the correct one
    instruction: str = INSTRUCTION
    val_size: int | None = None
    seed: int = 0
    train_size: int = UNLIMITED
    eval_size: int = UNLIMITED

    name = "countdown"
    default_extract = "answer-tag"
    judge_kind = "countdown"

    def __post_init__(self) -> None:
        if not 2 <= self.numbers[0] <= self.numbers[1] <= 6:
            given = list(self.numbers)
            raise UserError(f"countdown: numbers must be a range within 2 to 6, such as [3, 4], not {given}")
        if min(self.max_number, self.max_target, self.train_size, self.eval_size) < 1:
            raise UserError("countdown: max_number, max_target, train_size and eval_size must be at least 1")
        if self.tries < 0:
            raise UserError("countdown: tries must be at least 0")
        if self.path is not None:
            self.stored = StoredCountdown(open_source(self.path), self.val_size, self.seed, self.instruction)
            self.has_all = self.stored.has_all

    def problem(self, split: str, index: int) -> Prompt:
        rng = rng_for("countdown", self.seed, split, index)
        for _ in range(MAX_DRAWS):
            nums = [rng.randint(1, self.max_number) for _ in range(rng.randint(*self.numbers))]
            term = self._combine(rng, nums)
            if term is not None and split_of(canonical(nums, int(term.value))) == split:
                target = int(term.value)
                return Prompt(
                    id=f"countdown/{split}/{index}",
                    messages=user_message(question(nums, target), self.instruction),
                    answer=str(target),
                    solution=worked_solution(term, self._failures(nums, target, split, index) if self.tries else None),
                    fields={"nums": nums, "target": target},
                )
        raise UserError(
            f"countdown: these settings allow no problem in the {split} split: allow larger numbers or targets"
        )

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["target"])

    def gold_completion(self, prompt: Prompt) -> str:
        if prompt.solution is not None:
            return prompt.solution
        term = solve([Term(number, str(number)) for number in prompt.fields["nums"]], prompt.fields["target"])
        return worked_solution(term) if term else "no expression reaches the target"

    def _failures(self, nums: Sequence[int], target: int, split: str, index: int) -> list[Term]:
        """Return other combinations of the numbers, which miss the target."""
        rng = rng_for("countdown tries", self.seed, split, index)  # separate: tries must not change the problem
        count = rng.randint(0, self.tries)
        failures: dict[str, Term] = {}
        for _ in range(MAX_TRIES * count):
            term = self._combine(rng, nums)
            if term is not None and term.value != target:
                failures.setdefault(" ".join(term.equations), term)
            if len(failures) == count:
                break
        return list(failures.values())

    def _combine(self, rng: random.Random, nums: Sequence[int]) -> Term | None:
        """Combine random pairs of terms until one is left; None if a result or the target is not allowed."""
        terms = [Term(number, str(number)) for number in nums]
        while len(terms) > 1:
            first, second = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            operation = rng.choice("+-*/")
            value = calculate(first.value, operation, second.value)
            if value is None or (self.integers and (value.denominator != 1 or value < 1)):
                return None
            terms.append(join(first, operation, second, value))
        (last,) = terms
        return last if last.value.denominator == 1 and 1 <= last.value <= self.max_target else None


class StoredCountdown(RowTask):
    """Problems from a file; `messages` of a row are used as they are."""

    name = "countdown"

    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        nums, target = row.column("nums", "numbers"), row.column("target")
        if not isinstance(nums, list) or not nums or not all(type(number) is int for number in nums):
            raise UserError(f'{row.where}: "nums" must be a list of integers, not {nums!r}')
        if type(target) is not int:
            raise UserError(f'{row.where}: "target" must be an integer, not {target!r}')
        solution = row.values.get("solution")
        return Prompt(
            id=str(row.values.get("id", f"countdown/{split}/{row.key}")),
            messages=row_messages(row, question(nums, target), self.instruction),
            answer=str(target),
            solution=None if solution is None else str(solution),
            fields={"nums": nums, "target": target},
        )


def question(nums: Sequence[int], target: int) -> str:
    return f"Reach {target} with the numbers {', '.join(map(str, nums))}."


def worked_solution(term: Term, failures: Sequence[Term] | None = None) -> str:
    """Write one equation per line; with `failures`, one attempt per line, which ends in "no" or "yes"."""
    lines = list(term.equations)
    if failures is not None:
        lines = [f"{', '.join(failure.equations)}, no" for failure in failures] + [f"{', '.join(term.equations)}, yes"]
    expression = term.text[1:-1] if term.text.startswith("(") else term.text  # without the parentheses of `join`
    return "\n".join(["<think>", *lines, "</think>", f"<answer>{expression}</answer>"])


def calculate(a: Value, operation: str, b: Value) -> Value | None:
    """Calculate exactly; None for a division by zero. Integers stay int, which is much faster than Fraction."""
    if operation in OPERATORS:
        return OPERATORS[operation](a, b)
    if b == 0:
        return None
    return Fraction(a, b) if a % b else a // b


def join(left: Term, operation: str, right: Term, value: Value) -> Term:
    equations = (
        *left.equations,
        *right.equations,
        f"{operand(left.value)} {operation} {operand(right.value)} = {value}",
    )
    return Term(value, f"({left.text} {operation} {right.text})", equations)


def operand(value: Value) -> str:
    """Format an operand: fractions and negative numbers in parentheses."""
    return str(value) if value.denominator == 1 and value >= 0 else f"({value})"


def solve(terms: list[Term], target: int) -> Term | None:
    """Search for an expression that uses every term once and reaches the target; None if there is none."""
    if len(terms) == 1:
        return terms[0] if terms[0].value == target else None
    for i, j in combinations(range(len(terms)), 2):
        rest = [term for index, term in enumerate(terms) if index not in (i, j)]
        for first, second in ((terms[i], terms[j]), (terms[j], terms[i])):
            for operation in "+-*/":
                value = calculate(first.value, operation, second.value)
                if value is None or (not rest and value != target):
                    continue
                solution = solve([*rest, join(first, operation, second, value)], target)
                if solution is not None:
                    return solution
    return None


def canonical(nums: Sequence[int], target: int) -> str:
    return f"countdown {sorted(nums)} {target}"
