"""From rewards to advantages: one 1-D float64 tensor a group in, the same shapes out. Groups may differ in size.

From the rewards of an episode's steps to what is compared: discounted returns, of whole episodes or of each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from assay.types import Group, Rollout, UserError

Advantage = Callable[[list[Tensor]], list[Tensor]]

MAX_LOG_SCALE = math.log(1e6)  # of 1 / f in beta_norm
STD_EPS = 1e-4  # keeps a group of nearly equal rewards from blowing up; the value of TRL and TapeAgents


def centred(values: Tensor) -> Tensor:
    """Values minus their mean, exactly 0 where all are equal: the mean of n times 0.7 is not 0.7 in floating point."""
    if len(values) and values.min() == values.max():
        return torch.zeros_like(values)
    return values - values.mean()


def group_mean(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of its group (Dr. GRPO): a baseline, and no division that favours easy or hard prompts."""
    _require_groups(rewards, "group_mean")
    return [centred(rewards_G) for rewards_G in rewards]


def group_norm(rewards: list[Tensor]) -> list[Tensor]:
    """(reward - mean) / (std + 1e-4) within the group (GRPO), std being the unbiased one (divided by G - 1)."""
    _require_groups(rewards, "group_norm")
    return [centred(rewards_G) / (rewards_G.std() + STD_EPS) for rewards_G in rewards]


def leave_one_out(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of the *other* rewards of its group (RLOO): unbiased, as its own reward is left out."""
    _require_groups(rewards, "leave_one_out")
    return [centred(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1)) for rewards_G in rewards]


def batch_mean(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean reward of the whole batch: the classic baseline; one sample a prompt is enough."""
    if not any(map(len, rewards)):  # there may be groups with nothing but masked tokens
        return list(rewards)
    every = torch.cat(rewards)
    if len(every) == 1:
        raise UserError('advantage="batch_mean" needs at least two rollouts in a batch: raise prompts or samples.')
    return list(centred(every).split([len(rewards_G) for rewards_G in rewards]))


def batch_norm(rewards: list[Tensor]) -> list[Tensor]:
    """(reward - mean) / (std + 1e-4) over all answers of the batch: one scale for all prompts, easy or hard."""
    if not any(map(len, rewards)):  # there may be groups with nothing but masked tokens
        return list(rewards)
    every = torch.cat(rewards)
    if len(every) == 1:
        raise UserError('advantage="batch_norm" needs at least two rollouts in a batch: raise prompts or samples.')
    return list((centred(every) / (every.std() + STD_EPS)).split([len(rewards_G) for rewards_G in rewards]))


def token_norm(returns: list[Tensor], tokens: list[Tensor] | None = None) -> list[Tensor]:
    """(return - mean) / (std + 1e-4), both over all trained tokens of the batch (REINFORCE++).

    `tokens`: how many tokens have each return; one if not given, which makes it `batch_norm`.
    """
    if not any(map(len, returns)):  # there may be groups with nothing but masked tokens
        return list(returns)
    every = torch.cat(returns)
    if len(every) == 1:
        raise UserError('advantage="token_norm" needs at least two rollouts in a batch: raise prompts or samples.')
    counts = torch.ones_like(every) if tokens is None else torch.cat(tokens)
    first = every[0]  # taken off before sums are made, so that equal returns have advantages of exactly 0
    mean = (counts * (every - first)).sum() / counts.sum().clamp(min=1)
    square = (counts * (every - first - mean).square()).sum() / (counts.sum() - 1).clamp(min=1)
    return [(values - first - mean) / (square.sqrt() + STD_EPS) for values in returns]


def group_mean_token_norm(rewards: list[Tensor], tokens: list[Tensor] | None = None) -> list[Tensor]:
    """Reward minus the mean of its group, then normalised over all trained tokens (REINFORCE++-baseline)."""
    return token_norm(group_mean(rewards), tokens)


def group_mean_batch_norm(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of its group, over the std of these differences in the whole batch.

    Their mean over the batch is 0, as it is in each group.
    """
    differences = group_mean(rewards)
    scale = torch.cat(differences).std() + STD_EPS if differences else STD_EPS
    return [differences_G / scale for differences_G in differences]


def group_mean_rescaled(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of its group, times all groups / groups with unequal rewards (GPG).

    Groups without a winner have no gradient but count in the average: the factor takes them out of it again.
    """
    _require_groups(rewards, "group_mean_rescaled")
    telling = sum(bool((rewards_G != rewards_G[0]).any()) for rewards_G in rewards)
    return [centred(rewards_G) * (len(rewards) / max(telling, 1)) for rewards_G in rewards]


def beta_norm(rewards: list[Tensor]) -> list[Tensor]:
    """(reward - p) / f(p), p being the mean reward of the group and f a Beta density fitted to the batch (BNPO).

    With p ~ Beta(a, b) over prompts and rewards of 0 or 1, Beta(1 + a/3, 1 + b/3) is the f that makes the variance of
    the gradient smallest. a and b are those with the mean and variance of the batch's p. Where there is no such Beta
    (all p alike, or all 0 and 1), f is 1: nothing but the group's mean is taken off. As in the authors' code, the
    variance is the unbiased one, and 1 / f is at most 1e6: far from the mean of a narrow Beta, f underflows.
    Rewards are read as fractions of success. Where some of the batch lie outside of [0, 1], all are mapped to it
    linearly: the lowest, or 0 if that is lower, to 0; the highest, or 1 if that is higher, to 1.
    """
    _require_groups(rewards, "beta_norm")
    if not rewards:
        return []
    low, high = min(0.0, *(float(r.min()) for r in rewards)), max(1.0, *(float(r.max()) for r in rewards))
    rewards = [(rewards_G - low) / (high - low) for rewards_G in rewards]
    p = torch.stack([rewards_G.mean() for rewards_G in rewards])
    mean, variance = float(p.mean()), float(p.var()) if len(p) > 1 else 0.0
    size = mean * (1 - mean) / variance - 1 if variance > 1e-12 else 0.0  # a + b
    alpha, beta = 1 + max(size, 0.0) * mean / 3, 1 + max(size, 0.0) * (1 - mean) / 3
    inside = p.clamp(1e-12, 1 - 1e-12)  # at 0 and 1 every reward is p, and 0 over anything is 0
    log_density = (alpha - 1) * inside.log() + (beta - 1) * (1 - inside).log()
    log_density += math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    scales = (-log_density).clamp(max=MAX_LOG_SCALE).exp()
    return [centred(rewards_G) * scale for rewards_G, scale in zip(rewards, scales, strict=True)]


def none(rewards: list[Tensor]) -> list[Tensor]:
    """The rewards themselves, without a baseline."""
    return [rewards_G.clone() for rewards_G in rewards]


ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "group_norm": group_norm,
    "leave_one_out": leave_one_out,
    "batch_mean": batch_mean,
    "batch_norm": batch_norm,
    "token_norm": token_norm,
    "group_mean_batch_norm": group_mean_batch_norm,
    "group_mean_token_norm": group_mean_token_norm,
    "group_mean_rescaled": group_mean_rescaled,
    "beta_norm": beta_norm,
    "none": none,
}

# These compare the samples of one prompt with each other, so a single sample teaches them nothing.
GROUP_BASELINES = (
    *(group_mean, group_norm, leave_one_out, group_mean_batch_norm, group_mean_token_norm),
    *(group_mean_rescaled, beta_norm),
)

# These take statistics over tokens, so they also have to know how many tokens have each reward.
BY_TOKEN: dict[str, Callable[[list[Tensor], list[Tensor]], list[Tensor]]] = {
    "token_norm": token_norm,
    "group_mean_token_norm": group_mean_token_norm,
}

# These can be given returns of single tokens as well.
POOLED = (token_norm,)

# These are rewards less a baseline: what single tokens are given on top is in the same units.
UNSCALED = (group_mean, leave_one_out, batch_mean, none)


def _require_groups(rewards: list[Tensor], name: str) -> None:
    if any(len(rewards_G) < 2 for rewards_G in rewards):
        raise group_size_error(name)


def group_size_error(name: str) -> UserError:
    return UserError(
        f'advantage="{name}" compares the samples of one prompt and needs at least two of them: '
        'raise samples to 2 or more, or pick advantage="batch_mean".'
    )


def returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """For each step, its reward and all that follow, each later one multiplied by `discount` once more."""
    found: list[float] = []
    after = 0.0
    for reward in reversed(rewards):
        after = reward + discount * after
        found.append(after)
    return found[::-1]


def step_rewards(rollout: Rollout, whole: float | None = None) -> list[float]:
    """Rewards of its turns; what the whole got beyond them (a verdict, a length punishment) came with the last one."""
    rewards = [turn.reward for turn in rollout.turns]
    rewards[-1] += (rollout.reward if whole is None else whole) - sum(rewards)
    return rewards


def token_rewards(rollout: Rollout, prices: Sequence[float] | None = None) -> list[float]:
    """What comes with each of its tokens in the loss: a step's reward with the last one of it.

    That of a masked step comes with the last one before it; before the first there is none that could have earned it.
    `prices`: of single tokens, which `rollout.reward` has paid in all; here each pays its own.
    """
    rewards = [0.0] * rollout.trained
    trained = 0
    for turn, reward in zip(rollout.turns, step_rewards(rollout), strict=True):
        trained += turn.trained
        if trained:
            rewards[trained - 1] += reward
    if rewards and prices is not None:
        rewards[-1] += sum(prices)
        rewards = [reward - price for reward, price in zip(rewards, prices, strict=True)]
    return rewards


def credited_returns(group: Group, discount: float = 1.0, by_step: bool = False) -> list[float]:
    """What an advantage function compares within a group.

    One return for each episode; or, `by_step`, one for each step of each episode, so that a step is compared with all
    steps of all samples of its group, as in Kevin (arXiv 2507.11948). Masked steps are none of these.
    """
    return [value for r in group.rollouts for value in compared_returns(r, r.reward, discount, by_step)]


def credited_tokens(group: Group, by_step: bool = False) -> list[int]:
    """How many trained tokens have each of the `credited_returns`."""
    if not by_step:
        return [rollout.trained for rollout in group.rollouts]
    return [turn.trained for rollout in group.rollouts for turn in rollout.turns if not turn.masked]


def compared_returns(rollout: Rollout, whole: float, discount: float, by_step: bool) -> list[float]:
    """The return of one episode that got `whole` in all, or, `by_step`, those of its steps that are in the loss."""
    if not by_step and discount == 1.0:
        return [whole]
    found = returns(step_rewards(rollout, whole), discount)
    if not by_step:
        return found[:1]
    return [value for value, turn in zip(found, rollout.turns, strict=True) if not turn.masked]


def any_masked(group: Group) -> bool:
    return any(turn.masked for rollout in group.rollouts for turn in rollout.turns)


def give_advantages(group: Group, advantages: Sequence[float], by_step: bool = False) -> None:
    """In the order of `credited_returns`. A step's is that of its tokens; a rollout's own that of its first."""
    coming: Iterator[float] = iter(advantages)
    for rollout in group.rollouts:
        turns = [turn for turn in rollout.turns if not turn.masked]
        steps = [next(coming) for _ in (turns if by_step else range(1))]
        rollout.advantage, rollout.token_advantages = (steps or [0.0])[0], None
        if by_step:
            each = zip(steps, turns, strict=True)
            rollout.token_advantages = [value for value, turn in each for _ in turn.completion.token_ids]
