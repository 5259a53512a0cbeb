from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from assay.rewards import FunctionJudge, JudgePool, MathJudge, RewardMix, check_verdicts
from assay.rewards.judge import failed_verdict
from assay.types import Status, UserError, Verdict

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(code: str) -> str:
        file = tmp_path / "mine.py"
        file.write_text(textwrap.dedent(code))
        return f"{file}:reward"

    return write_file


@pytest.mark.parametrize(
    ("body", "reward", "status"),
    [
        ("return 1.0", 1.0, Status.OK),
        ("return True", 1.0, Status.OK),
        ("return 0", 0.0, Status.WRONG),
        ("return 0.3", 0.3, Status.WRONG),
        ("return -2", -2.0, Status.WRONG),
        ("return {'reward': 0.5, 'status': 'ok', 'parsed': 7, 'parts': {'style': 0.5}}", 0.5, Status.OK),
        ("return Verdict(0.0, Status.NO_ANSWER)", 0.0, Status.NO_ANSWER),
        ("return float(completion == 'c' and answer == 'a' and fields == {'level': 3})", 1.0, Status.OK),
        ("import numpy; return numpy.float32(1)", 1.0, Status.OK),
    ],
)
def test_return_values_of_reward_functions(write: Write, body: str, reward: float, status: Status) -> None:
    header = "from assay.types import Status, Verdict\ndef reward(completion, answer, **fields): "
    verdict = FunctionJudge(write(header + body))("c", "a", {"level": 3})
    assert (verdict.reward, verdict.status) == (reward, status)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("raise KeyError('oops\\n two lines')", "KeyError: 'oops"),
        ("return float('nan')", "finite"),
        ("return {'reward': float('inf')}", "finite"),
        ("return None", "NoneType"),
        ("return '1.0'", "str"),
        ("return [1.0]", "list"),
        ("return {'score': 1}", "'reward'"),
        ("return {'reward': 1, 'status': 'fine'}", "fine"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_failing_reward_function_gives_an_error_verdict(write: Write, body: str, word: str) -> None:
    verdict = FunctionJudge(write(f"def reward(completion, answer, **fields): {body}"))("c", "a", {})
    assert (verdict.reward, verdict.status) == (0.0, Status.ERROR)
    assert word in verdict.detail and "\n" not in verdict.detail


def test_dict_with_parts(write: Write) -> None:
    verdict = FunctionJudge(write("def reward(c, a): return {'reward': 1, 'parsed': 7, 'parts': {'style': 1}}"))(
        "", "", {}
    )
    assert (verdict.parsed, verdict.parts) == ("7", {"style": 1.0})


def test_only_named_fields_are_passed(write: Write) -> None:
    judge = FunctionJudge(write("def reward(completion, answer, level=0): return level"))
    assert judge("c", "a", {"level": 1, "subject": "algebra", "answer": "b", "completion": "d"}).reward == 1.0


def test_async_functions_local_imports_and_prints_in_workers(write: Write, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def worth(text): return float(len(text))")
    path = write("""
        import asyncio, dataclasses, os, sys
        from helper import worth

        @dataclasses.dataclass
        class Thing:
            x: int

        async def reward(completion, answer, **fields):
            print("noise on stdout \\ud800", flush=True)
            os.write(1, b"raw noise")
            assert sys.stdin.read() == ""
            await asyncio.sleep(0.001)
            return worth(completion)
    """)
    with JudgePool(FunctionJudge(path), workers=2) as pool:
        assert [v.reward for v in pool.judge([("x" * n, "", {}) for n in range(5)])] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_check_verdicts_raises_if_all_are_errors() -> None:
    broken = Verdict(0.0, Status.ERROR, detail="KeyError: 'x'")
    with pytest.raises(UserError, match="KeyError: 'x'"):
        check_verdicts([broken, broken])
    check_verdicts([broken, Verdict(0.0, Status.WRONG)])
    check_verdicts([])


def test_check_verdicts_raises_if_all_are_timeouts_and_names_the_limit() -> None:
    late, broken = Verdict(0.0, Status.TIMEOUT, detail="took longer than 5 s"), Verdict(0.0, Status.ERROR)
    with pytest.raises(UserError, match=r"timed out on all 2 answers.* 5 s.*reward.timeout_s"):
        check_verdicts([late, late])
    with pytest.raises(UserError, match=r"failed or timed out on all 2 answers.*reward.timeout_s"):
        check_verdicts([late, broken])
    check_verdicts([late, Verdict(0.0, Status.NO_ANSWER)])


@dataclass(frozen=True)
class Fixed:
    verdict: Verdict

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return self.verdict


def test_reward_of_unreadable_answers() -> None:
    mix = RewardMix(MathJudge(), unparsable=-1.0)
    completions = {r"\boxed{5}": 1.0, r"\boxed{6}": 0.0, "5": -1.0, r"\boxed{5": -1.0, r"\boxed{five}": -1.0}
    assert {text: mix(text, "5", {}).reward for text in completions} == completions
    assert mix("5", "5", {}).status is Status.NO_ANSWER


def test_mixed_reward_is_the_weighted_sum_of_its_parts() -> None:
    mix = RewardMix(MathJudge(), accuracy=2.0, format=0.5, length=0.25, target_length=20)
    right = mix(r"\boxed{5}" + "." * 21, "5", {})
    assert right.parts == {"accuracy": 1.0, "format": 1.0, "length": 0.5}
    assert right.reward == 2.0 + 0.5 + 0.125
    unformed = mix("5", "5", {})
    assert unformed.parts == {"accuracy": 0.0, "format": 0.0, "length": 1.0} and unformed.reward == 0.25


@pytest.mark.parametrize(("characters", "score"), [(0, 1.0), (100, 1.0), (125, 0.75), (200, 0.0), (10_000, 0.0)])
def test_length_score(characters: int, score: float) -> None:
    mix = RewardMix(MathJudge(), accuracy=0.0, length=1.0, target_length=100)
    assert mix("x" * characters, "5", {}).reward == pytest.approx(score)


def test_format_pattern() -> None:
    mix = RewardMix(MathJudge(strict=False), accuracy=0.0, format=1.0, format_pattern=r"^<think>.*</think>")
    assert mix("<think>a\nb</think> 5", "5", {}).reward == 1.0
    assert mix(r"\boxed{5}", "5", {}).reward == 0.0


def test_partial_credit_is_interpolated() -> None:
    mix = RewardMix(Fixed(Verdict(0.25, Status.WRONG)), correct=3.0, wrong=-1.0)
    assert mix("", "", {}).reward == 0.0
    assert mix("", "", {}).parts["format"] == 1.0  # a judge without a form of its own: an answer was read


def test_failed_verdicts_keep_their_status() -> None:
    mix = RewardMix(MathJudge(), format=0.5, length=0.5, unparsable=-1.0)
    late = failed_verdict(mix, Status.TIMEOUT, "slow")
    assert (late.reward, late.status, late.detail) == (-1.0, Status.TIMEOUT, "slow")
    assert failed_verdict(mix, Status.ERROR, "broken").reward == 0.0


def test_mixed_reward_in_a_pool() -> None:
    with JudgePool(RewardMix(MathJudge(), unparsable=-1.0), workers=1) as pool:
        verdicts = pool.judge([(r"\boxed{5}", "5", {}), ("5", "5", {})])
    assert [v.reward for v in verdicts] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"correct": math.nan}, "correct"), ({"target_length": 0}, "target_length"), ({"format_pattern": "("}, "pattern")],
)
def test_invalid_reward_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        RewardMix(MathJudge(), **settings)
