from __future__ import annotations

import random
from itertools import permutations, product

import pytest

from assay.rewards import CountdownJudge
from assay.types import Status

FIELDS = {"nums": [3, 4, 5], "target": 17}


def judge(expression: str, fields: object = None) -> tuple[Status, str]:
    verdict = CountdownJudge()(f"<answer>{expression}</answer>", "", FIELDS if fields is None else fields)  # type: ignore[arg-type]
    assert verdict.reward == (1.0 if verdict.status is Status.OK else 0.0)
    return verdict.status, verdict.detail


@pytest.mark.parametrize(
    "expression",
    [
        "3*4+5",
        " (3 * 4) + 5 ",
        "5+4*3",
        "3 × 4 + 5",
        r"3 \times 4 + 5",
        r"$3 \cdot 4 + 5$",
        "3*4+5 = 17",
        "3*4+5=17.0",
        "((((3))))*4+5",
        "-(-5) + 3*4",
        "+5+3*4",
    ],
)
def test_solutions(expression: str) -> None:
    assert judge(expression) == (Status.OK, "")


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("3*4", "numbers"),
        ("3*4+5+5-5", "numbers"),
        ("34/2", "numbers"),
        ("17", "numbers"),
        ("3+4+5", "equals 12"),
        ("3*4+5=18", "says"),
        ("5/(4-3-1)", "zero"),
        ("3/(4*0)", "zero"),
        ("3+4/5", "equals 19/5"),
    ],
)
def test_wrong_solutions_say_why(expression: str, why: str) -> None:
    status, detail = judge(expression)
    assert status is Status.WRONG and why in detail


@pytest.mark.parametrize(
    "expression",
    [
        "3*4+",
        "3**4+5",
        "9**9**9**9",
        "3//4+5",
        "3(4)+5",
        "x+5",
        "3*4+5 = x",
        "3*4+5=17=17",
        "3.0*4+5",
        "__import__('os').system('true')",
        "(" * 10_000,
        "(" * 100 + "3" + ")" * 100 + "*4+5",
        "9" * 300,
        "9" * 10_000_000,
        "3,4,5",
        "3 4 5",
        "\ud800",
    ],
)
def test_unreadable_expressions(expression: str) -> None:
    status, detail = judge(expression)
    assert detail and status is Status.UNPARSABLE


def test_many_signs_are_only_signs() -> None:
    assert judge("-" * 390 + "3*4+5")[0] is Status.OK
    assert judge("-" * 389 + "3*4+5")[1] == "equals -7, not 17"


def test_exact_fractions() -> None:
    assert judge("8/(3-8/3)", {"nums": [3, 3, 8, 8], "target": 24})[0] is Status.OK
    assert judge(r"\frac{8}{3-\frac{8}{3}}", {"nums": [3, 3, 8, 8], "target": 24})[0] is Status.OK
    assert judge("1/3+1/3+1/3", {"nums": [1, 3] * 3, "target": 1})[0] is Status.OK


def test_forms() -> None:
    assert CountdownJudge()("3*4+5", "", FIELDS).status is Status.NO_ANSWER
    assert CountdownJudge()("<answer>3*4+5", "", FIELDS).status is Status.UNPARSABLE
    assert CountdownJudge("boxed")(r"\boxed{3*4+5}", "", FIELDS).correct
    lenient = CountdownJudge(strict=False)(r"\boxed{3*4+5}", "", FIELDS)
    assert lenient.correct and lenient.parts["format"] == 0.0
    assert CountdownJudge(strict=False)("it is 17", "", FIELDS).status is Status.NO_ANSWER


def test_the_target_may_be_the_gold_answer() -> None:
    assert CountdownJudge()("<answer>3*4+5</answer>", "17", {"nums": ["3", 4, 5.0]}).correct


@pytest.mark.parametrize(
    "fields", [{}, {"nums": 3, "target": 1}, {"nums": [1.5], "target": 1}, {"nums": [1], "target": "x"}]
)
def test_a_broken_problem_is_an_error_not_a_wrong_answer(fields: dict[str, object]) -> None:
    status, detail = judge("1", fields)
    assert status is Status.ERROR and "nums" in detail


def test_random_expressions_against_pythons_own_arithmetic() -> None:
    """`eval` on expressions we wrote ourselves is the reference here; the judge never uses it."""
    rng = random.Random(0)
    checked = 0
    for first, second in product("+-*/", repeat=2):
        for nums in permutations([2, 3, 7]):
            a, b, c = nums
            text = rng.choice(
                [f"{a}{first}{b}{second}{c}", f"{a}{first}({b}{second}{c})", f"({a}{first}{b}){second}{c}"]
            )
            value = eval(text)
            for target in {round(value), round(value) + 1}:
                correct = abs(value - target) < 1e-9
                assert (judge(text, {"nums": [2, 3, 7], "target": target})[0] is Status.OK) == correct
                checked += correct
    assert checked > 20
