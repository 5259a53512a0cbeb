from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from assay.rewards import JudgePool, MathJudge, RewardMix
from assay.rewards.judge import failed_verdict
from assay.types import Status, UserError, Verdict


@dataclass(frozen=True)
class Fixed:
    verdict: Verdict

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return self.verdict


def test_plus_one_zero_minus_one() -> None:
    mix = RewardMix(MathJudge(), unparsable=-1.0)
    completions = {r"\boxed{5}": 1.0, r"\boxed{6}": 0.0, "5": -1.0, r"\boxed{5": -1.0, r"\boxed{five}": -1.0}
    assert {text: mix(text, "5", {}).reward for text in completions} == completions
    assert mix("5", "5", {}).status is Status.NO_ANSWER


def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    mix = RewardMix(MathJudge(), accuracy=2.0, format=0.5, length=0.25, target_length=20)
    right = mix(r"\boxed{5}" + "." * 21, "5", {})
    assert right.parts == {"accuracy": 1.0, "format": 1.0, "length": 0.5}
    assert right.reward == 2.0 + 0.5 + 0.125
    unformed = mix("5", "5", {})
    assert unformed.parts == {"accuracy": 0.0, "format": 0.0, "length": 1.0} and unformed.reward == 0.25


@pytest.mark.parametrize(("characters", "score"), [(0, 1.0), (100, 1.0), (125, 0.75), (200, 0.0), (10_000, 0.0)])
def test_length(characters: int, score: float) -> None:
    mix = RewardMix(MathJudge(), accuracy=0.0, length=1.0, target_length=100)
    assert mix("x" * characters, "5", {}).reward == pytest.approx(score)


def test_a_pattern_of_ones_own() -> None:
    mix = RewardMix(MathJudge(strict=False), accuracy=0.0, format=1.0, format_pattern=r"^<think>.*</think>")
    assert mix("<think>a\nb</think> 5", "5", {}).reward == 1.0
    assert mix(r"\boxed{5}", "5", {}).reward == 0.0


def test_partial_credit_lies_between_wrong_and_correct() -> None:
    mix = RewardMix(Fixed(Verdict(0.25, Status.WRONG)), correct=3.0, wrong=-1.0)
    assert mix("", "", {}).reward == 0.0
    assert mix("", "", {}).parts["format"] == 1.0  # a judge without a form of its own: an answer was read


def test_failures_keep_their_status() -> None:
    mix = RewardMix(MathJudge(), format=0.5, length=0.5, unparsable=-1.0)
    late = failed_verdict(mix, Status.TIMEOUT, "slow")
    assert (late.reward, late.status, late.detail) == (-1.0, Status.TIMEOUT, "slow")
    assert failed_verdict(mix, Status.ERROR, "broken").reward == 0.0


def test_in_a_pool() -> None:
    with JudgePool(RewardMix(MathJudge(), unparsable=-1.0), workers=1) as pool:
        verdicts = pool.judge([(r"\boxed{5}", "5", {}), ("5", "5", {})])
    assert [v.reward for v in verdicts] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"correct": math.nan}, "correct"), ({"target_length": 0}, "target_length"), ({"format_pattern": "("}, "pattern")],
)
def test_bad_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        RewardMix(MathJudge(), **settings)
