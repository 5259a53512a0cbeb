"""Turns that an environment leaves out of the loss: their tokens are context, and nothing else, wherever they go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from learner_parts import CHANGES, algorithm, credit, critic, updater
from processes import start
from torch import Tensor
from train_parts import cramped, full_logprobs, give_logprobs, make_turn, tiny_decoder, tokens, weights_of

from assay.algos import Algorithm, Scorers, make_algorithm
from assay.mesh import Mesh
from assay.training.learner.pack import Row
from assay.types import Group, Prompt, Rollout, Status, Turn, Verdict

LIMIT = 16
SOME = ((0, 1), (1, 0), (0, 0, 1), (0, 1, 0), (0,), (0, 0), (1, 0, 1))  # turns of the samples of each group, in turn
MASKS = (*SOME, (1, 1))


def episodes(
    masks_of: Sequence[Sequence[int]] = MASKS, groups: int = 4, samples: int = 4, seed: int = 0
) -> list[Group]:
    """With rewards for steps, and turns left out of the loss as `masks_of` says."""
    draw, model, found = random.Random(seed), tiny_decoder(), []
    for number in range(groups):
        prompt, context = Prompt(f"p/{number}", ()), tokens(draw, 3, 6)
        rollouts = []
        for sample in range(samples):
            masks = masks_of[(number * samples + sample) % len(masks_of)]
            turns = [make_turn(draw, tokens(draw, 1, 3) if position else context) for position in range(len(masks))]
            for turn, mask in zip(turns, masks, strict=True):
                turn.masked, turn.reward = bool(mask), draw.choice([0.0, 0.125, 0.25])
            total = sum(turn.reward for turn in turns)
            rollout = Rollout(prompt, sample, turns, Verdict(total, Status.WRONG), total)
            give_logprobs(model, rollout, draw, 0.4)
            rollouts.append(rollout)
        found.append(Group(prompt, rollouts))
    return found


def every(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def trained_positions(rollout: Rollout) -> list[tuple[int, int]]:
    """Places of tokens in the loss, each with the number of its turn."""
    positions, position = [], 0
    for number, turn in enumerate(rollout.turns):
        position += len(turn.context_ids)
        for _ in turn.completion.token_ids:
            if not turn.masked:
                positions.append((position, number))
            position += 1
    return positions


def as_context(rollout: Rollout) -> Rollout:
    """The same with masked turns as part of the next one's context."""
    turns: list[Turn] = []
    given: list[int] = []
    for turn in rollout.turns:
        given = [*given, *turn.context_ids]
        if turn.masked:
            given += turn.completion.token_ids
        else:
            turns.append(replace(turn, context_ids=given))
            given = []
    return replace(rollout, turns=turns)


def with_context(groups: list[Group]) -> list[Group]:
    return [replace(group, rollouts=[as_context(rollout) for rollout in group.rollouts]) for group in groups]


@pytest.mark.parametrize("name", CHANGES)
def test_masked_turns_are_context(name: str) -> None:
    algo = algorithm(name).replace(soft_overlong_buffer=0.0)  # the limit of lengths is one of all that was written
    groups = episodes(SOME, seed=1)
    found = []
    for batch in (groups, with_context(groups)):
        trained = updater(algo, token_budget=60)
        algo.credit(batch, Scorers(partial(trained.ref_logprobs, algo=algo)))
        found.append((trained.update(batch, algo, 1e-2), weights_of(trained.policy)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12)
    assert found[0][0]["optim/grad_norm"] > 1e-4 and (found[0][1] - found[1][1]).abs().max() < 1e-12


def test_masked_turns_are_context_for_the_critic() -> None:
    """Rewards of masked turns, which go to other tokens, are 0 here: see test_advantages.py for these."""
    groups = episodes(SOME)
    for rollout in every(groups):
        for turn in (turn for turn in rollout.turns if turn.masked):
            turn.reward = 0.0
        rollout.reward = sum(turn.reward for turn in rollout.turns)
    plain, losses = with_context(groups), []
    for batch in (groups, plain):
        own = critic(gamma=0.9, gae_lambda=0.8)
        credit(own, batch)
        losses.append(own.learn(batch)["critic/loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-12) and losses[0] > 0
    for rollout, other in zip(every(groups), every(plain), strict=True):
        assert len(rollout.inputs["values"]) == len(trained_positions(rollout))
        for found, expected in ((rollout.inputs[name], other.inputs[name]) for name in ("values", "returns")):
            assert found == pytest.approx(expected, abs=1e-10)
        assert rollout.token_advantages == pytest.approx(other.token_advantages, abs=1e-10)


NOTHING: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.3, "entropy_coef": 0.01},
    "reinforce_pp": {"reward_kl_coef": 0.3},
    "rloo": {"step_credit": True, "discount": 0.9},
    "gspo": {"cov": "kl_cov", "cov_fraction": 0.1},
    "dapo": {"step_credit": True},
    "ppo": {"reward_kl_coef": 0.1},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("recipe", NOTHING)
def test_a_batch_with_masked_turns_only_changes_nothing(recipe: str) -> None:
    algo = make_algorithm(recipe, max_new_tokens=LIMIT, **NOTHING[recipe])
    groups, _ = algo.replace(drop_zero_variance=False, resample=0).keep(episodes([(1,), (1, 1)]))
    trained, before = updater(algo), weights_of(tiny_decoder())
    own = critic()
    told = algo.credit(groups, Scorers(partial(trained.ref_logprobs, algo=algo), own.values))
    learnt = {key: value for key, value in told.items() if key != "reward/kl"} | own.learn(groups)
    found = trained.update(groups, algo, 1e-2, passes=2)
    assert found == {"optim/lr": 1e-2, "optim/skipped": 1.0, "optim/non_finite": 0.0} and learnt == {}
    assert weights_of(trained.policy).equal(before)
    assert all(not rollout.learns and not rollout.token_advantages for rollout in every(groups))


def untrained_and_trained() -> list[Group]:
    """Two identical rollouts with nothing but masked turns, and a group with trained tokens."""
    alone = episodes([(1,)], groups=1, samples=1)
    twin = replace(alone[0].rollouts[0], sample=1)
    return [replace(alone[0], rollouts=[*alone[0].rollouts, twin]), *episodes(SOME, groups=1, seed=3)]


@pytest.mark.parametrize(("by", "token_budget"), [("trainer", 1), ("reference", 20), ("reference", 10_000)])
def test_identical_rollouts_without_trained_tokens_are_scored_with_kl_in_the_reward(by: Any, token_budget: int) -> None:
    algo = make_algorithm("grpo", reward_kl_coef=0.3)
    groups = untrained_and_trained()
    trained = updater(algo, token_budget=token_budget)
    model = trained.policy if by == "trainer" else trained.reference
    found = trained.scores([Row.of(rollout) for rollout in every(groups)], algo, by)
    for rollout, logprobs in zip(every(groups), found, strict=True):
        plain = full_logprobs(model, rollout.token_ids)
        assert logprobs == pytest.approx(
            [float(plain[position - 1, rollout.token_ids[position]]) for position, _ in trained_positions(rollout)],
            abs=1e-12,
        )
    algo.credit(groups, Scorers(partial(trained.ref_logprobs, algo=algo)))
    assert trained.update(groups, algo, 1e-2)["optim/grad_norm"] > 1e-4


def test_rollouts_without_trained_tokens_are_not_computed_for_scores() -> None:
    algo = make_algorithm("grpo", reward_kl_coef=0.3)
    trained = updater(algo, token_budget=10_000)
    trained.reference = cramped(0, seed=9)  # fails on any token
    assert trained.ref_logprobs(untrained_and_trained()[:1], algo) == [[], []]


@pytest.mark.filterwarnings("error")
def test_a_step_that_no_other_is_compared_with_has_advantage_0() -> None:
    groups = [*episodes([(1, 0), (1,)], groups=1, samples=2), *episodes(SOME, groups=1)]
    algo = make_algorithm("grpo", step_credit=True)
    algo.credit(groups)
    alone, other = groups[0].rollouts
    assert alone.token_advantages == [0.0] * alone.turns[1].trained and other.token_advantages == []
    assert any(rollout.learns for rollout in groups[1].rollouts)
    make_algorithm("reinforce", advantage="none", step_credit=True).credit(groups)
    assert alone.token_advantages == [alone.turns[1].reward] * alone.turns[1].trained


def learnt(mesh: Mesh, algo: Algorithm) -> tuple[list[dict[str, float]], Tensor]:
    reference = tiny_decoder(seed=9).requires_grad_(False)
    trained = updater(algo, token_budget=40, mesh=mesh)
    trained.reference = reference
    own = replace(critic(40), mesh=mesh) if algo.needs.values else None
    found = []
    for step in range(2):
        groups = episodes(seed=step)
        told = algo.credit(groups, Scorers(partial(trained.ref_logprobs, algo=algo), own.values if own else None))
        found.append(told | trained.update(groups, algo, 1e-2) | (own.learn(groups) if own else {}))
    return found, weights_of(trained.policy)


def check_ranks(mesh: Mesh) -> None:
    for recipe, settings in (("grpo", {"step_credit": True, "kl_coef": 0.2}), ("ppo", {"updates": 2})):
        algo = make_algorithm(recipe, reward_kl_coef=0.1, **settings)
        (metrics, weights), (alone, expected) = learnt(mesh, algo), learnt(Mesh(), algo)
        for row, other in zip(metrics, alone, strict=True):
            assert row == pytest.approx(other, rel=0, abs=1e-9) and row["optim/grad_norm"] > 0.01
        assert (weights - expected).abs().max() < 1e-9


@pytest.mark.slow
def test_two_ranks_learn_the_same_as_one_process() -> None:
    start(2, check_ranks)
