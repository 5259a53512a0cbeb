"""Rewards of verifiers and of a model, added by weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stub_endpoint import Fault, message, stub_endpoint

from assay.config import JudgeConfig
from assay.rewards import JudgePanel, JudgePool, MathJudge, RewardMix
from assay.rewards.model_judge import ModelJudge
from assay.types import Prompt, Status, Verdict

PROMPT = Prompt("p", ({"role": "user", "content": "2 + 2?"},), "4")


def reply(body: dict[str, Any]) -> Any:
    text = body["messages"][0]["content"].partition("<answer>")[2]
    return Fault(400, message("no")) if "fail" in text else "5" if "nice" in text else "2"


def judged(texts: list[str], panel: Callable[[ModelJudge], JudgePanel]) -> list[Verdict]:
    with stub_endpoint(reply) as server:
        model = ModelJudge(JudgeConfig(url=server.url, model="m", rubric="Be nice.", cache="", retries=0))
        with panel(model) as judges:
            (verdicts,) = judges.judge_groups([(texts, PROMPT.answer, judges.fields(PROMPT))])
            alone = judges.judge([(text, PROMPT.answer, judges.fields(PROMPT)) for text in texts])
            assert [one.reward for one in alone if one.status is Status.ERROR] in ([], [0.0])
            assert [one for one in alone if one.status is not Status.ERROR] == [
                one for one in verdicts if one.status is not Status.ERROR
            ]
            return verdicts


def verifiers(weight: float = 1.0) -> JudgePool:
    judge = RewardMix(MathJudge("hash"), wrong=-1.0, weights=(weight,), names=("task",))
    return JudgePool(judge, workers=0)


def test_the_verifier_decides_the_status_and_the_model_adds_to_the_reward() -> None:
    texts = ["nice #### 4", "rude #### 4", "nice #### 5", "fail #### 4"]
    right, rude, wrong, failed = judged(texts, lambda model: JudgePanel(model, 0.5, verifiers(2.0)))
    assert (right.reward, rude.reward, wrong.reward) == (2 + 0.5, 2 + 0.5 * 0.25, -2 + 0.5)
    assert [v.status for v in (right, rude, wrong)] == [Status.OK, Status.OK, Status.WRONG]
    assert right.parsed == "4" and (right.parts["task"], right.parts["judge"], right.parts["score"]) == (1, 1, 5)
    assert failed.status is Status.ERROR and failed.detail.startswith("judge: ") and "judge" not in failed.parts
    assert failed.parts["task"] == 1.0
    assert failed.reward == 0.0  # which no rollout is trained with


def test_the_model_decides_the_status_if_it_comes_first() -> None:
    texts = ["nice #### 4", "rude #### 4"]
    nice, rude = judged(texts, lambda model: JudgePanel(model, 1.0, verifiers(), RewardMix(model, correct=10.0)))
    assert (nice.reward, rude.reward) == (1 + 10, 1 + 2.5)
    assert (nice.status, rude.status, nice.parsed) == (Status.OK, Status.WRONG, "5")


def test_the_model_alone() -> None:
    nice, failed = judged(["nice", "fail"], lambda model: JudgePanel(model, 3.0, mix=RewardMix(model)))
    assert nice.reward == 3.0 and nice.parts["judge"] == 1.0
    assert failed.status is Status.ERROR and "answered 400" in failed.detail


class BrokenJudge:
    def __call__(self, completion: str, answer: str, fields: Any) -> Verdict:
        raise ValueError("boom")


def test_a_verifier_that_fails_is_a_status() -> None:
    (verdict,) = judged(["nice"], lambda model: JudgePanel(model, 1.0, JudgePool(BrokenJudge(), workers=0)))
    assert verdict.status is Status.ERROR and "boom" in verdict.detail and verdict.reward == 0.0


def test_worker_processes_judge_beside_the_model() -> None:
    pool = JudgePool(RewardMix(MathJudge("hash")), workers=1)
    (verdict,) = judged(["nice #### 4"], lambda model: JudgePanel(model, 1.0, pool))
    assert verdict.reward == 2.0
