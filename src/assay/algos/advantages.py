"""Returns of episodes and steps, and the functions that turn them into advantages.

An advantage function takes one 1-D float64 tensor per group and returns tensors of the same shapes. Groups may differ
in size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from assay.types import Group, Rollout, UserError

Advantage = Callable[..., list[Tensor]]  # of rewards: list[Tensor], and token counts if it has that trait
Trait = Literal[
    "compares_group",  # compares the samples of one prompt, so it needs at least two
    "compares_batch",  # compares the samples of the whole batch, so it needs at least two in all
    "token_counts",  # its statistics are over tokens: the second argument is the number of tokens with each reward
    "accepts_tokens",  # may also be called with returns of single tokens
    "unscaled",  # rewards minus a baseline: penalties of single tokens can be added in the same units
]
ADVANTAGES: dict[str, Advantage] = {}  # by name, filled by `@advantage`
TRAITS: dict[Advantage, tuple[Trait, ...]] = {}

MAX_LOG_SCALE = math.log(1e6)  # largest log(1 / f) in beta_norm
STD_EPS = 1e-4  # bounds the advantages of nearly equal rewards; the same value as in TRL and TapeAgents


def advantage(*traits: Trait) -> Callable[[Advantage], Advantage]:
    """Register an advantage function under its name."""

    def register(function: Advantage) -> Advantage:
        @wraps(function)
        def checked(rewards: list[Tensor], *args: list[Tensor] | None) -> list[Tensor]:
            if "compares_group" in traits and any(len(rewards_G) < 2 for rewards_G in rewards):
                raise group_size_error(function.__name__)
            if "compares_batch" in traits and not any(map(len, rewards)):  # all tokens of all groups may be masked
                return list(rewards)
            if "compares_batch" in traits and sum(map(len, rewards)) == 1:
                raise UserError(
                    f'advantage="{function.__name__}" needs at least two rollouts in a batch: raise prompts or samples.'
                )
            return function(rewards, *args)

        ADVANTAGES[function.__name__] = checked
        TRAITS[checked] = traits
        return checked

    return register


def group_size_error(name: str) -> UserError:
    return UserError(
        f'algo.advantage = "{name}" compares the samples of one prompt and needs at least two of them: '
        'raise train.samples to 2 or more, or set algo.advantage = "batch_mean".'
    )


def centred(values: Tensor) -> Tensor:
    """Values minus their mean, exactly 0 where all are equal: the mean of n times 0.7 is not 0.7 in floating point."""
    if len(values) and values.min() == values.max():
        return torch.zeros_like(values)
    return values - values.mean()


@advantage("compares_group", "unscaled")
def group_mean(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of its group (Dr. GRPO). Without division by the std, which over-weights some prompts."""
    return [centred(rewards_G) for rewards_G in rewards]


@advantage("compares_group")
def group_norm(rewards: list[Tensor]) -> list[Tensor]:
    """(reward - mean) / (std + 1e-4) within the group (GRPO), with the unbiased std (divided by G - 1)."""
    return [centred(rewards_G) / (rewards_G.std() + STD_EPS) for rewards_G in rewards]


@advantage("compares_group", "unscaled")
def leave_one_out(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of the *other* rewards of its group (RLOO), an unbiased baseline."""
    return [centred(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1)) for rewards_G in rewards]


@advantage("compares_batch", "unscaled")
def batch_mean(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean reward of the whole batch: the classic baseline; one sample per prompt is enough."""
    return list(centred(torch.cat(rewards)).split([len(rewards_G) for rewards_G in rewards]))


@advantage("compares_batch")
def batch_norm(rewards: list[Tensor]) -> list[Tensor]:
    """(reward - mean) / (std + 1e-4) over all answers of the batch: one scale for all prompts, easy or hard."""
    every = torch.cat(rewards)
    return list((centred(every) / (every.std() + STD_EPS)).split([len(rewards_G) for rewards_G in rewards]))


@advantage("compares_batch", "token_counts", "accepts_tokens")
def token_norm(returns: list[Tensor], tokens: list[Tensor] | None = None) -> list[Tensor]:
    """(return - mean) / (std + 1e-4), both over all trained tokens of the batch (REINFORCE++).

    `tokens`: number of trained tokens with each return; default 1, which is equivalent to `batch_norm`. A return
    without trained tokens has advantage 0.
    """
    every = torch.cat(returns)
    counts = torch.ones_like(every) if tokens is None else torch.cat(tokens)
    # One trained return is subtracted before summing, so that equal returns give advantages of exactly 0.
    shifted = every - every[counts.argmax()]
    mean = (counts * shifted).sum() / counts.sum().clamp(min=1)
    square = (counts * (shifted - mean).square()).sum() / (counts.sum() - 1).clamp(min=1)
    advantages = torch.where(counts > 0, (shifted - mean) / (square.sqrt() + STD_EPS), 0.0)
    return list(advantages.split([len(values) for values in returns]))


@advantage("compares_group", "token_counts")
def group_mean_token_norm(rewards: list[Tensor], tokens: list[Tensor] | None = None) -> list[Tensor]:
    """Reward minus the mean of its group, then normalised over all trained tokens (REINFORCE++-baseline)."""
    return token_norm(group_mean(rewards), tokens)


@advantage("compares_group")
def group_mean_batch_norm(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of its group, divided by the std of these differences over the batch.

    The mean over the batch is 0 because it is 0 in each group.
    """
    differences = group_mean(rewards)
    scale = torch.cat(differences).std() + STD_EPS if differences else STD_EPS
    return [differences_G / scale for differences_G in differences]


@advantage("compares_group")
def group_mean_rescaled(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of its group, times all groups / groups with unequal rewards (GPG).

    Groups with equal rewards have no gradient but count in the average. The factor compensates for them.
    """
    informative = sum(bool((rewards_G != rewards_G[0]).any()) for rewards_G in rewards)
    return [centred(rewards_G) * (len(rewards) / max(informative, 1)) for rewards_G in rewards]


@advantage("compares_group")
def beta_norm(rewards: list[Tensor]) -> list[Tensor]:
    """(reward - p) / f(p), where p is the mean reward of the group and f a Beta density fitted to the batch (BNPO).

    With p ~ Beta(a, b) over prompts and rewards of 0 or 1, f = Beta(1 + a/3, 1 + b/3) minimises the variance of the
    gradient. a and b are fitted to the mean and variance of p over the batch. If no Beta fits (all p are equal, or all
    are 0 or 1), f is 1 and only the group mean is subtracted. As in the authors' code, the variance is unbiased and
    1 / f is at most 1e6, because f underflows far from the mean of a narrow Beta.
    Rewards are interpreted as success rates. If some rewards of the batch are outside of [0, 1], all are mapped to it
    linearly: the minimum of 0 and the rewards to 0, the maximum of 1 and the rewards to 1.
    """
    if not rewards:
        return []
    low, high = min(0.0, *(float(r.min()) for r in rewards)), max(1.0, *(float(r.max()) for r in rewards))
    rewards = [(rewards_G - low) / (high - low) for rewards_G in rewards]
    p = torch.stack([rewards_G.mean() for rewards_G in rewards])
    mean, variance = float(p.mean()), float(p.var()) if len(p) > 1 else 0.0
    size = mean * (1 - mean) / variance - 1 if variance > 1e-12 else 0.0  # a + b
    alpha, beta = 1 + max(size, 0.0) * mean / 3, 1 + max(size, 0.0) * (1 - mean) / 3
    inside = p.clamp(1e-12, 1 - 1e-12)  # at p = 0 and p = 1 every centred reward is 0
    log_density = (alpha - 1) * inside.log() + (beta - 1) * (1 - inside).log()
    log_density += math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    scales = (-log_density).clamp(max=MAX_LOG_SCALE).exp()
    return [centred(rewards_G) * scale for rewards_G, scale in zip(rewards, scales, strict=True)]


@advantage("unscaled")
def none(rewards: list[Tensor]) -> list[Tensor]:
    """The rewards themselves, without a baseline."""
    return [rewards_G.clone() for rewards_G in rewards]


def returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """The discounted return of each step: its reward plus `discount` times the return of the next step."""
    following = accumulate(reversed(rewards), lambda later, reward: reward + discount * later, initial=0.0)
    return [*following][:0:-1]


def step_rewards(rollout: Rollout, whole: float | None = None) -> list[float]:
    """Reward of each turn. The rest of the total (a verdict, a length penalty) is added to the last turn."""
    rewards = [turn.reward for turn in rollout.turns]
    rewards[-1] += (rollout.reward if whole is None else whole) - sum(rewards)
    return rewards


def token_rewards(rollout: Rollout, penalties: Sequence[float] | None = None) -> list[float]:
    """The reward of each trained token: the reward of a step is given to its last token.

    The reward of a masked step is given to the last trained token before it, and dropped if there is none.
    `penalties`: of each token. `rollout.reward` already contains their sum, which is replaced by the single penalties.
    """
    rewards = [0.0] * rollout.trained
    trained = 0
    for turn, reward in zip(rollout.turns, step_rewards(rollout), strict=True):
        trained += turn.trained
        if trained:
            rewards[trained - 1] += reward
    if rewards and penalties is not None:
        rewards[-1] += sum(penalties)
        rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    return rewards


def credited_returns(group: Group, discount: float = 1.0, by_step: bool = False) -> list[float]:
    """The returns of a group that an advantage function compares.

    One return per episode, or, with `by_step`, one per step: then a step is compared with all steps of all samples of
    its group, as in Kevin (arXiv 2507.11948). Masked steps and rollouts that were not judged are excluded.
    """
    return [value for r in group.judged for value in compared_returns(r, r.reward, discount, by_step)]


def credited_tokens(group: Group, by_step: bool = False) -> list[int]:
    """Number of trained tokens for each of the `credited_returns`; 0 in masked rollouts."""
    counts = [
        [turn.trained for turn in rollout.turns if not turn.masked] if by_step else [rollout.trained]
        for rollout in group.judged
    ]
    return [0 if r.masked else count for r, values in zip(group.judged, counts, strict=True) for count in values]


def compared_returns(rollout: Rollout, whole: float, discount: float, by_step: bool) -> list[float]:
    """The return of an episode with total reward `whole`, or, with `by_step`, the returns of its unmasked steps."""
    if not by_step and discount == 1.0:
        return [whole]
    values = returns(step_rewards(rollout, whole), discount)
    if not by_step:
        return values[:1]
    return [value for value, turn in zip(values, rollout.turns, strict=True) if not turn.masked]


def any_excluded(group: Group, by_step: bool) -> bool:
    """Whether the group has rollouts or, with `by_step`, steps that are not compared."""
    masked = by_step and any(turn.masked for rollout in group.rollouts for turn in rollout.turns)
    return masked or any(rollout.failed for rollout in group.rollouts)


def set_advantages(group: Group, advantages: Sequence[float], by_step: bool = False) -> None:
    """Set advantages in the order of `credited_returns`. A rollout's own advantage is the advantage of its first step.

    The advantage of a rollout that was not judged is 0.
    """
    remaining: Iterator[float] = iter(advantages)
    for rollout in group.rollouts:
        if rollout.failed:
            rollout.advantage, rollout.token_advantages = 0.0, [0.0] * rollout.trained if by_step else None
            continue
        turns = [turn for turn in rollout.turns if not turn.masked]
        steps = [next(remaining) for _ in (turns if by_step else range(1))]
        rollout.advantage, rollout.token_advantages = (steps or [0.0])[0], None
        if by_step:
            each = zip(steps, turns, strict=True)
            rollout.token_advantages = [value for value, turn in each for _ in turn.completion.token_ids]
