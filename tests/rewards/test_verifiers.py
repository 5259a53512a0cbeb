from __future__ import annotations

import random
import subprocess
import sys
from itertools import permutations, product

import pytest

from assay.rewards import CountdownJudge, MathJudge, MathVerifyJudge
from assay.types import Status, UserError


@pytest.mark.parametrize(
    ("completion", "status", "parsed", "form"),
    [
        (r"so \boxed{1,200}", Status.OK, "1,200", 1.0),
        (r"so \boxed{7}", Status.WRONG, "7", 1.0),
        ("so 1200", Status.NO_ANSWER, None, 0.0),
        (r"so \boxed{12", Status.UNPARSABLE, "12", 0.0),
        (r"so \boxed{hello}", Status.UNPARSABLE, "hello", 1.0),
        (r"so \boxed{9^{9^{9}}}", Status.UNPARSABLE, "9^{9^{9}}", 1.0),
    ],
)
def test_math_statuses(completion: str, status: Status, parsed: str | None, form: float) -> None:
    verdict = MathJudge()(completion, "1200", {})
    reward = 1.0 if status is Status.OK else 0.0
    assert (verdict.status, verdict.parsed, verdict.reward) == (status, parsed, reward)
    assert verdict.parts == {"accuracy": reward, "format": form}

    lenient = MathJudge(strict=False)(completion, "1,200", {})
    assert lenient.correct is (status is Status.OK or completion == "so 1200") and lenient.parts["format"] == form


def test_unreadable_gold_answer_is_an_error() -> None:
    for gold in (" ", "1/0", "9" * 1000, "9^{9^{9^{9}}}"):
        verdict = MathJudge()(r"\boxed{5}", gold, {})
        assert verdict.status is Status.ERROR and "gold" in verdict.detail


def test_unknown_answer_form_is_a_user_error() -> None:
    with pytest.raises(UserError, match="boxed, hash"):
        MathJudge(extract="boxt")


def test_math_verify_judge() -> None:
    judge = MathVerifyJudge()
    assert judge(r"we get $\frac{1}{2}$", "0.5", {}).status is Status.OK
    assert judge(r"we get \boxed{3}", "0.5", {}).status is Status.WRONG
    assert judge("dunno", "0.5", {}).status is Status.NO_ANSWER
    assert judge("1" * 1_000_000, "0.5", {}).status is Status.UNPARSABLE


def test_judging_numbers_imports_neither_torch_nor_sympy() -> None:
    code = (
        "import sys; from assay.rewards import MathJudge, JudgePool; "
        "assert MathJudge('hash')('#### 1,200', '1200', {}).correct; "
        "print(sorted({'torch', 'sympy', 'math_verify', 'asyncio', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FIELDS = {"nums": [3, 4, 5], "target": 17}


def judge(expression: str, fields: object = None) -> tuple[Status, str]:
    verdict = CountdownJudge()(f"<answer>{expression}</answer>", "", FIELDS if fields is None else fields)  # type: ignore[arg-type]
    assert verdict.reward == (1.0 if verdict.status is Status.OK else 0.0)
    return verdict.status, verdict.detail


SOLUTIONS = [
    *("3*4+5", " (3 * 4) + 5 ", "5+4*3", "3 × 4 + 5", r"3 \times 4 + 5", r"$3 \cdot 4 + 5$", "3*4+5 = 17"),
    *("3*4+5=17.0", "((((3))))*4+5", "-(-5) + 3*4", "+5+3*4", "-" * 390 + "3*4+5"),
]
UNREADABLE = [
    *("3*4+", "3**4+5", "9**9**9**9", "3//4+5", "3(4)+5", "x+5", "3*4+5 = x", "3*4+5=17=17", "3.0*4+5", "3,4,5"),
    *("3 4 5", "__import__('os').system('true')", "(" * 10_000, "(" * 100 + "3" + ")" * 100 + "*4+5"),
    *("9" * 300, "9" * 10_000_000, "\ud800"),
]


def test_countdown_solutions() -> None:
    assert [expression for expression in SOLUTIONS if judge(expression) != (Status.OK, "")] == []


def test_unreadable_countdown_expressions_have_a_reason() -> None:
    found = {expression: judge(expression) for expression in UNREADABLE}
    assert all(status is Status.UNPARSABLE and detail for status, detail in found.values())


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
        ("-" * 389 + "3*4+5", "equals -7, not 17"),
    ],
)
def test_wrong_countdown_solutions_have_a_reason(expression: str, why: str) -> None:
    status, detail = judge(expression)
    assert status is Status.WRONG and why in detail


@pytest.mark.parametrize(
    ("expression", "nums", "target"),
    [
        ("8/(3-8/3)", [3, 3, 8, 8], 24),
        (r"\frac{8}{3-\frac{8}{3}}", [3, 3, 8, 8], 24),
        ("1/3+1/3+1/3", [1, 3] * 3, 1),
    ],
)
def test_countdown_arithmetic_is_exact(expression: str, nums: list[int], target: int) -> None:
    assert judge(expression, {"nums": nums, "target": target})[0] is Status.OK


def test_countdown_answer_forms() -> None:
    assert CountdownJudge()("<answer>3*4+5</answer>", "17", {"nums": ["3", 4, 5.0]}).correct  # the target is the answer
    assert CountdownJudge()("3*4+5", "", FIELDS).status is Status.NO_ANSWER
    assert CountdownJudge()("<answer>3*4+5", "", FIELDS).status is Status.UNPARSABLE
    assert CountdownJudge("boxed")(r"\boxed{3*4+5}", "", FIELDS).correct
    lenient = CountdownJudge(strict=False)(r"\boxed{3*4+5}", "", FIELDS)
    assert lenient.correct and lenient.parts["format"] == 0.0
    assert CountdownJudge(strict=False)("it is 17", "", FIELDS).status is Status.NO_ANSWER


@pytest.mark.parametrize(
    "fields", [{}, {"nums": 3, "target": 1}, {"nums": [1.5], "target": 1}, {"nums": [1], "target": "x"}]
)
def test_invalid_countdown_problem_is_an_error(fields: dict[str, object]) -> None:
    status, detail = judge("1", fields)
    assert status is Status.ERROR and "nums" in detail


def test_random_expressions_agree_with_python() -> None:
    """The reference is `eval`, which the judge never uses."""
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
