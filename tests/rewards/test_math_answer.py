from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from assay.rewards import MathJudge, MathVerifyJudge
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
def test_statuses(completion: str, status: Status, parsed: str | None, form: float) -> None:
    verdict = MathJudge()(completion, "1200", {})
    reward = 1.0 if status is Status.OK else 0.0
    assert (verdict.status, verdict.parsed, verdict.reward) == (status, parsed, reward)
    assert verdict.parts == {"accuracy": reward, "format": form}


def test_lenient_answers_are_right_but_not_in_form() -> None:
    verdict = MathJudge(strict=False)("it is 1200.", "1,200", {})
    assert verdict.correct and verdict.parts == {"accuracy": 1.0, "format": 0.0}


def test_an_unreadable_gold_answer_is_the_tasks_fault() -> None:
    assert MathJudge()(r"\boxed{5}", " ", {}).status is Status.ERROR
    for gold in ("1/0", "9" * 1000, "9^{9^{9^{9}}}"):
        verdict = MathJudge()(r"\boxed{5}", gold, {})
        assert verdict.status is Status.ERROR and "gold" in verdict.detail


def test_unknown_form() -> None:
    with pytest.raises(UserError, match="boxed, hash"):
        MathJudge(extract="boxt")


def test_judges_travel() -> None:
    judge = MathJudge("hash", strict=False)
    assert pickle.loads(pickle.dumps(judge)) == judge


def test_math_verify_alone() -> None:
    judge = MathVerifyJudge()
    assert judge(r"we get $\frac{1}{2}$", "0.5", {}).status is Status.OK
    assert judge(r"we get \boxed{3}", "0.5", {}).status is Status.WRONG
    assert judge("dunno", "0.5", {}).status is Status.NO_ANSWER
    assert judge("1" * 1_000_000, "0.5", {}).status is Status.UNPARSABLE


def test_numbers_need_neither_torch_nor_sympy() -> None:
    code = (
        "import sys; from assay.rewards import MathJudge, JudgePool; "
        "assert MathJudge('hash')('#### 1,200', '1200', {}).correct; "
        "print(sorted({'torch', 'sympy', 'math_verify', 'asyncio', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
