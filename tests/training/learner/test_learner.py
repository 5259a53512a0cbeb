"""The learner: advantages, learning rate, adaptive entropy coefficient; masks and loss of the warm start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_parts import SPEC, make_adamw, make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.config import SftConfig, TrainConfig
from assay.models.spec import spec_to_hf
from assay.text import Renderer, word_tokenizer
from assay.training.learner.learner import SFT, Learner, WarmStart, solution_rows
from assay.training.learner.update import Updater
from assay.training.progress import RunState, Schedule
from assay.types import Group, Prompt, UserError

FOUR_STEPS = Schedule(4)


def make_learner(schedule: Schedule = FOUR_STEPS, **algo: Any) -> Learner:
    cfg = TrainConfig()
    cfg.optim.lr, cfg.optim.schedule = 0.01, "linear"
    policy = tiny_decoder()
    return Learner(cfg, make_algorithm("grpo", **algo), Updater(policy, make_adamw(policy, 0.01)), schedule)


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


def test_a_learner_with_the_saved_state_continues_with_the_same_coefficient() -> None:
    settings = {"entropy_coef": 0.01, "entropy_target": 99.0}
    learner, state = make_learner(**settings), RunState()
    groups = make_groups(learner.policy)
    learner.credit(groups)
    entropy_coef(learner, groups, state)
    resumed = make_learner(**settings)
    resumed.algo.load_state_dict(learner.algo.state_dict())
    expected = entropy_coef(learner, groups, state)
    assert entropy_coef(resumed, groups, RunState(step=1)) == expected == pytest.approx(0.015)


WORDS = [str(number) for number in range(15)]


def renderer() -> Renderer:
    return Renderer(word_tokenizer(WORDS))


def problem(question: str, solution: str | None) -> Prompt:
    return Prompt(f"p/{question}", ({"role": "user", "content": question},), solution=solution)


PROMPTS = [problem("1 2 3", "4 5"), problem("6", "7 8 9 10 11 12"), problem("13 14", "0")]


def test_sft_loss_equals_transformers_on_solution_tokens() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    policy = tiny_decoder(dtype=torch.float32)
    updater = Updater(policy, make_adamw(policy, 1e-3), token_budget=9)
    rows = solution_rows(PROMPTS, renderer(), 64)
    ours = float(updater._accumulate(rows, SFT).losses["loss/policy"])
    values = spec_to_hf(SPEC)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    hf.load_state_dict(policy.state_dict(), strict=False)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r.ids) for r in rows], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(
        [torch.where(torch.tensor(r.trained) == 1, torch.tensor(r.ids), -100) for r in rows],
        batch_first=True,
        padding_value=-100,
    )
    assert ours == pytest.approx(float(hf(input_ids=ids, labels=labels).loss.detach()), abs=1e-5)


def test_the_loss_mask_covers_the_solution_and_its_end_token() -> None:
    asked = renderer()
    for row, prompt in zip(solution_rows(PROMPTS, asked, 64), PROMPTS, strict=True):
        context = asked.prompt_ids(prompt)
        assert row.ids[: len(context)] == context
        assert row.trained == [0] * len(context) + [1] * (len(prompt.solution.split()) + 1)
        assert row.ids[-1] == asked.tokenizer.eos_id and row.advantage == 1.0


@pytest.mark.slow
def test_a_warm_start_memorizes_its_solutions() -> None:
    policy = tiny_decoder(dtype=torch.float32)
    updater = Updater(policy, make_adamw(policy, 1.0))
    cfg = SftConfig(steps=150, batch=3, lr=1e-2, warmup=5)
    losses = [found["sft/loss"] for found in WarmStart(updater, renderer(), PROMPTS, cfg, seed=0).run()]
    assert len(losses) == 150 and losses[0] > 2 and losses[-1] < 0.1
    assert not updater.optimizer.state  # reinforcement begins with moments of its own


def test_missing_or_too_long_solutions_are_refused() -> None:
    with pytest.raises(UserError, match=r"p/1 .* no worked solution"):
        solution_rows([problem("1", None)], renderer(), 64)
    with pytest.raises(UserError, match=r"p/1 2 3 fills the context of 5 tokens"):
        solution_rows(PROMPTS, renderer(), 5)
    cut = solution_rows([PROMPTS[1]], renderer(), 6)[0]
    assert len(cut.ids) == 6 and sum(cut.trained) == 3  # what fits of a long solution is learnt
