from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from assay.rewards import JudgePool, MathJudge, RewardMix, check_verdicts
from assay.rewards.functions import NOT_APPLICABLE
from assay.rewards.judge import JudgeByTask, failed_verdict
from assay.types import TASK_LABEL, Status, UserError, Verdict


def test_check_verdicts_raises_if_the_judge_failed_on_all_answers() -> None:
    broken = Verdict(0.0, Status.ERROR, detail="KeyError: 'x'")
    late = Verdict(0.0, Status.TIMEOUT, detail="took longer than 5 s")
    for verdicts, message in (
        ([broken, broken], "KeyError: 'x'"),
        ([late, late], r"timed out on all 2 answers.* 5 s.*reward.timeout_s"),
        ([late, broken], r"failed or timed out on all 2 answers.*reward.timeout_s"),
    ):
        with pytest.raises(UserError, match=message):
            check_verdicts(verdicts)
    for verdicts in ([broken, Verdict(0.0, Status.WRONG)], [late, Verdict(0.0, Status.NO_ANSWER)], []):
        check_verdicts(verdicts)


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


QUARTER = Fixed(Verdict(0.25, Status.WRONG))


@pytest.mark.parametrize(
    ("judge", "settings", "text", "reward"),
    [
        (MathJudge(), {"length": 1.0, "target_length": 100}, "x" * 100, 1.0),
        (MathJudge(), {"length": 1.0, "target_length": 100}, "x" * 125, 0.75),
        (MathJudge(), {"length": 1.0, "target_length": 100}, "x" * 10_000, 0.0),
        (MathJudge(strict=False), {"format": 1.0, "format_pattern": "^<a>.*</a>"}, "<a>a\nb</a> 5", 1.0),
        (MathJudge(strict=False), {"format": 1.0, "format_pattern": "^<a>.*</a>"}, r"\boxed{5}", 0.0),
        (QUARTER, {"accuracy": 1.0, "correct": 3.0, "wrong": -1.0}, "", 0.0),  # interpolated
        (QUARTER, {"format": 1.0}, "", 1.0),  # the judge has no form of its own: an answer was read
    ],
)
def test_parts_of_a_reward(judge: Any, settings: dict[str, Any], text: str, reward: float) -> None:
    assert RewardMix(judge, **{"accuracy": 0.0} | settings)(text, "5", {}).reward == pytest.approx(reward)


def test_failed_verdicts_keep_their_status() -> None:
    mix = RewardMix(MathJudge(), format=0.5, length=0.5, unparsable=-1.0)
    late = failed_verdict(mix, Status.TIMEOUT, "slow")
    assert (late.reward, late.status, late.detail) == (-1.0, Status.TIMEOUT, "slow")
    assert failed_verdict(mix, Status.ERROR, "broken").reward == 0.0
    judges = {"others": (Shortest(),), "weights": (2.0, 1.0), "names": ("math", "shortest")}
    total = RewardMix(MathJudge(), unparsable=-1.0, **judges)  # the first judge decides
    assert failed_verdict(total, Status.TIMEOUT, "slow").reward == -2.0


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"correct": math.nan}, "correct"), ({"target_length": 0}, "target_length"), ({"format_pattern": "("}, "pattern")],
)
def test_invalid_reward_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        RewardMix(MathJudge(), **settings)


@dataclass(frozen=True)
class Shortest:
    """1 for the shortest answers of a group."""

    sees_group = True

    def judge_group(self, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> list[Verdict]:
        least = min(map(len, completions))
        return [Verdict(float(len(text) == least), Status.WRONG) for text in completions]

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return self.judge_group([completion], answer, fields)[0]


def test_reward_sum_adds_weighted_rewards_and_the_first_judge_decides_the_status() -> None:
    names = ("math", "shortest")
    total = RewardMix(MathJudge(), format=0.5, others=(Shortest(),), weights=(2.0, 0.1), names=names)
    texts = [r"\boxed{5}", r"So it is \boxed{5}", "I do not know"]
    verdicts = total.judge_group(texts, "5", {})
    assert [v.reward for v in verdicts] == [2 * 1.5 + 0.1, 2 * 1.5, 0.0]
    assert [v.status for v in verdicts] == [Status.OK, Status.OK, Status.NO_ANSWER]
    assert verdicts[0].parts == {"accuracy": 1.0, "format": 1.0, "length": 1.0, "math": 1.5, "shortest": 1.0}
    assert total("no answer", "5", {}).reward == pytest.approx(0.1)  # the second reward counts without an answer too


def test_reward_sum_skips_judges_that_do_not_apply_and_names_one_that_fails() -> None:
    skipped = Fixed(Verdict(0.0, Status.ERROR, detail=NOT_APPLICABLE))
    broken, right = Fixed(Verdict(0.0, Status.ERROR, detail="KeyError: 'x'")), Fixed(Verdict(1.0, Status.OK))
    verdict = RewardMix(skipped, others=(right,), weights=(3.0, 2.0), names=("a", "b"))("", "", {})
    assert (verdict.reward, verdict.status, verdict.parts) == (2.0, Status.OK, {"b": 1.0})
    assert RewardMix(skipped, names=("a",))("", "", {}).status is Status.ERROR
    failed = RewardMix(right, others=(broken,), weights=(1.0, 1.0), names=("a", "b"))("", "", {})
    assert (failed.reward, failed.status, failed.detail) == (0.0, Status.ERROR, "b: KeyError: 'x'")


@pytest.mark.parametrize("workers", [0, 1])
def test_pool_judges_all_answers_to_a_prompt_together(workers: int) -> None:
    total = RewardMix(MathJudge(), others=(Shortest(),), weights=(1.0, 1.0), names=("math", "shortest"))
    groups = [(["aa", "b", r"\boxed{5}"], "5", {}), (["c"], "5", {}), ([], "5", {})]
    with JudgePool(total, workers=workers) as pool:
        assert [[v.reward for v in group] for group in pool.judge_groups(groups)] == [[0.0, 1.0, 1.0], [1.0], []]
        assert [v.reward for v in pool.judge([("aa", "5", {}), ("b", "5", {})])] == [1.0, 1.0]  # each is its own group


class AsyncFixed(Fixed):
    async def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0)
        return self.verdict


class AsyncShortest(Shortest):
    async def judge_group(self, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0)
        return super().judge_group(completions, answer, fields)


@pytest.mark.parametrize("workers", [0, 1])
def test_async_judges_give_the_verdicts_of_plain_ones(workers: int) -> None:
    right, group = Verdict(1.0, Status.OK), ([("aa"), "a"], "", {TASK_LABEL: "b"})
    found = []
    for fixed, shortest in ((Fixed, Shortest), (AsyncFixed, AsyncShortest), (AsyncFixed, Shortest)):
        others, names = (shortest(),), ("task", "short")
        total = RewardMix(fixed(right), accuracy=2.0, others=others, weights=(1.0, 0.5), names=names)
        by_task = JudgeByTask((MathJudge(), total), ("a", "b"))
        with JudgePool(by_task, workers) as pool:
            found.append(pool.judge_groups([group, (["1"], "1", {TASK_LABEL: "a"})]))
    assert found[0] == found[1] == found[2] and [verdict.reward for verdict in found[0][0]] == [2.0, 2.5]
