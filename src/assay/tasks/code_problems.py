"""Generated programming problems: a few operations on numbers, words, texts or dictionaries, one after the other.

An operation is a sentence and a line of Python, in which `v` is the value so far. A problem is a start (what the
function takes) and a list of operations whose types fit together. Its program and its tests follow from the lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
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
    """`line` assigns to `v`; {k} and the like in sentence and line are parameters, drawn from `choices`."""

    takes: str
    gives: str
    sentence: str
    line: str
    choices: tuple[tuple[str, tuple[Any, ...]], ...] = ()


def _op(takes: str, gives: str, sentence: str, line: str, **choices: Any) -> CodeOperation:
    return CodeOperation(takes, gives, sentence, line, tuple((name, tuple(values)) for name, values in choices.items()))


OPERATIONS = (
    # lists of integers
    _op("ints", "ints", "Keep only the even numbers.", "v = [x for x in v if x % 2 == 0]"),
    _op("ints", "ints", "Keep only the odd numbers.", "v = [x for x in v if x % 2 == 1]"),
    _op("ints", "ints", "Keep only the numbers greater than {k}.", "v = [x for x in v if x > {k}]", k=range(-5, 16)),
    _op("ints", "ints", "Keep only the numbers less than {k}.", "v = [x for x in v if x < {k}]", k=range(-5, 16)),
    _op("ints", "ints", "Remove the multiples of {d}.", "v = [x for x in v if x % {d}]", d=range(2, 8)),
    _op("ints", "ints", "Add {k} to each number.", "v = [x + {k} for x in v]", k=range(1, 20)),
    _op("ints", "ints", "Subtract each number from {k}.", "v = [{k} - x for x in v]", k=range(0, 20)),
    _op("ints", "ints", "Multiply each number by {k}.", "v = [x * {k} for x in v]", k=range(2, 12)),
    _op("ints", "ints", "Square each number.", "v = [x * x for x in v]"),
    _op("ints", "ints", "Replace each number by its absolute value.", "v = [abs(x) for x in v]"),
    _op("ints", "ints", "Replace negative numbers by {k}.", "v = [{k} if x < 0 else x for x in v]", k=range(0, 9)),
    _op("ints", "ints", "Sort the numbers in ascending order.", "v = sorted(v)"),
    _op("ints", "ints", "Sort the numbers in descending order.", "v = sorted(v, reverse=True)"),
    _op("ints", "ints", "Reverse the list.", "v = v[::-1]"),
    _op("ints", "ints", "Remove repeated numbers and keep the first of each.", "v = list(dict.fromkeys(v))"),
    _op("ints", "ints", "Keep every second number, starting with the first.", "v = v[::2]"),
    _op("ints", "ints", "Remove the first {k} numbers.", "v = v[{k}:]", k=range(2, 4)),
    _op("ints", "ints", "Keep only the last {k} numbers.", "v = v[-{k}:]", k=range(2, 5)),
    _op("ints", "ints", "Move the first number to the end.", "v = v[1:] + v[:1]"),
    _op(
        "ints",
        "ints",
        "Replace each number by the sum of all numbers up to and including it.",
        "v = [sum(v[: i + 1]) for i in range(len(v))]",
    ),
    _op(
        "ints",
        "ints",
        "Build the list of the differences between each number and the one before it.",
        "v = [b - a for a, b in zip(v, v[1:])]",
    ),
    _op("ints", "int", "Take the sum.", "v = sum(v)"),
    _op("ints", "int", "Count the numbers.", "v = len(v)"),
    _op("ints", "int", "Count the different numbers.", "v = len(set(v))"),
    _op("ints", "int", "Take the largest number, or {k} if there is none.", "v = max(v, default={k})", k=(0, -1)),
    _op("ints", "int", "Take the smallest number, or {k} if there is none.", "v = min(v, default={k})", k=(0, -1)),
    _op(
        "ints",
        "int",
        "Subtract the smallest number from the largest one; the result is 0 if there is none.",
        "v = max(v) - min(v) if v else 0",
    ),
    _op(
        "ints",
        "int",
        "Add the first number, subtract the second, add the third, and so on.",
        "v = sum(v[::2]) - sum(v[1::2])",
    ),
    _op(
        "ints",
        "bool",
        "Check whether the numbers are in ascending order; equal ones may follow each other.",
        "v = v == sorted(v)",
    ),
    _op("ints", "bool", "Check whether {k} is among the numbers.", "v = {k} in v", k=range(0, 10)),
    _op("ints", "words", "Convert each number to a string.", "v = [str(x) for x in v]"),
    # integers
    _op("int", "int", "Multiply the result by {k}.", "v = v * {k}", k=range(2, 12)),
    _op("int", "int", "Take the remainder of the division by {k}.", "v = v % {k}", k=range(3, 12)),
    _op("int", "int", "Take the sum of its decimal digits, without the sign.", "v = sum(int(c) for c in str(abs(v)))"),
    _op("int", "bool", "Check whether the result is greater than {k}.", "v = v > {k}", k=range(0, 12)),
    _op("n", "ints", "Build the list of its decimal digits from left to right.", "v = [int(c) for c in str(v)]"),
    _op(
        "n",
        "ints",
        "Build the list of its positive divisors in ascending order.",
        "v = [d for d in range(1, v + 1) if v % d == 0]",
    ),
    _op("n", "ints", "Build the list of the integers from 1 to it.", "v = list(range(1, v + 1))"),
    _op(
        "n",
        "ints",
        "Build the list of the multiples of {k} from {k} to it.",
        "v = list(range({k}, v + 1, {k}))",
        k=range(2, 10),
    ),
    _op("n", "text", "Write it in base 2, as a string of 0 and 1.", "v = format(v, 'b')"),
    _op("n", "text", "Write it as a decimal string.", "v = str(v)"),
    _op("n", "int", "Add {k} to it.", "v = v + {k}", k=range(1, 20)),
    # lists of words
    _op(
        "words",
        "words",
        "Keep only the strings with more than {k} characters.",
        "v = [w for w in v if len(w) > {k}]",
        k=range(2, 5),
    ),
    _op(
        "words",
        "words",
        "Keep only the strings with at most {k} characters.",
        "v = [w for w in v if len(w) <= {k}]",
        k=range(2, 5),
    ),
    _op(
        "words", "words", 'Keep only the strings that contain "{c}".', "v = [w for w in v if '{c}' in w]", c="aeinorst"
    ),
    _op(
        "words",
        "words",
        'Remove the strings that start with "{c}".',
        "v = [w for w in v if not w.startswith('{c}')]",
        c="abcdefgh",
    ),
    _op("words", "words", "Reverse each string.", "v = [w[::-1] for w in v]"),
    _op("words", "words", "Convert each string to upper case.", "v = [w.upper() for w in v]"),
    _op("words", "words", "Sort the strings alphabetically.", "v = sorted(v)"),
    _op(
        "words",
        "words",
        "Sort the strings by length, shortest first; keep the order of strings of equal length.",
        "v = sorted(v, key=len)",
    ),
    _op("words", "words", "Reverse the list.", "v = v[::-1]"),
    _op("words", "words", "Remove repeated strings and keep the first of each.", "v = list(dict.fromkeys(v))"),
    _op(
        "words", "words", "Replace each string by its first {k} characters.", "v = [w[:{k}] for w in v]", k=range(1, 4)
    ),
    _op("words", "words", "Remove each string that equals its reverse.", "v = [w for w in v if w != w[::-1]]"),
    _op("words", "ints", "Replace each string by its length.", "v = [len(w) for w in v]"),
    _op(
        "words",
        "ints",
        'Replace each string by the number of times it contains "{c}".',
        "v = [w.count('{c}') for w in v]",
        c="aeinorst",
    ),
    _op(
        "words", "text", 'Join the strings with "{s}" between them.', "v = '{s}'.join(v)", s=("-", "+", "_", ", ", "/")
    ),
    _op(
        "words",
        "text",
        "Take the longest string, the first one if there are several, or an empty string if there is none.",
        "v = max(v, key=len, default='')",
    ),
    _op("words", "int", "Count the strings.", "v = len(v)"),
    _op(
        "words",
        "table",
        "Build a dictionary from each string to its number of occurrences.",
        "v = {w: v.count(w) for w in v}",
    ),
    _op("words", "table", "Build a dictionary from each string to its length.", "v = {w: len(w) for w in v}"),
    # texts
    _op("text", "words", "Split it into a list of words, which are separated by one or more spaces.", "v = v.split()"),
    _op("text", "text", "Reverse it.", "v = v[::-1]"),
    _op("text", "text", "Convert it to upper case.", "v = v.upper()"),
    _op(
        "text",
        "text",
        "Remove all vowels (a, e, i, o, u, in lower and upper case).",
        "v = ''.join(c for c in v if c.lower() not in 'aeiou')",
    ),
    _op("text", "text", 'Replace each "{a}" by "{b}".', "v = v.replace('{a}', '{b}')", a="aeinorst", b="xyz*#"),
    _op("text", "text", "Remove repeated characters and keep the first of each.", "v = ''.join(dict.fromkeys(v))"),
    _op("text", "text", "Write each character twice.", "v = ''.join(c + c for c in v)"),
    _op("text", "text", "Keep every second character, starting with the first.", "v = v[::2]"),
    _op("text", "text", "Remove the first and the last character.", "v = v[1:-1]"),
    _op("text", "int", "Count its characters.", "v = len(v)"),
    _op("text", "int", 'Count how often "{c}" occurs.', "v = v.count('{c}')", c="aeinorst"),
    _op(
        "text",
        "int",
        "Count the vowels (a, e, i, o, u, in lower and upper case).",
        "v = sum(c.lower() in 'aeiou' for c in v)",
    ),
    _op(
        "text",
        "table",
        "Build a dictionary from each character to its number of occurrences.",
        "v = {c: v.count(c) for c in v}",
    ),
    _op("text", "bool", "Check whether it equals its reverse.", "v = v == v[::-1]"),
    # dictionaries from strings to integers
    _op(
        "table",
        "table",
        "Keep only the entries whose value is greater than {k}.",
        "v = {key: x for key, x in v.items() if x > {k}}",
        k=range(1, 8),
    ),
    _op(
        "table",
        "table",
        "Keep only the entries whose value is even.",
        "v = {key: x for key, x in v.items() if x % 2 == 0}",
    ),
    _op("table", "table", "Add {k} to each value.", "v = {key: x + {k} for key, x in v.items()}", k=range(1, 12)),
    _op("table", "table", "Multiply each value by {k}.", "v = {key: x * {k} for key, x in v.items()}", k=range(2, 6)),
    _op("table", "table", "Convert each key to lower case.", "v = {key.lower(): x for key, x in v.items()}"),
    _op("table", "words", "Build the list of the keys in alphabetical order.", "v = sorted(v)"),
    _op(
        "table",
        "words",
        "Build the list of the keys, those with the largest values first; sort keys with equal values alphabetically.",
        "v = sorted(v, key=lambda key: (-v[key], key))",
    ),
    _op("table", "ints", "Build the list of the values in ascending order.", "v = sorted(v.values())"),
    _op("table", "int", "Take the sum of the values.", "v = sum(v.values())"),
    _op("table", "int", "Take the largest value, or 0 if there is none.", "v = max(v.values(), default=0)"),
    _op(
        "table",
        "text",
        "Take the key with the largest value, the alphabetically first one if there are several, "
        "or an empty string if there is none.",
        "v = min(v, key=lambda key: (-v[key], key), default='')",
    ),
)


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
        for name, values in operation.choices:
            value = str(rng.choice(values))
            sentence, line = sentence.replace(f"{{{name}}}", value), line.replace(f"{{{name}}}", value)
        used.append(operation)
        sentences.append(sentence)
        lines.append(line)
        kind = operation.gives
    return CodeProblem(start, tuple(sentences), tuple(lines))
