"""Rewards of verifiers, which run in worker processes, and of a model behind an endpoint, added by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from assay.rewards.judge import RewardMix
from assay.rewards.pool import GroupItem, Item, JudgePool, JudgeReport
from assay.types import Prompt, Status, Verdict

if TYPE_CHECKING:  # at run time, it imports the settings and asyncio, which most judges do not need
    from assay.rewards.model_judge import ModelJudge
    from assay.rewards.reward_model import RewardModelJudge

PART = "judge"  # name of the model's reward in `Verdict.parts`
FAILURES = (Status.ERROR, Status.TIMEOUT)


class Judging(Protocol):
    """What judges the answers of a run: a `JudgePool` or a `JudgePanel`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def fields(self, prompt: Prompt) -> Mapping[str, Any]: ...

    def judge(self, items: Sequence[Item], report: JudgeReport | None = None) -> list[Verdict]: ...

    def judge_groups(self, groups: Sequence[GroupItem], report: JudgeReport | None = None) -> list[list[Verdict]]: ...

    def close(self) -> None: ...


class JudgePanel:
    """reward = reward of the verifiers + weight x reward of the model.

    The verifiers' weights are part of their reward. With `mix`, the model decides status and parsed answer, and `mix`
    computes its reward; without, the verifiers decide them. If the model fails or does not answer in time, the status
    is error: such an answer is not trained on. The model is never asked in a worker process: workers have no network,
    and must not see the API key.
    """

    def __init__(
        self,
        model: ModelJudge | RewardModelJudge,
        weight: float = 1.0,
        verifiers: JudgePool | None = None,
        mix: RewardMix | None = None,
    ) -> None:
        assert verifiers is not None or mix is not None
        self.model, self.weight, self.verifiers, self.mix = model, weight, verifiers, mix

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self.model.close()
        finally:
            if self.verifiers is not None:
                self.verifiers.close()

    def describe_usage(self) -> str:
        return self.model.describe_usage()

    def fields(self, prompt: Prompt) -> Mapping[str, Any]:
        return self.model.fields(prompt)

    def judge(self, items: Sequence[Item], report: JudgeReport | None = None) -> list[Verdict]:
        return [verdict for (verdict,) in self.judge_groups([([item[0]], *item[1:]) for item in items], report)]

    def judge_groups(self, groups: Sequence[GroupItem], report: JudgeReport | None = None) -> list[list[Verdict]]:
        verified = self.verifiers.judge_groups(groups) if self.verifiers is not None else None
        judged = self.model.judge_groups(groups, report)
        combined = []
        for index, (texts, *_) in enumerate(groups):
            own = verified[index] if verified is not None else [None] * len(texts)
            combined.append([self._sum(*one) for one in zip(own, judged[index], texts, strict=True)])
        return combined

    def _sum(self, verified: Verdict | None, judged: Verdict, completion: str) -> Verdict:
        if judged.status in FAILURES:
            parsed, parts = (verified.parsed, verified.parts) if verified is not None else (None, {})
            return Verdict(0.0, Status.ERROR, parsed, dict(parts), f"{PART}: {judged.detail}")
        shaped = self.mix.shape(judged, completion) if self.mix is not None else judged
        parts = {**(verified.parts if verified is not None else {}), **shaped.parts, PART: shaped.reward}
        if verified is None:
            return Verdict(self.weight * shaped.reward, shaped.status, shaped.parsed, parts)
        if verified.status is Status.ERROR:
            return Verdict(0.0, Status.ERROR, verified.parsed, parts, verified.detail)
        first = shaped if self.mix is not None else verified
        reward = verified.reward + self.weight * shaped.reward
        return Verdict(reward, first.status, first.parsed, parts, first.detail)
