"""The learner: advantages, the learning rate of a step, and the entropy coefficient that adapts from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_parts import make_groups, tiny_decoder, weights_of

from assay.algos import make_algorithm
from assay.config import TrainConfig
from assay.train.learner.learner import Learner
from assay.train.learner.optim import make_adamw
from assay.train.learner.update import Updater
from assay.train.state import RunState, Schedule
from assay.types import Group

FOUR_STEPS = Schedule(4)


def make_learner(schedule: Schedule = FOUR_STEPS, **algo: Any) -> Learner:
    cfg = TrainConfig()
    cfg.optim.lr, cfg.optim.schedule = 0.01, "linear"
    policy = tiny_decoder()
    return Learner(cfg, make_algorithm("grpo", **algo), Updater(policy, make_adamw(policy, 0.01)), schedule)


def test_an_update_changes_the_weights_and_increments_the_step() -> None:
    learner, state = make_learner(), RunState(step=2)
    groups, before = make_groups(learner.policy), weights_of(learner.policy).clone()
    assert learner.credit(groups) == {}
    assert any(rollout.advantage for group in groups for rollout in group.rollouts)
    metrics = learner.update(groups, state)
    assert state.step == 3 and metrics["optim/grad_norm"] > 0 and metrics["time/train"] > 0
    assert not torch.equal(weights_of(learner.policy), before)


def test_the_learning_rate_follows_steps_or_the_budget_of_answers() -> None:
    by_steps = make_learner(FOUR_STEPS)
    assert [by_steps.learning_rate(RunState(step=step)) for step in range(4)] == pytest.approx(
        [0.01, 0.0075, 0.005, 0.0025]
    )
    by_budget = make_learner(Schedule(4, answers_per_step=10, budget=40))
    # More answers than a step's worth were sampled for each step, because groups were dropped.
    assert [by_budget.learning_rate(RunState(step, answers=count)) for step, count in enumerate((10, 25, 40))] == (
        pytest.approx([0.01, 0.005, 0.0025])
    )


def test_more_updates_are_expected_until_the_last_step() -> None:
    learner, state = make_learner(Schedule(2)), RunState()
    groups = make_groups(learner.policy)
    learner.credit(groups)
    expected = []
    for _ in range(2):
        learner.update(groups, state)
        expected.append(learner.updater.expects_more)
    assert expected == [True, False]


def entropy_coef(learner: Learner, groups: list[Group], state: RunState) -> float:
    """The coefficient that a step uses, and adapts at its end."""
    metrics = learner.update(groups, state)
    assert metrics["loss/entropy"] == pytest.approx(learner.algo.terms[-1].coef * metrics["policy/entropy"], rel=0.2)
    return learner.algo.end_step(state.step, groups, metrics)["policy/entropy_coef"]


@pytest.mark.parametrize(("target", "coefs"), [(99.0, [0.01, 0.015, 0.02]), (1e-6, [0.01, 0.0, 0.0])])
def test_the_entropy_coefficient_grows_below_the_target_and_is_0_above_it(target: float, coefs: list[float]) -> None:
    learner, state = make_learner(entropy_coef=0.01, entropy_target=target, entropy_delta=0.005), RunState()
    groups = make_groups(learner.policy)
    learner.credit(groups)
    assert [entropy_coef(learner, groups, state) for _ in range(3)] == pytest.approx(coefs)


def test_a_learner_with_the_saved_state_continues_with_the_same_coefficient() -> None:
    settings = {"entropy_coef": 0.01, "entropy_target": 99.0}
    learner, state = make_learner(**settings), RunState()
    groups = make_groups(learner.policy)
    learner.credit(groups)
    entropy_coef(learner, groups, state)
    resumed = make_learner(**settings)
    resumed.load_state_dict(learner.state_dict())
    expected = entropy_coef(learner, groups, state)
    assert entropy_coef(resumed, groups, RunState(step=1)) == expected == pytest.approx(0.015)
