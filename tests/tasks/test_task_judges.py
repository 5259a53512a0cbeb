"""Judges from the sections [reward] and [judge] of the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub_endpoint import stub_endpoint

from assay.config import JudgeConfig, RewardConfig
from assay.tasks import make_task
from assay.tasks.registry import build_judge, build_judge_pool
from assay.types import UserError

TASK = make_task("abacus")


def write_rewards(folder: Path) -> tuple[str, str]:
    for name in ("first", "second"):
        (folder / f"{name}.py").write_text("def reward(c, a): return 0.5\ndef other(completions): return [1.0]\n")
    return str(folder / "first.py"), str(folder / "second.py")


def test_several_reward_functions_are_named_in_the_parts_of_a_verdict(tmp_path: Path) -> None:
    first, second = write_rewards(tmp_path)
    cfg = RewardConfig(
        functions=[f"{first}:reward", f"{second}:reward", "task", f"{first}:other"], weights=[2, 1, 1, 3]
    )
    verdict = build_judge(cfg, TASK)("#### 7", "7", {})
    assert verdict.reward == 2 * 0.5 + 0.5 + 1.0 + 3.0
    assert {"first.reward": 0.5, "second.reward": 0.5, "task": 1.0, "other": 1.0}.items() <= verdict.parts.items()
    assert not verdict.correct  # as the first function says
    assert "reward" not in build_judge(RewardConfig(function=f"{first}:reward"), TASK)("#### 7", "7", {}).parts
    assert "reward" in build_judge(RewardConfig(functions=[f"{first}:reward"]), TASK)("#### 7", "7", {}).parts


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"function": "a.py:f", "functions": ["b.py:f"]}, "both set"),
        ({"functions": ["task"], "weights": [1.0, 2.0]}, "1 entries"),
        ({"weights": [1.0]}, "reward.functions"),
        ({"functions": ["task", "task"]}, "more than once"),
    ],
)
def test_contradicting_reward_functions_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        build_judge(RewardConfig(**settings), TASK)


def test_a_model_judges_beside_the_task(tmp_path: Path) -> None:
    first, _ = write_rewards(tmp_path)
    judge = JudgeConfig(model="m", rubric="Be nice.", cache="", retries=0)
    with stub_endpoint(lambda body: "4") as server:
        judge = judge.model_copy(update={"url": server.url})
        for settings, reward, correct in (
            ({"functions": ["task", "judge"], "weights": [1.0, 2.0]}, 1 + 2 * 0.75, True),
            ({"functions": ["judge", f"{first}:reward"], "correct": 4.0}, 4 * 0.75 + 0.5, True),
            ({"functions": [f"{first}:reward", "task", "judge"], "weights": [2.0, 3.0, 4.0]}, 1 + 3 + 3, False),
            ({"function": "judge"}, 0.75, True),
        ):
            with build_judge_pool(RewardConfig(workers=0, **settings), TASK, judge) as pool:
                (verdict,) = pool.judge([("#### 7", "7", {})])
            assert (verdict.reward, verdict.correct) == (pytest.approx(reward), correct), settings
            assert verdict.parts["judge"] in (0.75, 3.0)
    with pytest.raises(UserError, match="more than once"):
        build_judge_pool(RewardConfig(functions=["judge", "judge"]), TASK, judge)
    with pytest.raises(UserError, match=r"judge\.model"):
        build_judge_pool(RewardConfig(function="judge"), TASK)
