"""Generated programming problems: operations, splits and results."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from assay.tasks.code import NAME, OPERATIONS, STARTS, CodeProblem, draw_problem

BY_SENTENCE = {operation.sentence: operation for operation in OPERATIONS}
BY_ARGUMENT = {start.argument: start for start in STARTS}


def run(problem: CodeProblem, value: Any) -> Any:
    names: dict[str, Any] = {}
    exec(problem.program, names)
    return names[NAME](value)


@pytest.mark.parametrize(
    ("argument", "sentences", "value", "result"),
    [
        ("numbers", ["Keep only the odd numbers.", "Take the sum."], [1, 2, -3, 5], 3),
        ("numbers", ["Square each number.", "Sort the numbers in descending order."], [1, -3, 2], [9, 4, 1]),
        ("numbers", ["Replace each number by the sum of all numbers up to and including it."], [1, 2, 3], [1, 3, 6]),
        ("numbers", ["Add the first number, subtract the second, add the third, and so on."], [5, 1, 2], 6),
        ("n", ["Build the list of its positive divisors in ascending order.", "Count the numbers."], 12, 6),
        ("n", ["Write it in base 2, as a string of 0 and 1.", "Reverse it."], 6, "011"),
        ("words", ["Reverse each string.", "Sort the strings alphabetically."], ["ab", "xa"], ["ax", "ba"]),
        ("text", ["Remove all vowels (a, e, i, o, u, in lower and upper case).", "Count its characters."], "a boat", 3),
        ("scores", ["Keep only the entries whose value is even."], {"Ann": 2, "Ben": 3}, {"Ann": 2}),
        ("scores", ["Build the list of the values in ascending order."], {"Ann": 2, "Ben": 1}, [1, 2]),
    ],
)
def test_programs_do_what_the_sentences_say(argument: str, sentences: list[str], value: Any, result: Any) -> None:
    lines = [BY_SENTENCE[sentence].line for sentence in sentences]
    assert run(CodeProblem(BY_ARGUMENT[argument], tuple(sentences), tuple(lines)), value) == result


def test_every_operation_has_its_parameters_and_fits_others() -> None:
    kinds = {start.kind for start in STARTS}
    for operation in OPERATIONS:
        for name in operation.parameters:
            assert f"{{{name}}}" in operation.sentence and f"{{{name}}}" in operation.line
        assert operation.takes in kinds | {other.gives for other in OPERATIONS}
    assert len(BY_SENTENCE) >= len(OPERATIONS) - 1  # "Reverse the list." is for numbers and for strings


def test_all_drawn_programs_run_on_all_inputs() -> None:
    rng = random.Random(0)
    used: Counter[str] = Counter()
    for _ in range(600):
        problem = draw_problem(rng, rng.randint(1, 4))
        if problem is None:
            continue
        calls = problem.calls(rng, 6)  # raises if the program does
        used.update(problem.lines)
        if calls is not None:
            assert len({call for call, _ in calls}) == 6
            assert len({repr(result) for _, result in calls}) > 1
    assert len(used) > 200


def test_problem_describes_every_step_once() -> None:
    problem = draw_problem(random.Random(3), 3)
    assert problem is not None
    for number, sentence in enumerate(problem.sentences, start=1):
        assert problem.description.count(f"{number}. {sentence}") == 1
    assert "{" not in "".join(problem.sentences)
    assert len(problem.program.splitlines()) == 6
