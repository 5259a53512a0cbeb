"""Generated programming problems: a few operations on numbers, words, texts or dictionaries, one after the other.

An operation is a sentence and a line of Python, in which `v` is the value so far; code_operations.toml has all of them.
A problem is a start (what the function takes) and a list of operations whose types fit together. Its program and its
tests follow from the lines.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "solve"  # the function that a program has to define
WORDS = (
    *("apple", "ant", "bear", "boat", "bread", "cat", "cloud", "corn", "dog", "dune", "eagle", "echo", "fig", "fox"),
    *("goat", "grape", "hat", "hill", "ice", "ink", "jar", "kite", "lamp", "level", "moon", "noon", "oak", "onion"),
    *("pear", "pine", "queen", "radar", "rain", "seed", "star", "tent", "tree", "unit", "vase", "wind", "yarn", "zoo"),
)
PERSONS = ("Ann", "Ben", "Clara", "Dan", "Eva", "Finn", "Gus", "Hannah", "Ida", "Jo")


@dataclass(frozen=True)
class CodeOperation:
    """`line` assigns to `v`; {k} and the like in sentence and line are parameters, drawn from `parameters`."""

    takes: str
    gives: str
    sentence: str
    line: str
    parameters: dict[str, Any]  # values: a list, the characters of a text, or {"first": integer, "last": integer}


def _read_operations() -> list[CodeOperation]:
    table = tomllib.loads(Path(__file__).with_name("code_operations.toml").read_text(encoding="utf-8"))
    return [
        CodeOperation(takes, gives, sentence, f"v = {expression}", parameters[0] if parameters else {})
        for takes, by_result in table.items()
        for gives, rows in by_result.items()
        for sentence, expression, *parameters in rows
    ]


OPERATIONS = _read_operations()


def _ints(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(-9, 20) for _ in range(size)]


def _words(rng: random.Random, size: int) -> list[str]:
    pool = rng.sample(WORDS, max(1, size - 1))  # fewer than `size`, so that some occur twice
    return [rng.choice(pool) for _ in range(size)]


def _text(rng: random.Random, size: int) -> str:
    return " ".join(_words(rng, size))


def _number(rng: random.Random, size: int) -> int:
    return rng.randint(1, 10 ** min(3, 1 + size // 2))


def _table(rng: random.Random, size: int) -> dict[str, int]:
    return {name: rng.randint(0, 12) for name in rng.sample(PERSONS, size)}


@dataclass(frozen=True)
class Start:
    """What a function takes: the name of the argument, its description, its type, and a generator of inputs."""

    argument: str
    description: str
    kind: str
    draw: Callable[[random.Random, int], Any]  # with the number of elements


STARTS = (
    Start("numbers", "a list of integers", "ints", _ints),
    Start("words", "a list of lower-case words", "words", _words),
    Start("text", "a string of lower-case words separated by spaces", "text", _text),
    Start("n", "a positive integer", "n", _number),
    Start("scores", "a dictionary from names to integers", "table", _table),
)
MAX_SIZE = 7  # elements of an input
MAX_DRAWS = 40  # of inputs, until their results differ enough


@dataclass(frozen=True)
class CodeProblem:
    """A problem, without its tests."""

    start: Start
    sentences: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def canonical(self) -> str:
        """What decides its split: everything that defines the function."""
        return " ".join(["code", self.start.argument, *self.sentences])

    @property
    def description(self) -> str:
        argument = self.start.argument
        steps = "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(self.sentences, start=1))
        return (
            f"Write a Python function `{NAME}({argument})`, where `{argument}` is {self.start.description}. "
            "It performs these steps in order and returns the result of the last one. The first step is applied to "
            f"`{argument}`, and each further step to the result of the step before.\n{steps}"
        )

    @property
    def program(self) -> str:
        lines = "".join(f"    {line}\n" for line in self.lines)
        return f"def {NAME}({self.start.argument}):\n    v = {self.start.argument}\n{lines}    return v\n"

    def calls(self, rng: random.Random, count: int) -> list[tuple[str, Any]] | None:
        """Return `count` different calls with their results; None if nearly all results are equal."""
        names: dict[str, Any] = {}
        exec(self.program, names)
        calls: dict[str, Any] = {}
        for turn in range(MAX_DRAWS + count):
            value = self.start.draw(rng, (MAX_SIZE, 4, 0 if self.start.kind != "n" else 1, 5)[turn % 4])
            calls.setdefault(f"{NAME}({value!r})", names[NAME](value))
            if len(calls) == count:
                break
        results = [repr(result) for result in calls.values()]
        most_common = max(results.count(result) for result in results)
        return list(calls.items()) if len(calls) == count and most_common <= 0.7 * count else None


def draw_problem(rng: random.Random, steps: int) -> CodeProblem | None:
    """Draw a problem with this number of operations; None if no operation fits the last one."""
    start = rng.choice(STARTS)
    kind, used = start.kind, list[CodeOperation]()
    sentences, lines = [], []
    for _ in range(steps):
        possible = [operation for operation in OPERATIONS if operation.takes == kind and operation not in used]
        if not possible:
            return None
        operation = rng.choice(possible)
        sentence, line = operation.sentence, operation.line
        for name, given in operation.parameters.items():
            values = range(given["first"], given["last"] + 1) if isinstance(given, dict) else given
            value = str(rng.choice(values))
            sentence, line = sentence.replace(f"{{{name}}}", value), line.replace(f"{{{name}}}", value)
        used.append(operation)
        sentences.append(sentence)
        lines.append(line)
        kind = operation.gives
    return CodeProblem(start, tuple(sentences), tuple(lines))
