"""From rewards to advantages: one 1-D float64 tensor a group in, the same shapes out. Groups may differ in size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from assay.types import UserError

Advantage = Callable[[list[Tensor]], list[Tensor]]

STD_EPS = 1e-4  # keeps a group of nearly equal rewards from blowing up; the value of TRL and TapeAgents


def group_mean(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of its group (Dr. GRPO): a baseline, and no division that favours easy or hard prompts."""
    _require_groups(rewards, "group_mean")
    return [rewards_G - rewards_G.mean() for rewards_G in rewards]


def group_norm(rewards: list[Tensor]) -> list[Tensor]:
    """(reward - mean) / (std + 1e-4) within the group (GRPO), std being the unbiased one (divided by G - 1)."""
    _require_groups(rewards, "group_norm")
    return [(rewards_G - rewards_G.mean()) / (rewards_G.std() + STD_EPS) for rewards_G in rewards]


def leave_one_out(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean of the *other* rewards of its group (RLOO): unbiased, as its own reward is left out."""
    _require_groups(rewards, "leave_one_out")
    return [(rewards_G - rewards_G.mean()) * (len(rewards_G) / (len(rewards_G) - 1)) for rewards_G in rewards]


def batch_mean(rewards: list[Tensor]) -> list[Tensor]:
    """Reward minus the mean reward of the whole batch: the classic baseline; one sample a prompt is enough."""
    if not rewards:
        return []
    baseline = torch.cat(rewards)
    if len(baseline) == 1:
        raise UserError('advantage="batch_mean" needs at least two rollouts in a batch: raise prompts or samples.')
    return [rewards_G - baseline.mean() for rewards_G in rewards]


def none(rewards: list[Tensor]) -> list[Tensor]:
    """The rewards themselves, without a baseline."""
    return [rewards_G.clone() for rewards_G in rewards]


ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "group_norm": group_norm,
    "leave_one_out": leave_one_out,
    "batch_mean": batch_mean,
    "none": none,
}

# These compare the samples of one prompt with each other, so a single sample teaches them nothing.
GROUP_BASELINES = (group_mean, group_norm, leave_one_out)


def _require_groups(rewards: list[Tensor], name: str) -> None:
    if any(len(rewards_G) < 2 for rewards_G in rewards):
        raise group_size_error(name)


def group_size_error(name: str) -> UserError:
    return UserError(
        f'advantage="{name}" compares the samples of one prompt and needs at least two of them: '
        'raise samples to 2 or more, or pick advantage="batch_mean".'
    )
