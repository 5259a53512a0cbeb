"""Final answers are extracted, and judged by the judges of this package; the judge of math-verify."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.rewards import CountdownJudge, MathJudge, MathVerifyJudge
from assay.rewards.verifiers import EXTRACTORS, extract
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
        *((expression, "numbers") for expression in ("3*4", "3*4+5+5-5", "34/2", "17")),
        *(("3+4+5", "equals 12"), ("3*4+5=18", "says"), ("5/(4-3-1)", "zero"), ("3/(4*0)", "zero")),
        ("3+4/5", "equals 19/5"),
        ("-" * 389 + "3*4+5", "equals -7, not 17"),
    ],
)
def test_wrong_countdown_solutions_have_a_reason(expression: str, why: str) -> None:
    status, detail = judge(expression)
    assert status is Status.WRONG and why in detail


@pytest.mark.parametrize(
    ("expression", "nums", "target"),
    [("8/(3-8/3)", [3, 3, 8, 8], 24), (r"\frac{8}{3-\frac{8}{3}}", [3, 3, 8, 8], 24), ("1/3+1/3+1/3", [1, 3] * 3, 1)],
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


# Extraction of the final answer


FOUND = [
    ("boxed", r"so \boxed{72}", "72"),
    ("boxed", r"\boxed{1} then \boxed{2}", "2"),
    ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ("boxed", r"\boxed{a {b {c} d} e} f}", "a {b {c} d} e"),
    ("boxed", r"\boxed {5}", "5"),
    ("boxed", r"\fbox{5}", "5"),
    ("boxed", r"\boxed{\boxed{5}}", "5"),
    ("boxed", r"\boxed 5", "5"),
    ("boxed", r"\boxed -1,234.5 eggs", "-1,234.5"),
    ("boxed", r"$\boxed{5}$ as \boxed asks", "5"),
    ("boxed", "\\boxed{\n5\n}", "5"),
    ("hash", "It is 5.\n#### 72", "72"),
    ("hash", "#### 1\nno, #### 2\nmore", "2"),
    ("hash", "####72", "72"),
    ("hash", "#### -1,200 dollars \nbye", "-1,200 dollars"),
    ("answer-tag", "<answer>5</answer>", "5"),
    ("answer-tag", "<answer>1</answer> <answer> (1+2) * 3 </answer> bye", "(1+2) * 3"),
    ("answer-tag", "<answer><answer>5</answer></answer>", "5"),
    ("last-number", "12 and then 15.", "15"),
    ("last-number", "she pays $1,234.50!", "$1,234.50"),
    ("last-number", "it is -5", "-5"),
    ("last-number", "it is \u22125 here", "\u22125"),
    ("last-number", "9-5", "5"),
    ("last-number", "(9)-5", "5"),
    ("last-number", "about 3/4 of it", "3/4"),
    ("last-number", r"\frac{3}{4} of it", r"\frac{3}{4}"),
    ("last-number", "50 % of it", "50 %"),
    ("last-number", "1,2,3", "3"),
    ("last-number", ".5 cups", ".5"),
    ("last-number", "1.5e3 cups", "1.5e3"),
]


@pytest.mark.parametrize(("form", "text", "answer"), FOUND)
def test_last_answer_is_extracted(form: str, text: str, answer: str) -> None:
    found = extract(text, form)
    assert (found.status, found.text, found.form) == (Status.OK, answer, form)


NOT_FOUND = [
    ("boxed", "72", Status.NO_ANSWER),
    ("boxed", "", Status.NO_ANSWER),
    ("boxed", r"put it in \boxed form", Status.NO_ANSWER),
    ("boxed", r"\boxedfoo{5}", Status.NO_ANSWER),
    ("boxed", r"\boxed{72", Status.UNPARSABLE),
    ("boxed", r"\boxed{5} and \boxed{\frac{1}{2}", Status.UNPARSABLE),
    ("boxed", r"\boxed{5\}", Status.UNPARSABLE),
    ("boxed", r"\boxed{}", Status.UNPARSABLE),
    ("boxed", r"\boxed{" + "5" * 10_000 + "}", Status.UNPARSABLE),
    ("hash", "## 72", Status.NO_ANSWER),
    ("hash", "#### 5 ####", Status.UNPARSABLE),
    ("hash", "####\n72", Status.UNPARSABLE),
    ("answer-tag", "72</answer>", Status.NO_ANSWER),
    ("answer-tag", "<answer>5</answer> <answer>6", Status.UNPARSABLE),
    ("answer-tag", "<answer> </answer>", Status.UNPARSABLE),
    ("last-number", "none at all", Status.NO_ANSWER),
    ("last-number", "9" * 10_000, Status.UNPARSABLE),
]


@pytest.mark.parametrize(("form", "text", "status"), NOT_FOUND)
def test_missing_answer_has_a_reason(form: str, text: str, status: Status) -> None:
    found = extract(text, form)
    assert found.status is status
    assert found.detail


@pytest.mark.parametrize(
    ("form", "text", "answer", "source"),
    [
        ("boxed", "#### 5 and 6", "5 and 6", "hash"),
        ("boxed", "<answer>7</answer> 8", "7", "answer-tag"),
        ("boxed", "so it is 72.", "72", "last-number"),
        ("boxed", r"so \boxed{72", "72", "last-number"),
        ("hash", r"\boxed{5} or 6", "5", "boxed"),
        ("hash", r"\boxed{5} #### 6", "6", "hash"),
    ],
)
def test_lenient_extraction_accepts_other_forms(form: str, text: str, answer: str, source: str) -> None:
    found = extract(text, form, strict=False)
    assert (found.status, found.text, found.form) == (Status.OK, answer, source)
    assert extract(text, form).found == (source == form)


def test_lenient_extraction_without_answer_keeps_the_first_reason() -> None:
    assert extract(r"\boxed{x", "boxed", strict=False).status is Status.UNPARSABLE
    assert extract("nothing", "boxed", strict=False).status is Status.NO_ANSWER
    assert extract("just 5", "answer-tag", strict=False, any_number=False).status is Status.NO_ANSWER


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="\\boxed{}fr#<answer>/ 0123456789,.$%-\ud800\n", max_size=60), st.sampled_from(list(EXTRACTORS))
)
def test_any_text_gives_an_answer_or_a_reason(text: str, form: str) -> None:
    found = extract(text, form)
    if found.found:
        assert found.text and found.text in text
    else:
        assert found.status in (Status.NO_ANSWER, Status.UNPARSABLE) and found.detail


@given(st.text(alphabet="ab1{}\\ ", max_size=30).filter(lambda s: s.strip()))
@settings(max_examples=150, deadline=None)
def test_boxed_agrees_with_counting_braces(inside: str) -> None:
    """Against a reference that walks character by character."""
    text = "x \\boxed{" + inside + "}"
    depth, position, expected = 1, 0, None
    body = inside + "}"
    while position < len(body):
        if body[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(body[position], 0)
        if depth == 0:
            expected = body[:position].strip()
            break
        position += 1
    found = extract(text, "boxed")
    assert found.found == bool(expected)
    if expected:
        assert found.text == expected
